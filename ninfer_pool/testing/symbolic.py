"""An engine whose KV rows and images are digests, so that any wrong restore shows at once.

A row of a page holds two digests. *Content* is of the namespace, of every token up to it and of
their attributes. *Bits* is of the content and of the shapes of the prefill calls that made it:
the rows of a matrix product depend on their number. An image holds its lane's whole chain
of rows. Every read compares: a page of another computation, a state one token off, a recycled
page or a forgotten media digest raises `EngineFault` where it is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ninfer_pool.core import radix
from ninfer_pool.core.config import PoolConfig
from ninfer_pool.core.identity import Namespace
from ninfer_pool.core.lease import Lease
from ninfer_pool.core.ledger import Pages
from ninfer_pool.core.operations import CopyPage, LoadImage, Operation, ResetLane, SaveImage
from ninfer_pool.core.planner import canonical_cuts
from ninfer_pool.core.pool import PrefixPool
from ninfer_pool.core.prompt import Prompt


class EngineFault(AssertionError):
    """A restored row or state is not the one that the request computed."""


class Cell(NamedTuple):
    """What one row of a page holds."""

    content: bytes
    bits: bytes


class ImagePart(NamedTuple):
    """What one page of an image holds: the whole chain, and which part of the image it is."""

    chain: tuple[Cell, ...]
    part: int
    parts: int


def digest(*parts: bytes | int) -> bytes:
    """Return 16 bytes that stand for ``parts``."""
    raw = b"".join(b"%d:" % p if isinstance(p, int) else b"%d|%s" % (len(p), p) for p in parts)
    return hashlib.blake2b(raw, digest_size=16).digest()


def seed(namespace: Namespace | None) -> Cell:
    """Return the state of a lane before its first token."""
    start = digest(repr(namespace).encode())
    return Cell(start, start)


def extend_chain(
    chain: list[Cell],
    tokens: Iterable[int],
    *,
    attributes: dict[int, bytes],
    start: Cell,
    shape: bytes,
) -> None:
    """Append the cells of ``tokens``, computed in one call of that shape."""
    for token in tokens:
        last = chain[-1] if chain else start
        content = digest(last.content, int(token), attributes.get(len(chain), b""))
        chain.append(Cell(content, digest(last.bits, shape, content)))


def cold_chain(
    prompt: Prompt, *, config: PoolConfig, tokens: Sequence[int] | None = None
) -> list[Cell]:
    """Return the cells of a cold run of ``prompt`` by its canonical cuts alone."""
    values = prompt.tokens.tolist() if tokens is None else list(tokens)
    cuts = canonical_cuts(prompt.boundaries, grid=config.grid, min_chunk=config.min_chunk)
    ends = sorted({*cuts, *range(config.grid, len(values), config.grid), len(values)})
    chain: list[Cell] = []
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        extend_chain(
            chain,
            values[begin:end],
            attributes=dict(prompt.attributes),
            start=seed(prompt.namespace),
            shape=b"%d-%d" % (begin, end),
        )
    return chain


class SymbolicEngine:
    """Executes operations on symbolic pages and lanes.

    Args:
        config: the pool's.
        namespace: of every lane that `bind` did not name.
        answer: token ids that `decode` yields; None: eight that follow from the logits.
    """

    def __init__(
        self,
        config: PoolConfig,
        *,
        namespace: Namespace | None = None,
        answer: Sequence[int] | None = None,
    ) -> None:
        self.config = config
        self.namespace = namespace
        self.answer = answer
        self.prefilled = 0
        """Tokens that `prefill` was given, in all."""
        self._pages: list[dict[int, Cell] | ImagePart] = [{} for _ in range(config.num_pages)]
        self._lanes: dict[int, list[Cell]] = {lane: [] for lane in range(config.lanes)}
        self._prompts: dict[int, Prompt] = {}

    def bind(self, lane: int, prompt: Prompt) -> None:
        """Set the lane's namespace, and its tokens' media, positions and types, by a prompt."""
        self._prompts[lane] = prompt

    def execute(self, operations: Iterable[Operation]) -> None:
        """Carry out what the pool asked for, in order."""
        for operation in operations:
            if isinstance(operation, CopyPage):
                page = self._pages[operation.source]
                self._pages[operation.target] = page if isinstance(page, ImagePart) else dict(page)
            elif isinstance(operation, SaveImage):
                chain, parts = tuple(self._lanes[operation.lane]), len(operation.pages)
                for part, page_id in enumerate(operation.pages):
                    self._pages[page_id] = ImagePart(chain, part, parts)
            elif isinstance(operation, LoadImage):
                self._lanes[operation.lane] = list(self.image(operation.pages))
            else:
                assert isinstance(operation, ResetLane)
                self._lanes[operation.lane] = []

    def image(self, pages: Sequence[int]) -> tuple[Cell, ...]:
        """Return the chain that an image holds.

        Raises:
            EngineFault: its pages are not the parts of one image, in order.
        """
        parts = [self._pages[page] for page in pages]
        for number, part in enumerate(parts):
            if not isinstance(part, ImagePart):
                raise EngineFault(f"page {pages[number]} holds no part of an image")
            if part[1:] != (number, len(pages)) or part.chain != parts[0][0]:
                raise EngineFault(f"page {pages[number]} holds another image's part")
        first = parts[0]
        assert isinstance(first, ImagePart)
        return first.chain

    def rows(self, pages: Pages, count: int) -> list[Cell | None]:
        """Return the first ``count`` rows behind a row of the page table."""
        size = self.config.page_tokens
        found: list[Cell | None] = []
        for position in range(count):
            page = self._pages[int(pages[position // size])]
            found.append(None if isinstance(page, ImagePart) else page.get(position % size))
        return found

    def prefill(self, tokens: Any, pages: Pages, begin: int, lane: int) -> bytes:
        """Compute ``tokens`` from position ``begin`` on in one call; return logits."""
        self._write(tokens, pages, begin, lane, b"%d-%d" % (begin, begin + len(tokens)))
        self.prefilled += len(tokens)
        return self.tail_logits(lane)

    def decode(self, logits: bytes, lease: Lease) -> Iterator[int]:
        """Yield each token once its KV and state are written."""
        for number in range(8 if self.answer is None else len(self.answer)):
            token = logits[0] if self.answer is None else self.answer[number]
            self.step(token, lease.pages, lease.lane)
            yield token
            logits = self.tail_logits(lease.lane)

    def step(self, token: int, pages: Pages, lane: int) -> None:
        """Decode one token at the lane's position."""
        self._write([token], pages, self.position(lane), lane, b"decode")

    def roll_back(self, lane: int, position: int) -> None:
        """Take the lane's own state back to ``position`` (rejected drafts)."""
        del self._lanes[lane][position:]

    def position(self, lane: int) -> int:
        """Return where the lane's state stands."""
        return len(self._lanes[lane])

    def tail_logits(self, lane: int) -> bytes:
        """Return the next token by the lane's state."""
        chain = self._lanes[lane]
        return digest(chain[-1].content if chain else b"")

    def poison(self, pages: Iterable[int]) -> None:
        """Make the content of pages that are free unusable."""
        for page in pages:
            self._pages[page] = {}

    def chain(self, lane: int) -> list[Cell]:
        """Return the cells that the lane has computed or restored."""
        return self._lanes[lane]

    def verify(self, lease: Lease) -> None:
        """Check that what a lease restored is what its prompt means, bit by bit where exact.

        Raises:
            EngineFault: names the first wrong position.
        """
        prompt, chain = lease.prompt, self._lanes[lease.lane]
        if not self.config.image_bytes and lease.start:
            chain = [cell or Cell(b"", b"") for cell in self.rows(lease.pages, lease.start)]
        wanted = cold_chain(prompt, config=self.config)[: lease.start]
        if len(chain) != lease.start:
            raise EngineFault(f"the image stands at {len(chain)}, the lease at {lease.start}")
        self._compare(self.rows(lease.pages, lease.start), chain)
        for position, (mine, cold) in enumerate(zip(chain, wanted, strict=True)):
            if mine.content != cold.content:
                raise EngineFault(f"position {position} is another prompt's")
            if lease.exact and mine.bits != cold.bits:
                raise EngineFault(f"position {position} has not the bits of a cold run")

    def _write(
        self, tokens: Sequence[int], pages: Pages, begin: int, lane: int, shape: bytes
    ) -> None:
        if not self.config.image_bytes:
            found = self.rows(pages, begin)
            self._lanes[lane] = [cell or Cell(b"", b"") for cell in found]
        chain, size = self._lanes[lane], self.config.page_tokens
        if len(chain) != begin:
            raise EngineFault(f"lane {lane} stands at {len(chain)}, asked to write at {begin}")
        self._compare(self.rows(pages, begin), chain)
        prompt = self._prompts.get(lane)
        extend_chain(
            chain,
            tokens,
            attributes=dict(prompt.attributes) if prompt else {},
            start=seed(prompt.namespace if prompt else self.namespace),
            shape=shape,
        )
        for position in range(begin, len(chain)):
            page_id = int(pages[position // size])
            page = self._pages[page_id]
            if isinstance(page, ImagePart):
                page = self._pages[page_id] = {}
            page[position % size] = chain[position]

    def _compare(self, rows: Sequence[Cell | None], chain: Sequence[Cell]) -> None:
        for position, (row, cell) in enumerate(zip(rows, chain, strict=True)):
            if row != cell:
                what = "nothing" if row is None else "another computation"
                raise EngineFault(f"the KV row at {position} holds {what}")


def audit(pool: PrefixPool, engine: SymbolicEngine) -> int:
    """Check every retained checkpoint against the tokens that it is indexed under (G5, G11).

    Poisons the free pages on the way, so that a reader of one is detected.
    Returns the number of checkpoints seen.

    Raises:
        EngineFault: names what a checkpoint's pages hold instead.
    """
    state, seen = pool.state, 0
    engine.poison(state.ledger.free_pages().tolist())
    for namespace, root in state.catalog.roots.items():
        for node in root.subtree():
            for mark in node.checkpoints:
                raw = memoryview(radix.tokens_to(node, mark.position)).cast("i").tolist()
                carried = dict(radix.attributes_to(node, mark.position))
                chain: list[Cell] = []
                extend_chain(chain, raw, attributes=carried, start=seed(namespace), shape=b"")
                rows = engine.rows(mark.kv_pages(pool.config.page_tokens), mark.position)
                held = [row.content if row else None for row in rows]
                if held != [cell.content for cell in chain]:
                    raise EngineFault(f"{mark!r}: its KV rows are not its tokens'")
                if mark.image >= 0:
                    image = engine.image(state.ledger.pages_of_image(mark.image).tolist())
                    if list(image) != rows:
                        raise EngineFault(f"{mark!r}: image and KV are of two computations")
                seen += 1
    return seen
