"""A request's hold on the pages that it reads and writes, from its admission to its commit."""

from __future__ import annotations

from bisect import bisect_right
from math import inf
from types import TracebackType
from typing import NamedTuple

import numpy as np

from ninfer_pool.core.audit import Hold
from ninfer_pool.core.entry import Checkpoint, Entry, PageTable
from ninfer_pool.core.eviction import (
    enforce_budget,
    fits_without_eviction,
    select_within_budget,
)
from ninfer_pool.core.insertion import NewSequence, insert, revive
from ninfer_pool.core.operations import Operation, SaveImage
from ninfer_pool.core.progress import LeaseProgress
from ninfer_pool.core.prompt import KINDS
from ninfer_pool.core.results import Refusal
from ninfer_pool.errors import LeaseError


class Pending(NamedTuple):
    """A running lease will soon take a deeper checkpoint of this prompt than any retained."""

    position: int
    lease: Lease


class Lease(LeaseProgress):
    """One running request. Made by `PrefixPool.acquire`; use it as a context manager.

    Leaving the block without `commit` releases everything: the pool is as it was, except that
    evictions and published checkpoints stay (G6). After its end every method raises `LeaseError`.
    """

    # -- reading ---------------------------------------------------------------------------

    @property
    def unpublished(self) -> list[Checkpoint]:
        """Checkpoints taken that are not visible to others yet."""
        return self.taken[self.published :]

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
