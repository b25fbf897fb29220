"""A request's hold on the pages that it reads and writes, from its admission to its commit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from ninfer_pool.core.audit import Hold
from ninfer_pool.core.entry import Checkpoint, Entry, PageTable
from ninfer_pool.core.eviction import (
    enforce_budget,
    evict_for,
    fits_without_eviction,
    select_within_budget,
)
from ninfer_pool.core.insertion import NewSequence, insert, revive
from ninfer_pool.core.ledger import Pages, Units
from ninfer_pool.core.lookup import Lookup
from ninfer_pool.core.operations import CopyPage, LoadImage, Operation, ResetLane, SaveImage
from ninfer_pool.core.planner import Chunk, plan_chunks
from ninfer_pool.core.prompt import KINDS, check_ids, flat_bytes
from ninfer_pool.core.results import EvictionCost, Explanation, Refusal, reuse_of
from ninfer_pool.core.state import PoolState
from ninfer_pool.errors import LeaseError


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


class Pending(NamedTuple):
    """A running lease will soon take a deeper checkpoint of this prompt than any retained."""

    position: int
    lease: Lease


class Lease:
    """One running request. Made by `PrefixPool.acquire`; use it as a context manager.

    Leaving the block without `commit` releases everything: the pool is as it was, except that
    evictions and published checkpoints stay (G6). After its end every method raises `LeaseError`.
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
        self.key: str | None = None
        """The key of the committed sequence."""
        self.retained = 0
        """The position of the deepest checkpoint that it left; 0: it left none."""
        self.ended = False
        """Committed, left or failed."""
        self.doubt: str | None = None
        """Why nothing of this lease will be retained, if so."""
        self.captures = captures
        """``(position, kind)`` of the checkpoints planned at admission, the prompt's end first."""
        self.on_end: Callable[[Lease], None] | None = None
        """Called at its end, by the pool that it belongs to."""
        self.options = options
        self.source = lookup.checkpoint
        """The checkpoint resumed from; protected until the lease ends."""
        self.own = own
        """Units taken for this lease: pages, and images in reserve or taken since."""
        self.borrowed = borrowed
        """Units of the source, held until the lease ends."""
        self.spare_images = spare_images
        """Images in reserve."""
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
    def unpublished(self) -> list[Checkpoint]:
        """Checkpoints taken that are not visible to others yet."""
        return self.taken[self.published :]

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

    @property
    def planned_captures(self) -> list[tuple[int, str]]:
        """``(position, kind)`` of the checkpoints that `chunks` will request, ascending."""
        return sorted(self.captures)

    def hold(self) -> Hold:
        """Return the units that it holds."""
        return Hold(self.own, self.borrowed, self.source)

    def releasable(self) -> tuple[int, int]:
        """Return the least and the most pages that are free, or evictable, once it ends.

        The least are those that it alone holds; the most all that it holds.
        """
        with self._state.lock:
            ledger = self._state.ledger
            units = np.unique(np.concatenate((self.own, self.borrowed)))
            alone = units[(ledger.lease_refs[units] == 1) & (ledger.pin_refs[units] == 0)]
            return ledger.size(alone), ledger.size(units)

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

    def truncate(self, position: int) -> None:
        """Back over tokens that were not accepted: the frontier is ``position`` again.

        Checkpoints past it are removed. The engine rolls its own state back.

        Raises:
            LeaseError: not between the position resumed or published and the frontier.
        """
        with self._state.lock:
            self._check_running()
            published = [each.position for each in self.taken[: self.published]]
            least = max([self.start, *published])
            if type(position) is not int or not least <= position <= self.frontier:
                raise LeaseError(
                    f"truncate: {position!r}; needs an int of {least} to {self.frontier}"
                )
            prompt_tokens = self.prompt.length
            del self._generated[4 * max(position - prompt_tokens, 0) :]
            if position < min(self.frontier, prompt_tokens):
                self._canonical = False
            self.frontier = position
            while self.taken and self.taken[-1].position > position:
                image = self.taken.pop().image
                if image >= 0:
                    self.spare_images.append(image)

    # -- checkpoints -----------------------------------------------------------------------

    def checkpoint(self, kind: str, *, position: int) -> list[Operation]:
        """Take a checkpoint at the frontier; return the operations that write it.

        ``position`` is the engine's. Where that is not the frontier nothing of this lease is
        retained any more, its source is quarantined, and it is counted. A checkpoint that does
        not fit is skipped and counted, never a reason to fail (G8). So is one inside a media
        span, or where there is one already.

        Raises:
            LeaseError: an unknown kind.
        """
        if kind not in KINDS:
            raise LeaseError(f"kind: {kind!r}; needs one of {', '.join(KINDS)}")
        with self._state.lock:
            self._check_running()
            if position != self.frontier:
                self._distrust(f"checkpoint at {position}, frontier {self.frontier}")
            if self.doubt is not None or not self.options.retain:
                return []
            image = self._take_image()
            if image is None:
                return []
            self.taken.append(self._make(kind, image))
            return [SaveImage(self.lane, self._image_pages(image))] if image >= 0 else []

    def _take_image(self) -> int | None:
        """Return an image for the frontier, -1 for plain attention; None: skipped (G8)."""
        state, position = self._state, self.frontier
        counters = state.counters
        if self._has_checkpoint(position):
            return None
        if position > self.prompt.shareable or self.prompt.inside_media(position):
            counters.captures_skipped += 1
            counters.skipped_media += 1
            return None
        count = state.config.image_pages
        if not count:
            return -1
        if len(self.spare_images) <= self._essential_ahead():
            if state.ledger.free < count:
                counters.captures_skipped += 1
                counters.skipped_no_room += 1
                return None
            fresh = state.ledger.take(0, images=1)
            self.own = np.concatenate((self.own, fresh))
            self.spare_images += fresh.tolist()
        counters.images_saved += 1
        return self.spare_images.pop(0)

    def _has_checkpoint(self, position: int) -> bool:
        source = self.source
        resumed = source is not None and source.position == position == self.start
        return resumed or bool(self.taken and self.taken[-1].position == position)

    def _essential(self) -> int:
        """Return the position without which the same prompt requested again misses (G3)."""
        end = self.prompt.length
        planned = [position for position, _ in self.captures]
        return end if self._state.config.end_logits or end - 1 not in planned else end - 1

    def _essential_ahead(self) -> bool:
        """Return whether that checkpoint is still to come: one image is reserved for it."""
        essential = self._essential()
        return self.frontier < essential and essential in (at for at, _ in self.captures)

    def _image_pages(self, image: int) -> tuple[int, ...]:
        return tuple(self._state.ledger.pages_of_image(image).tolist())

    def _make(self, kind: str, image: int) -> Checkpoint:
        position, cuts, config = self.frontier, self._cuts, self._state.config
        size = config.page_tokens
        on_cut = not config.image_bytes or position % config.grid == 0 or position in cuts
        exact = self._canonical and on_cut and position <= self.prompt.length
        return Checkpoint(
            position=position,
            kind=kind,
            cuts=cuts[: bisect_right(cuts, position)] if exact else None,
            table=PageTable(self.pages),
            tail=int(self.pages[position // size]) if position % size else -1,
            image=image,
            lane=self.lane,
        )

    def publish(self) -> None:
        """Make the checkpoints taken so far visible to others before the commit.

        Call it once their operations have been executed (G11). No-op where nothing is to be
        retained, or where something else would have to be evicted first: a request evicts in one
        act, its commit, since two acts could together free more than G2 allows.
        """
        with self._state.lock:
            self._check_running()
            fresh = self.unpublished
            if self.doubt is None and fresh and fits_without_eviction(self._state, fresh):
                self._store(fresh, self.source)
                self.published = len(self.taken)

    # -- the end ---------------------------------------------------------------------------

    def commit(self, *, position: int | None = None) -> str | None:
        """Retain the checkpoints taken up to the accepted frontier and end the lease.

        ``position``, if stated, must be the frontier (see `checkpoint`). Returns the key of the
        retained sequence, or None where there is none: not wanted, in doubt, or no room.
        """
        state = self._state
        with state.lock:
            self._check_running()
            if position is not None and position != self.frontier:
                self._distrust(f"commit at {position}, frontier {self.frontier}")
            if self.doubt is not None:
                self._end()
                return None
            state.note_miss(self.explanation)
            state.tick += 1
            state.counters.committed += 1
            source = self.source
            touched = self._consume(source) if source is not None else None
            fresh = self.unpublished
            stored = bool(fresh) and self._store(fresh, source)
            if touched is not None and not stored:
                state.catalog.order.on_hit(touched, state.tick)
            self._name_full_hit(source)
            if self.options.pin:
                for entry in state.catalog.keys.get(self.key or "", {}).values():
                    state.pin(entry)
            self._end(committed=True)
            return self.key

    def _consume(self, source: Checkpoint) -> Entry | None:
        """Make only the consumed checkpoint recent, none that was merely passed.

        Returns its entry if the policy is still to be notified: once, when the entry has grown
        or turns out not to grow.
        """
        state, tier = self._state, self.explanation.tier
        source.tick = state.tick
        source.uses += 1
        node, revived, touched = source.node, None, None
        if node is not None and source.superseded:
            revived = revive(state, source, self.prompt.namespace, self._key(source.position))
        elif node is not None and node.tip is not None and node.tip.tip is source:
            touched = node.tip
            touched.consume(state.tick)
            state.emit("touched", touched)
        if tier is not None and tier != "device":
            state.hooks.on_consume(source, tier)
        self._release_source()
        enforce_budget(state, self._cost, fresh=[], keep=revived)
        if touched is not None and self.start < source.position:  # it need not grow
            state.catalog.order.on_hit(touched, state.tick)
            return None
        return touched

    def _store(self, fresh: list[Checkpoint], source: Checkpoint | None) -> bool:
        """Retain ``fresh`` as far as the budget allows; return whether anything was (G3, G9)."""
        state, size, options = self._state, self._state.config.page_tokens, self.options
        chosen = select_within_budget(state, fresh, self._essential())
        skipped = len(fresh) - len(chosen)
        state.counters.captures_skipped += skipped
        state.counters.skipped_no_room += skipped
        if not chosen:
            return False
        total = chosen[-1].position
        table = PageTable(self.pages[: -(-total // size)].copy())
        if source is not None:
            if source.stored is None and source.node is not None:
                state.hooks.on_branch(source)
            if source.stored is not None:
                table.known = (self.start, source.stored.pieces)
        for checkpoint in chosen:
            checkpoint.table = table
        before = state.ledger.retained
        sequence = NewSequence(
            namespace=self.prompt.namespace,
            tokens=self._parts(total),
            attributes=self.prompt.attributes,
            prompt_tokens=self.prompt.asked,
            priority=options.priority,
            origin=self.start if source is not None and source.node is not None else 0,
            source=source if source is not None and source.node is not None else None,
        )
        inserted = insert(state, sequence, chosen)
        ttl, clock = options.ttl_seconds, state.config.clock
        until = clock() + ttl if ttl is not None and clock is not None else inf
        for checkpoint in inserted.standing:  # the longest time that any commit set
            if checkpoint.expires is None or checkpoint.expires < until:
                state.catalog.set_deadline(checkpoint, until)
        self._cost.needed += max(0, state.ledger.retained - before)
        enforce_budget(state, self._cost, fresh=inserted.added, keep=inserted.entry)
        self.key, self.retained = inserted.key, total
        return True

    def _parts(self, end: int) -> list[memoryview]:
        """Return the token bytes ``[0, end)``: the prompt's and the generated ones."""
        inside = self.prompt.length
        made = memoryview(self._generated)[: 4 * max(end - inside, 0)]
        return [self.prompt.buffer[: 4 * min(end, inside)], made]

    def _key(self, position: int) -> str:
        carried = [item for item in self.prompt.attributes if item[0] < position]
        catalog = self._state.catalog
        return catalog.key(self.prompt.namespace, self._parts(position), carried)

    def _name_full_hit(self, source: Checkpoint | None) -> None:
        """Name the resumed sequence as the committed one where the lease added nothing."""
        kept = source is not None and source.node is not None and self.options.retain
        if self.key is None and kept and self.frontier == self.start:
            self.key, self.retained = self._key(self.start), self.start

    def _distrust(self, why: str) -> None:
        """Retain nothing of this lease: the engine's position is not the pool's (G5).

        Its source and its published checkpoints are quarantined, and it is counted.
        """
        if self.doubt is None:
            state = self._state
            self.doubt = why
            state.counters.position_mismatches += 1
            freeable = state.ledger.freeable * state.config.page_bytes
            state.last_refusal = Refusal("position_mismatch", 0, freeable)
            state.quarantine(self.source)
            for checkpoint in self.taken[: self.published]:
                state.quarantine(checkpoint)

    def quarantine(self) -> None:
        """Report that restoring failed: the source is never offered again; the lease ends."""
        with self._state.lock:
            self._check_running()
            self._state.quarantine(self.source)
            self._end()

    def release(self) -> None:
        """Release everything without a commit; no-op if the lease has ended."""
        with self._state.lock:
            if not self.ended:
                self._end()

    def _release_source(self) -> None:
        if self.source is not None:
            self._state.unref(self.source, self.borrowed)
            self.source = None

    def _end(self, *, committed: bool = False) -> None:
        self._release_source()
        self._state.ledger.unref_lease(self.borrowed)
        self._state.ledger.unref_lease(self.own)
        self.ended = True
        if self.on_end is not None:
            self.on_end(self)
        self._state.return_lane(self.lane, committed=committed)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
