"""Down: what the device has no room for goes to the tiers below."""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING
from weakref import WeakSet

import numpy as np

from ninfer_pool.core.entry import Checkpoint, Entry
from ninfer_pool.core.identity import Namespace
from ninfer_pool.tiers.device import draft_of, draft_of_spare, pages_of, renew
from ninfer_pool.tiers.disk_medium import DiskMedium
from ninfer_pool.tiers.parts import Draft, Part, Record, Run, Stored
from ninfer_pool.tiers.payload import Payload, Row, Source
from ninfer_pool.tiers.shelf import Shelf
from ninfer_pool.tiers.sources import DeviceSource, ShelfSource, StagedSource
from ninfer_pool.tiers.storing import storing
from ninfer_pool.tiers.worker import Worker

if TYPE_CHECKING:
    from ninfer_pool.core.pool import PrefixPool

LATE_SECONDS, MOST_LATE_SECONDS = 0.25, 1.0
"""What was not stored ahead of time is stored late, unless that would take longer than the first,
and longer than prefilling it again would, or longer than the second."""
STAGED_BYTES = 256 << 20
"""Bytes in flight at most between a device without a host tier and the disk."""


class Descent:
    """Moves whole entries to tiers below. Called under the pool's lock."""

    def __init__(
        self,
        pool: PrefixPool,
        payload: Payload | None,
        shelves: Sequence[Shelf],
        *,
        background: bool,
    ) -> None:
        self.pool = pool
        self.payload = payload
        self.shelves = shelves
        self.background = background
        self.worker = Worker(background=background)
        self._drafts: dict[int, Draft] = {}
        self._oversized: WeakSet[Stored] = WeakSet()
        """Tips of entries that are too large for the first tier."""
        self.finish_stored: Callable[[Checkpoint], bool] = lambda _: False
        """Completes at once the store of a checkpoint that has begun ahead of time."""
        for upper, lower in pairwise(shelves):
            upper.on_evict = _descending(self, upper, lower)

    @property
    def tick(self) -> int:
        """The pool's clock."""
        return self.pool.state.tick

    def related(self, namespace: Namespace, tokens: bytes) -> Iterable[Draft]:
        """Yield what is being stored of what this sequence continues, or is continued by."""
        for draft in list(self._drafts.values()):
            size = min(len(draft.tokens), len(tokens))
            if draft.namespace == namespace and draft.tokens[:size] == tokens[:size]:
                yield draft

    def every(self) -> Iterable[Draft]:
        """Yield all that is being stored."""
        return list(self._drafts.values())

    def cancel(self, drafts: Iterable[Draft]) -> None:
        """Let nothing come of what is being stored, not even if the process ends at once."""
        for draft in drafts:
            draft.cancelled = True
        for shelf in self.shelves:
            shelf.medium.withdraw()

    def on_its_way(self) -> list[Draft]:
        """Return what has left the device and is being stored, and lies nowhere else."""
        places: list[Container[str]] = [self.pool.state.catalog.keys]
        places += [shelf.keys for shelf in self.shelves]
        return [
            draft
            for draft in self.every()
            if not draft.cancelled and not any(draft.key in keys for keys in places)
        ]

    def leaving(self, entry: Entry | None, mark: Checkpoint) -> None:
        """Store what is about to go from the device, unless it is stored already."""
        if self._seen(self.shelves[0], mark):
            return
        if self.finish_stored(mark) and self._seen(self.shelves[0], mark):
            return
        if self._in_flight(mark.stored):
            return  # the worker is storing it, from a copy
        if entry is None and not self.shelves[0].keeps_spares:
            return
        if _within_run(mark) and any(self._seen(shelf, mark) for shelf in self.shelves):
            return  # it lies below, and what it was made of would have to be made anew
        draft, marks = self._spare(mark) if entry is None else self.drafted(entry)
        first = self.shelves.index(self.roomy(draft))
        for shelf in self.shelves[first:]:
            if self._seen(shelf, mark) or self.store_first(shelf, draft, marks):
                return
            draft, marks = self._spare(mark) if entry is None else self.drafted(entry)

    def drafted(self, entry: Entry) -> tuple[Draft, Sequence[Checkpoint]]:
        """Return an entry of the device as a draft, and the checkpoints that have its parts."""
        state = self.pool.state
        return draft_of(state, entry), list(state.catalog.path_checkpoints(entry))

    def _spare(self, mark: Checkpoint) -> tuple[Draft, Sequence[Checkpoint]]:
        """Return the same of a superseded checkpoint."""
        return draft_of_spare(self.pool.state, mark), [mark]

    def _seen(self, shelf: Shelf, mark: Checkpoint) -> bool:
        """Say whether a checkpoint lies on a shelf already; if so, that it was used till now."""
        if mark.stored is None or not shelf.holds(mark.stored):
            return False
        shelf.seen(mark.stored, tick=mark.tick)
        return True

    def roomy(self, draft: Draft) -> Shelf:
        """Return the first tier that is large enough for an entry, else the last."""
        parts = draft.parts()
        for shelf in self.shelves[:-1]:
            if sum(map(shelf.medium.size, parts)) <= shelf.medium.budget:
                return shelf
            self._oversized.add(draft.marks[-1].stored)
        return self.shelves[-1]

    def lies_below(self, tip: Checkpoint) -> bool:
        """Say whether an entry lies in the first tier that is large enough for it."""
        if tip.stored is None:
            return False
        shelves = self.shelves if tip.stored in self._oversized else self.shelves[:1]
        return any(shelf.holds(tip.stored) for shelf in shelves)

    def store_first(self, shelf: Shelf, draft: Draft, marks: Sequence[Checkpoint]) -> bool:
        """Store an entry of the device; to disk by way of memory, where there is a thread.

        False: it does not lie there, nor will it.
        """
        source = self.device_source(shelf, draft, marks)
        if not (self.background and isinstance(shelf.medium, DiskMedium)):
            return self.store_now(shelf, draft, source)
        size = sum(shelf.medium.size(part) for part in source.pages)
        if not self.worker.busy and size <= STAGED_BYTES:
            staged = StagedSource({part: _copied(source.rows(part)) for part in source.pages})
            self.submit(shelf, shelf, draft, staged)
            return True
        if self._too_late(shelf, size, draft.marks[-1].position):
            shelf.traffic.dropped += 1
            return False
        return self.store_now(shelf, draft, source)

    def whole(self, entry: Entry) -> tuple[Draft, DeviceSource]:
        """Return an entry of the device and where every part of it lies there."""
        draft, marks = self.drafted(entry)
        return draft, self._source(draft, marks, lambda: list(draft.parts()))

    def device_source(
        self, shelf: Shelf, draft: Draft, marks: Sequence[Checkpoint]
    ) -> DeviceSource:
        """Return where the parts of ``draft`` lie on the device that ``shelf`` lacks."""
        return self._source(draft, marks, lambda: shelf.missing(draft.parts()))

    def _source(
        self, draft: Draft, marks: Sequence[Checkpoint], wanted: Callable[[], list[Part]]
    ) -> DeviceSource:
        state = self.pool.state
        source = DeviceSource(self.payload, self.pool.config)
        parts = wanted()
        source.pages = pages_of(state, marks, parts)
        lost = [part for part in parts if part not in source.pages and isinstance(part, Run)]
        if lost:
            replaced = renew(marks, lost, draft.tokens)
            for drafted in draft.marks:
                drafted.stored = replaced.get(drafted.stored, drafted.stored)
            source.pages = pages_of(state, marks, wanted())
        for part in source.pages:  # whole on this way, so these are its tokens
            if isinstance(part, Run):
                part.learn(draft.tokens)
        return source

    def descend(self, upper: Shelf, lower: Shelf, record: Record) -> None:
        """A record is about to leave ``upper`` for room."""
        stored = record.tip.stored
        if lower.holds(stored):
            lower.seen(stored, tick=record.tip.tick)
        elif len(record.marks) == 1 and record.entry.released and not lower.keeps_spares:
            return  # a superseded checkpoint on its own
        elif self._in_flight(stored):
            return  # the worker is storing it, from what the tier above keeps meanwhile
        elif self._too_late(lower, record.entry.bytes, record.tip.position):
            lower.traffic.dropped += 1
        else:
            draft = upper.draft(record, spares=lower.keeps_spares)
            self.store_now(lower, draft, ShelfSource(upper))

    def _in_flight(self, stored: Stored | None) -> bool:
        return any(draft.marks[-1].stored is stored for draft in self.every())

    def _too_late(self, shelf: Shelf, size: int, tokens: int) -> bool:
        """Say whether a request would wait too long for something to be stored before it goes."""
        prefill = shelf.rates.prefill_seconds(tokens)
        limit = max(LATE_SECONDS, min(prefill, MOST_LATE_SECONDS))
        return self.background and shelf.traffic.write_seconds(size) > limit

    def expect(self, draft: Draft) -> None:
        """An entry is about to be stored on another thread: from now on a deletion stops it."""
        self._drafts[id(draft)] = draft

    def store_now(self, shelf: Shelf, draft: Draft, source: Source) -> bool:
        """Store an entry at once; say whether it lies there now."""
        for _ in self.steps(shelf, draft, source):
            pass
        return shelf.holds(draft.marks[-1].stored)

    def steps(
        self, shelf: Shelf, draft: Draft, source: Source
    ) -> Generator[int, None, Record | None]:
        """Store an entry, yielding the bytes moved after each part; see `storing`."""
        medium = shelf.medium
        self.expect(draft)
        try:
            if isinstance(medium, DiskMedium) and not medium.takes(draft):
                return None
            lock, tick = self.pool.state.lock, self.tick
            return (yield from storing(shelf, draft, source, lock=lock, tick=tick))
        finally:
            self._drafts.pop(id(draft), None)

    def submit(self, holder: Shelf, shelf: Shelf, draft: Draft, source: Source) -> None:
        """Store an entry off this thread; what ``holder`` has of it stays there meanwhile."""
        parts = draft.parts()
        holder.hold(parts)
        self.expect(draft)

        def work() -> None:
            try:
                self.store_now(shelf, draft, source)
            finally:
                with self.pool.state.lock:
                    holder.drop(parts)

        self.worker.submit(work)


def _within_run(mark: Checkpoint) -> bool:
    """Say whether a checkpoint is made of the beginning of a run that goes on past it."""
    return mark.stored is not None and mark.stored.pieces[-1].end > mark.position


def _descending(down: Descent, upper: Shelf, lower: Shelf) -> Callable[[Record], None]:
    return lambda record: down.descend(upper, lower, record)


def _copied(rows: Sequence[Row]) -> list[Row]:
    return list(np.stack(rows)) if len(rows) else []
