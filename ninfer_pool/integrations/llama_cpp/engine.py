"""llama.cpp as an engine of the pool: a slab of host pages next to the library's own memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from ninfer_pool.core.config import PoolConfig
from ninfer_pool.core.ledger import Pages
from ninfer_pool.errors import ConfigError
from ninfer_pool.integrations.llama_cpp.identity import namespace_of
from ninfer_pool.integrations.llama_cpp.lanes import Bytes, Lane, Logits, addressed, standing
from ninfer_pool.integrations.llama_cpp.layout import HEAD, StateLayout
from ninfer_pool.integrations.llama_cpp.sequences import (
    PARTIAL,
    LibraryError,
    RestoreError,
    Sequences,
)

PAGE_TOKENS = 64
FLOATS = ("0", "1", "32")
"""File types whose weights are not quantized. The library's own logits depend on the number of
rows in a call: by 1.4 % (RMS) with quantized weights, by 1e-5 without."""
PROBE = 3
"""Tokens of the probe from which the layout is read."""


class LlamaEngine:
    """Fulfils `ninfer_pool.testing.adapter.EngineAdapter` with a llama.cpp context of its own.

    A page holds the keys and values of 64 positions in all attention layers, in the library's
    own bytes, for every KV type. An image holds the recurrent part of the state and the logits
    after it, so that a prompt can be resumed at its very end. A model without recurrent layers
    has no image: any position can be resumed.

    The library copies a sequence's state only whole. Each checkpoint therefore copies all of the
    sequence's KV out and writes its new pages; a restore from pages copies it in once. 1,800
    tokens of SmolLM2-135M (f16, 39 MB) on one thread: 0.1 s out, 0.4 s where every page is new,
    0.05 to 0.15 s in, against 20 s to compute them. KV that this or another lane still holds
    needs no copy: only the recurrent part is restored. In addition to the slab each lane takes
    ``n_ctx`` cells of the library's memory, and each restore one temporary copy.

    Not thread-safe.

    Args:
        pool_bytes: size of the slab.
        lanes: sequences, each with ``n_ctx`` cells in the library's memory.
        grid: tokens between the cuts of a prefill; None: the library's batch.
        pool: further fields of `PoolConfig`.

    Raises:
        ConfigError: a model whose state cannot be split, or sizes that do not fit.
    """

    def __init__(
        self,
        llama: llama_cpp.Llama,
        *,
        pool_bytes: int,
        lanes: int = 1,
        n_ctx: int | None = None,
        grid: int | None = None,
        **pool: Any,
    ) -> None:
        n_ctx = llama.n_ctx() if n_ctx is None else n_ctx
        if type(n_ctx) is not int or n_ctx < PAGE_TOKENS:
            raise ConfigError(f"n_ctx: {n_ctx!r}; needs an int of {PAGE_TOKENS} or more")
        most = llama_cpp.llama_max_parallel_sequences()
        if type(lanes) is not int or not 1 <= lanes <= most:
            raise ConfigError(f"lanes: {lanes!r}; needs an int of 1 to the library's {most}")
        self.sequences = Sequences(llama, lanes=lanes, n_ctx=n_ctx)
        try:
            self.layout, self._state_bytes = self._probe()
            self.config = self._sizes(pool_bytes, grid, pool)
            self.namespace = namespace_of(llama, n_ctx=n_ctx)
        except BaseException:
            self.sequences.close()
            raise
        self.vocab_size = self.sequences.vocab_size
        self.tolerance = 1e-3 if llama.metadata.get("general.file_type") in FLOATS else 5e-2
        shape = (self.config.num_pages, self.config.page_bytes)
        self.slab: Bytes = np.zeros(shape, dtype=np.uint8)
        self._versions = np.zeros(self.config.num_pages, dtype=np.int64)
        self._newest = 0
        self._lanes = [Lane() for _ in range(lanes)]

    def _probe(self) -> tuple[StateLayout, int]:
        """Compute a few tokens in the last lane; return the layout and the bytes of its state."""
        sequences, lane = self.sequences, self.sequences.lanes - 1
        sequences.decode(lane, [0] * PROBE, 0)
        whole = sequences.take(lane)
        image = sequences.take(lane, PARTIAL) if sequences.hybrid else whole[:HEAD]
        tail = image[HEAD:]
        layout = StateLayout.read(whole, count=PROBE, tail=tail.size, page_tokens=PAGE_TOKENS)
        page = np.zeros((1, layout.page_bytes), dtype=np.uint8)
        layout.to_pages(whole, page, [0], begin=0)
        again = layout.from_pages(
            page, [0], count=PROBE, streams=sequences.lanes, sequence=lane, tail=tail
        )
        if not np.array_equal(whole, again):
            raise ConfigError("state: split and rebuilt its bytes differ; not supported")
        sequences.put(lane, again)
        sequences.clear(lane)
        return layout, image.size if sequences.hybrid else 0

    def _sizes(self, pool_bytes: int, grid: int | None, pool: dict[str, Any]) -> PoolConfig:
        sequences, page_bytes = self.sequences, self.layout.page_bytes
        if type(pool_bytes) is not int or pool_bytes < page_bytes:
            raise ConfigError(f"pool_bytes: {pool_bytes!r}; needs an int of {page_bytes} or more")
        grid = sequences.n_batch if grid is None else grid
        if type(grid) is not int or not 1 <= grid <= sequences.n_batch:
            raise ConfigError(f"grid: {grid!r}; needs an int of 1 to n_batch {sequences.n_batch}")
        hybrid = self._state_bytes > 0
        return PoolConfig(
            num_pages=pool_bytes // page_bytes,
            page_bytes=page_bytes,
            image_bytes=self._state_bytes + 4 * sequences.vocab_size if hybrid else 0,
            lanes=sequences.lanes,
            page_tokens=PAGE_TOKENS,
            end_logits=hybrid,
            grid=grid,
            **pool,
        )

    def close(self) -> None:
        """Free the library's context."""
        self.sequences.close()

    # -- computing ---------------------------------------------------------------------------

    def prefill(
        self, tokens: npt.NDArray[np.int32], *, lane: int, begin: int, table: Pages
    ) -> Logits:
        """Compute positions from ``begin`` on and write their pages; see `EngineAdapter`.

        Returns the logits after the last token, fp32 (vocab,).
        """
        logits = self.compute(tokens, lane=lane, begin=begin, table=table)
        self.write_pages(lane, table)
        return logits

    def decode(self, token: int, *, lane: int, begin: int, table: Pages) -> Logits:
        """Compute one token at ``begin`` and write its page; see `EngineAdapter`."""
        return self.prefill(np.array([token], "i4"), lane=lane, begin=begin, table=table)

    def compute(
        self, tokens: npt.NDArray[np.int32], *, lane: int, begin: int, table: Pages
    ) -> Logits:
        """Compute positions from ``begin`` on in the library; `write_pages` writes them later."""
        tokens = np.asarray(tokens)
        self._check_tokens(tokens, begin)
        self.ready(lane, begin=begin, table=table, fork=True)
        try:
            self._run(lane, tokens.tolist(), at_once=self.sequences.n_batch)
        except BaseException:
            self._forget(lane)
            raise
        return self.tail_logits(lane)

    def _run(self, lane: int, tokens: list[int], *, at_once: int) -> None:
        held = self._lanes[lane]
        for begin in range(0, len(tokens), at_once):
            part = tokens[begin : begin + at_once]
            held.moved(part, self.sequences.decode(lane, part, held.position))

    def _check_tokens(self, tokens: npt.NDArray[np.int32], begin: int) -> None:
        """Raise `LibraryError` before a change for tokens that the library would reject midway."""
        if not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            raise LibraryError(f"tokens: outside 0 to {self.vocab_size - 1}")
        if begin + len(tokens) > self.sequences.n_ctx:
            raise LibraryError(f"tokens: to {begin + len(tokens)} of {self.sequences.n_ctx}")

    def write_pages(self, lane: int, table: Pages) -> None:
        """Write the positions computed since the last call to pages. O(the lane's whole KV)."""
        held = self._lanes[lane]
        first, last = held.valid // PAGE_TOKENS, _pages(held.position)
        if held.valid == held.position:
            return
        pages = [int(page) for page in table[first:last]]
        state = self.sequences.take(lane)
        self.layout.to_pages(state, self.slab, pages, begin=first * PAGE_TOKENS)
        held.mirror[first:] = [self._touch(page) for page in pages]
        held.valid = held.position

    def tail_logits(self, lane: int) -> Logits:
        """Return the logits after the lane's last position, fp32 (vocab,)."""
        logits = self._lanes[lane].logits
        if logits is None:
            raise LibraryError(f"lane {lane}: nothing computed or restored that has logits")
        return logits

    def position(self, lane: int) -> int:
        """Return the number of the lane's positions in the library."""
        return self._lanes[lane].position

    def restored(self, lane: int) -> str:
        """Return the source of the lane's last restore: one of `RESTORED`."""
        return self._lanes[lane].restored

    # -- bringing a lane to a position ---------------------------------------------------------

    def ready(self, lane: int, *, begin: int, table: Pages, fork: bool = False) -> None:
        """Restore the lane to ``begin`` with the KV of ``table`` and the image last loaded.

        - ``in_place``: the lane still holds that KV; it is truncated, and the recurrent part is
          restored.
        - ``from_lane``: another lane holds it, and the library copies it at its next decode; only
          with ``fork``, where a decode follows at once.
        - ``from_pages``: the whole state is rebuilt from pages.

        Raises:
            RestoreError: the image is of another position, or the library rejected it.
        """
        held = self._lanes[lane]
        if self._stands(held, begin, table):
            return
        image, held.pending = held.pending, None
        held.table = table
        try:
            self._bring(lane, image, begin=begin, table=table, fork=fork)
        except BaseException as error:
            self._forget(lane)
            self._lanes[lane].pending, self._lanes[lane].logits = image, held.logits
            if isinstance(error, LibraryError):
                raise RestoreError(str(error)) from error
            raise

    def _stands(self, held: Lane, begin: int, table: Pages) -> bool:
        if held.pending is not None or held.position != begin:
            return False
        # Without an image only the table shows that another request has taken the lane.
        return self._state_bytes > 0 or held.table is table

    def _bring(
        self, lane: int, image: Bytes | None, *, begin: int, table: Pages, fork: bool
    ) -> None:
        held = self._lanes[lane]
        stands = begin if not self._state_bytes else standing(image)
        if stands != begin:
            raise LibraryError(f"lane {lane}: its image is of position {stands}, needs {begin}")
        versions = [int(self._versions[page]) for page in table[: _pages(begin)]]
        source = self._holder(lane, versions, begin, fork=fork)
        if begin == 0:
            self.sequences.clear(lane)
            held.restored = "nothing"
        elif source is None or not self._trim(lane, source, image, begin):
            self._put_whole(lane, image, begin=begin, table=table)
            held.restored = "from_pages"
        else:
            held.restored = "in_place" if source == lane else "from_lane"
        held.mirror, held.valid = versions, begin
        held.anchored(begin, image)

    def _holder(self, lane: int, versions: list[int], begin: int, *, fork: bool) -> int | None:
        """Return a lane with the KV of these pages, preferably ``lane``, or None."""
        others = self._lanes if fork else []
        for number, held in [(lane, self._lanes[lane]), *enumerate(others)]:
            if held.valid >= begin and held.mirror[: len(versions)] == versions:
                return number
        return None

    def _trim(self, lane: int, source: int, image: Bytes | None, begin: int) -> bool:
        """Reuse the KV of lane ``source`` up to ``begin``; False where the library cannot."""
        if source != lane:
            self.sequences.copy(source, lane)
        if image is not None and image.size:
            self.sequences.put(lane, addressed(image, lane), PARTIAL)
        return self.sequences.remove(lane, begin)

    def _put_whole(self, lane: int, image: Bytes | None, *, begin: int, table: Pages) -> None:
        tail = image[HEAD:] if image is not None else np.zeros(0, dtype=np.uint8)
        pages = [int(page) for page in table[: _pages(begin)]]
        state = self.layout.from_pages(
            self.slab,
            pages,
            count=begin,
            streams=self.sequences.lanes,
            sequence=lane,
            tail=tail,
        )
        self.sequences.put(lane, state)

    def _forget(self, lane: int) -> None:
        """Empty a lane whose contents in the library are undefined."""
        self.sequences.clear(lane)
        self._lanes[lane] = Lane()

    def roll_back(self, lane: int, position: int) -> None:
        """Remove rejected drafts from a lane.

        Recurrent state cannot be truncated: it is restored as last saved or loaded, and the kept
        tokens since then are computed again, one at a time.

        Raises:
            LibraryError: before the last image.
        """
        held = self._lanes[lane]
        if held.pending is not None or position >= held.position:
            return
        anchor, kept = held.anchor, held.since[: position - held.anchor.position]
        if self._state_bytes and position < anchor.position:
            raise LibraryError(f"lane {lane}: {position} is before its image, {anchor.position}")
        try:
            if not self._state_bytes:
                self._cut(lane, position)
            else:
                self._rewind(lane)
                self._run(lane, kept, at_once=1)
        except BaseException:
            self._forget(lane)
            raise

    def _rewind(self, lane: int) -> None:
        held = self._lanes[lane]
        anchor = held.anchor
        if anchor.position == 0 or anchor.state is None:
            self.sequences.clear(lane)
        else:
            self.sequences.put(lane, addressed(anchor.state, lane), PARTIAL)
            self._cut(lane, anchor.position)
        held.valid, held.logits = min(held.valid, anchor.position), anchor.logits
        held.anchored(anchor.position, anchor.state)

    def _cut(self, lane: int, position: int) -> None:
        held = self._lanes[lane]
        if not self.sequences.remove(lane, position):
            raise LibraryError(f"lane {lane}: the library cannot truncate it to {position}")
        held.position, held.valid, held.logits = position, min(held.valid, position), None

    # -- the pool's operations -----------------------------------------------------------------

    def save_image(self, lane: int, pages: Sequence[int]) -> None:
        """Write the recurrent part of a lane's state, and its last logits, to pages."""
        held = self._lanes[lane]
        state = held.pending
        if state is None:
            state = self.sequences.take(lane, PARTIAL).copy()
            state[4:HEAD] = 0  # the sequence: the same bytes whichever lane computed them
            held.anchored(held.position, state)
        image = np.concatenate((state, self.tail_logits(lane).view(np.uint8)))
        if image.size != self.config.image_bytes:
            raise LibraryError(f"image: {image.size} bytes; needs {self.config.image_bytes}")
        for number, page in enumerate(pages):
            part = image[number * self.config.page_bytes :][: self.config.page_bytes]
            self.slab[page, : part.size] = part
            self._touch(page)

    def load_image(self, lane: int, pages: Sequence[int]) -> None:
        """Load an image for a lane; `ready` restores it, with the KV of the table."""
        image = self.slab[list(pages)].reshape(-1)[: self.config.image_bytes]
        held = self._lanes[lane]
        held.pending = image[: self._state_bytes].copy()
        held.logits = image[self._state_bytes :].copy().view(np.float32)

    def reset(self, lane: int) -> None:
        """Make a lane's next sequence an empty one."""
        held = self._lanes[lane]
        held.pending, held.logits = np.zeros(0, dtype=np.uint8), None

    def copy_page(self, source: int, target: int) -> None:
        """Copy all bytes of a page."""
        self.slab[target] = self.slab[source]
        self._versions[target] = self._versions[source]

    def read_page(self, page: int) -> bytes:
        """Return the bytes of a page."""
        return bytes(self.slab[page])

    def poison_page(self, page: int) -> None:
        """Fill a page with bytes that are NaN in every float type."""
        self.slab[page] = 0xFF
        self._touch(page)

    def _touch(self, page: int) -> int:
        """Return a new version for a written page, unique over all pages."""
        self._newest += 1
        self._versions[page] = self._newest
        return self._newest


def _pages(position: int) -> int:
    return -(-position // PAGE_TOKENS)
