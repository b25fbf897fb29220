"""The progress of one running request: its pages, its frontier, and the tokens behind it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np

from ninfer_pool.core.config import PoolConfig
from ninfer_pool.core.entry import Checkpoint
from ninfer_pool.core.eviction import evict_for
from ninfer_pool.core.ledger import Pages, Units
from ninfer_pool.core.lookup import Lookup
from ninfer_pool.core.operations import CopyPage, LoadImage, Operation, ResetLane
from ninfer_pool.core.planner import Chunk, plan_chunks
from ninfer_pool.core.prompt import check_ids, flat_bytes
from ninfer_pool.core.results import EvictionCost, Explanation, reuse_of
from ninfer_pool.core.state import PoolState
from ninfer_pool.errors import ConfigError, LeaseError, PromptError


class AcquireOptions(TypedDict, total=False):
    """The keywords of `PrefixPool.acquire`, except ``wait_for_shared``; see there."""

    reserve_tokens: int
    read: bool
    retain: bool
    pin: bool
    priority: int
    ttl_seconds: float | None
    lane: int | None
    near: int | None
    exact: bool
    claim: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """The options of one `PrefixPool.acquire`."""

    reserve_tokens: int
    retain: bool
    pin: bool
    priority: int
    ttl_seconds: float | None
    exact: bool
    claim: bool

    def check(self, config: PoolConfig) -> None:
        """Reject a reserve, a priority, a lifetime or a flag that cannot be used."""
        if type(self.reserve_tokens) is not int or self.reserve_tokens < 0:
            raise PromptError(f"reserve_tokens: {self.reserve_tokens!r}; needs an int of 0 or more")
        if type(self.priority) is not int:
            raise PromptError(f"priority: {self.priority!r}; needs an int")
        if self.ttl_seconds is not None:
            if config.clock is None:
                raise ConfigError("clock: None; ttl_seconds needs a PoolConfig with a clock")
            number = isinstance(self.ttl_seconds, (int, float))
            if not number or not 0 < self.ttl_seconds < float("inf"):
                raise PromptError(f"ttl_seconds: {self.ttl_seconds!r}; needs more than 0")
        check_flags(retain=self.retain, pin=self.pin, exact=self.exact, claim=self.claim)


def check_flags(**flags: object) -> None:
    """Reject a flag that is not a bool."""
    for name, value in flags.items():
        if type(value) is not bool:
            raise PromptError(f"{name}: {value!r}; needs True or False")


class LeaseProgress:
    """The part of a `Lease` that an engine drives: restore, prefill, decode.

    Every method raises `LeaseError` after the lease's end.
    """

    def __init__(
        self,
        state: PoolState,
        lookup: Lookup,
        explanation: Explanation,
        options: RequestOptions,
        *,
        lane: int,
        pages: Pages,
        own: Units,
        spare_images: list[int],
        borrowed: Units,
        captures: list[tuple[int, str]],
        planned: bool,
        copies: list[CopyPage],
        claimed: bool,
        cost: EvictionCost,
    ) -> None:
        self.prompt = lookup.prompt
        """The request's prompt."""
        self.lane = lane
        """The lane that this request runs in."""
        self.pages = pages
        """The lane's row of the page table: int32 ids, position p is in ``pages[p // 64]``."""
        self.start = lookup.position
        """Tokens reused: the position resumed from."""
        self.resumed_exact = lookup.exact
        """The resumed state has the bits of a cold run."""
        self.planned = planned
        """Every capture is at a canonical cut."""
        self.exact = lookup.exact and (planned or not self.start)
        """The resumed state, and all that `chunks` computes, has the bits of a cold run."""
        self.explanation = explanation
        """Why it resumed where it did, as `PrefixPool.explain` returned at admission."""
        self.claimed = claimed
        """The entry is being continued in place, without a copy of its last page."""
        self.frontier = lookup.position
        """Tokens that have KV and state, as the engine reported them."""
        self.reserved = self.prompt.length + options.reserve_tokens
        """Positions that there is room for."""
        self.ended = False
        """Committed, left or failed."""
        self.captures = captures
        """``(position, kind)`` of the checkpoints planned at admission, the prompt's end first."""
        self.options = options
        self.source = lookup.checkpoint
        """The checkpoint resumed from; protected until the lease ends."""
        self.own = own
        """Units taken for this lease: pages, and images in reserve or taken since."""
        self.borrowed = borrowed
        """Units of the source, held until the lease ends."""
        self.spare_images = spare_images
        """Images in reserve."""
        self.key: str | None = None
        """The key of the committed sequence."""
        self.retained = 0
        """The position of the deepest checkpoint that it left; 0: it left none."""
        self.doubt: str | None = None
        """Why nothing of this lease will be retained, if so."""
        self.on_end: Callable[[Any], object] = lambda lease: None
        """Called at its end, with the lease, by the pool that it belongs to."""
        self.taken: list[Checkpoint] = []
        """Checkpoints taken, ascending; the first `published` are visible to others already."""
        self.published = 0
        self._state = state
        self._cuts = lookup.cuts or ()
        self._copies = copies
        self._cost = cost
        self._generated = bytearray()
        self._canonical = lookup.exact

    # -- reading ---------------------------------------------------------------------------

    @property
    def reuse(self) -> str:
        """``full_reset``, ``append_frontier`` or ``restore_<kind>_checkpoint``."""
        return reuse_of(self.explanation.kind if self.start else None)

    @property
    def reason(self) -> str:
        """The explanation's reason."""
        return self.explanation.reason

    @property
    def needed_bytes(self) -> int:
        """Bytes that this request's admission and commit needed so far (G2)."""
        return self._cost.needed * self._state.config.page_bytes

    @property
    def evicted_bytes(self) -> int:
        """Bytes that became free for it."""
        return self._cost.evicted * self._state.config.page_bytes

    @property
    def victim_max_bytes(self) -> int:
        """The largest single victim among them."""
        return self._cost.largest * self._state.config.page_bytes

    def _check_running(self) -> None:
        if self.ended:
            raise LeaseError("lease: it has ended; acquire a new one")

    # -- restore and prefill ---------------------------------------------------------------

    def restore(self) -> list[Operation]:
        """Return the operations that bring the lane to `start`; `ResetLane` alone for 0."""
        with self._state.lock:
            self._check_running()
            source = self.source
            if source is None:
                return [ResetLane(self.lane)]
            operations: list[Operation] = list(self._copies)
            if source.image >= 0:
                operations.append(LoadImage(self._image_pages(source.image), self.lane))
            return operations

    def chunks(self) -> Iterator[Chunk]:
        """Yield the prefill steps from the frontier to the prompt's end; none on a full hit."""
        if self.frontier < self.prompt.length:
            yield from plan_chunks(
                self.prompt,
                start=self.frontier,
                cuts=self._cuts,
                grid=self._state.config.grid,
                captures=self.captures,
            )

    def advance(self, tokens: Any) -> None:
        """Record that the lane takes these int32 tokens next; the frontier moves past them.

        Raises:
            LeaseError: tokens that are not the prompt's, or past the reserve. Nothing changed.
        """
        raw = flat_bytes(tokens, "tokens")
        with self._state.lock:
            self._check_running()
            begin, end = self.frontier, self.frontier + len(raw) // 4
            if end > self.reserved:
                raise LeaseError(
                    f"advance: to {end}; {self.reserved} positions are reserved, see extend()"
                )
            inside = max(0, min(end, self.prompt.length) - begin)
            check_ids(raw[4 * inside :], "tokens")  # those of the prompt were checked with it
            if inside:
                self._check_prompt(raw[: 4 * inside], begin)
                self._follow_cuts(begin, begin + inside)
            self._generated += raw[4 * inside :]
            self.frontier = end

    def _check_prompt(self, raw: memoryview, begin: int) -> None:
        mine = self.prompt.buffer[4 * begin : 4 * begin + len(raw)]
        if mine.tobytes() != raw.tobytes():  # a copy and memcmp: views compare item by item
            one, other = (np.frombuffer(each, dtype=np.int32) for each in (mine, raw))
            at = begin + int((one != other).argmax())
            raise LeaseError(f"advance: the token at {at} is not the prompt's")

    def _follow_cuts(self, begin: int, end: int) -> None:
        grid, cuts = self._state.config.grid, self._cuts
        later = cuts[bisect_right(cuts, begin) :][:1]
        stop = min((begin // grid + 1) * grid, *later, self.prompt.length)
        self._canonical = self._canonical and end == stop

    def extend(self, tokens: int) -> bool:
        """Reserve room for ``tokens`` more; False where there is none, with nothing changed.

        Raises:
            LeaseError: not an int of 0 or more.
        """
        if type(tokens) is not int or tokens < 0:
            raise LeaseError(f"extend: {tokens!r}; needs an int of 0 or more")
        state = self._state
        with state.lock:
            self._check_running()
            ledger, size = state.ledger, state.config.page_tokens
            pages = -(-max(0, self.reserved + tokens - len(self.pages) * size) // size)
            if pages > ledger.freeable:
                state.refuse("no_room", pages)
                return False
            before = ledger.retained
            evict_for(state, pages, self._cost)
            self._cost.needed += pages if ledger.retained < before else 0
            fresh = ledger.take(pages)
            self.own = np.concatenate((fresh, self.own))
            self.pages = np.concatenate((self.pages, fresh))
            self.reserved += tokens
            return True

    def _image_pages(self, image: int) -> tuple[int, ...]:
        return tuple(self._state.ledger.pages_of_image(image).tolist())

    def _parts(self, end: int) -> list[memoryview]:
        """Return the token bytes ``[0, end)``: the prompt's and the generated ones."""
        inside = self.prompt.length
        made = memoryview(self._generated)[: 4 * max(end - inside, 0)]
        return [self.prompt.buffer[: 4 * min(end, inside)], made]

    def _key(self, position: int) -> str:
        carried = [item for item in self.prompt.attributes if item[0] < position]
        catalog = self._state.catalog
        return catalog.key(self.prompt.namespace, self._parts(position), carried)
