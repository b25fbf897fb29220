"""Down: what the device has no room for, and what of it is stored ahead of time."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING
from weakref import WeakSet

import numpy as np

from ninfer_pool.entry import Checkpoint, Entry
from ninfer_pool.namespace import Namespace
from ninfer_pool.tiers.device import draft_of, draft_of_spare, pages_of, renew
from ninfer_pool.tiers.disk_medium import DiskMedium
from ninfer_pool.tiers.parts import Draft, Part, Record, Run, Stored
from ninfer_pool.tiers.payload import Payload, Row, Source
from ninfer_pool.tiers.shelf import Shelf
from ninfer_pool.tiers.sources import DeviceSource, ShelfSource, StagedSource
from ninfer_pool.tiers.storing import storing
from ninfer_pool.tiers.worker import Worker

if TYPE_CHECKING:
    from ninfer_pool.pool import PrefixPool

AHEAD = 8
"""What is next to go is stored ahead of time, until this part of a tier is free or has its copy
below."""
LATE_SECONDS = 0.25
"""What was not stored ahead of time is stored late, unless that would take longer than this."""
STAGED_BYTES = 256 << 20
"""Bytes in flight at most between a device without a host tier and the disk."""


class Descent:
    """Moves whole entries to tiers below. Called under the pool's lock but for `step`."""

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
        self._job: Generator[int, None, Record | None] | None = None
        self._job_marks: list[Checkpoint] = []
        self._drafts: dict[int, Draft] = {}
        self._oversized: WeakSet[Stored] = WeakSet()
        """Tips of entries that are too large for the first tier."""
        self._scanned = self._untidied = -1
        self._refused: dict[str, int] = {}
        self.changes = 0
        """How often what the tiers hold has changed."""
        self._since = -1
        self._tried: set[Checkpoint | Record] = set()
        """What was stored ahead of time since the device last changed: not again, lest two entries
        that a tier cannot hold at once take each other's place for ever."""
        for upper, lower in pairwise(shelves):
            upper.on_evict = _descending(self, upper, lower)

    @property
    def tick(self) -> int:
        """The pool's clock."""
        return self.pool.retained.tick

    def related(self, namespace: Namespace, tokens: bytes) -> Iterable[Draft]:
        """Yield what is being stored of what this sequence continues, or is continued by."""
        for draft in list(self._drafts.values()):
            size = min(len(draft.tokens), len(tokens))
            if draft.namespace == namespace and draft.tokens[:size] == tokens[:size]:
                yield draft

    def every(self) -> Iterable[Draft]:
        """Yield all that is being stored."""
        return list(self._drafts.values())

    def leaving(self, entry: Entry | None, mark: Checkpoint) -> None:
        """Store what is about to go from the device, unless it is stored already."""
        if self._seen(self.shelves[0], mark):
            return
        if mark in self._job_marks:
            self._finish_job()
            if self._seen(self.shelves[0], mark):
                return
        if any(draft.marks[-1].stored is mark.stored for draft in self.every()):
            return  # the worker is storing it, from a copy
        if entry is None and not self.shelves[0].keeps_spares:
            return
        draft, _ = self._drafted(entry, mark)
        for shelf in self.shelves[self.shelves.index(self._roomy(draft)) :]:
            if self._seen(shelf, mark) or self._store_first(shelf, *self._drafted(entry, mark)):
                return

    def _drafted(self, entry: Entry | None, mark: Checkpoint) -> tuple[Draft, Sequence[Checkpoint]]:
        """Return what is about to go as a draft, and the checkpoints that have its parts."""
        retained = self.pool.retained
        if entry is None:
            return draft_of_spare(retained, mark), [mark]
        return draft_of(retained, entry), list(retained.path_marks(entry))

    def _seen(self, shelf: Shelf, mark: Checkpoint) -> bool:
        """Say whether a checkpoint lies on a shelf already; if so, that it was used till now."""
        if mark.stored is None or not shelf.holds(mark.stored):
            return False
        shelf.seen(mark.stored, tick=mark.tick)
        return True

    def _roomy(self, draft: Draft) -> Shelf:
        """Return the first tier that is large enough for an entry, else the last."""
        parts = draft.parts()
        for shelf in self.shelves[:-1]:
            if sum(map(shelf.medium.size, parts)) <= shelf.medium.budget:
                return shelf
            self._oversized.add(draft.marks[-1].stored)
        return self.shelves[-1]

    def _store_first(self, shelf: Shelf, draft: Draft, marks: Sequence[Checkpoint]) -> bool:
        """Store an entry of the device; to disk by way of memory, where there is a thread.

        False: it does not lie there, nor will it.
        """
        source = self._device_source(shelf, draft, marks)
        if not (self.background and isinstance(shelf.medium, DiskMedium)):
            return self.store_now(shelf, draft, source)
        size = sum(shelf.medium.size(part) for part in source.pages)
        if not self.worker.busy and size <= STAGED_BYTES:
            staged = StagedSource({part: _copied(source.rows(part)) for part in source.pages})
            self._submit(shelf, shelf, draft, staged)
            return True
        if self._too_late(shelf, size):
            shelf.traffic.dropped += 1
            return False
        return self.store_now(shelf, draft, source)

    def whole(self, entry: Entry) -> tuple[Draft, DeviceSource]:
        """Return an entry of the device and where every part of it lies there."""
        draft = draft_of(self.pool.retained, entry)
        marks = list(self.pool.retained.path_marks(entry))
        return draft, self._source(draft, marks, lambda: list(draft.parts()))

    def _device_source(
        self, shelf: Shelf, draft: Draft, marks: Sequence[Checkpoint]
    ) -> DeviceSource:
        """Return where the parts of ``draft`` lie on the device that ``shelf`` lacks."""
        return self._source(draft, marks, lambda: shelf.missing(draft.parts()))

    def _source(
        self, draft: Draft, marks: Sequence[Checkpoint], wanted: Callable[[], list[Part]]
    ) -> DeviceSource:
        retained = self.pool.retained
        source = DeviceSource(self.payload, self.pool.config)
        parts = wanted()
        source.pages = pages_of(retained, marks, parts)
        lost = [part for part in parts if part not in source.pages and isinstance(part, Run)]
        if lost:
            replaced = renew(marks, lost)
            for drafted in draft.marks:
                drafted.stored = replaced.get(drafted.stored, drafted.stored)
            source.pages = pages_of(retained, marks, wanted())
        return source

    def descend(self, upper: Shelf, lower: Shelf, record: Record) -> None:
        """A record is about to leave ``upper`` for room."""
        stored = record.tip.stored
        if lower.holds(stored):
            lower.seen(stored, tick=record.tip.tick)
        elif len(record.marks) == 1 and record.entry.released and not lower.keeps_spares:
            return  # a superseded checkpoint on its own
        elif self._too_late(lower, record.entry.bytes):
            lower.traffic.dropped += 1
        else:
            draft = upper.draft(record, spares=lower.keeps_spares)
            self.store_now(lower, draft, ShelfSource(upper))

    def _too_late(self, shelf: Shelf, size: int) -> bool:
        """Say whether a request would wait too long for something to be stored before it goes."""
        return self.background and shelf.traffic.write_seconds(size) > LATE_SECONDS

    def expect(self, draft: Draft) -> None:
        """An entry is about to be stored on another thread: from now on a deletion stops it."""
        self._drafts[id(draft)] = draft

    def store_now(self, shelf: Shelf, draft: Draft, source: Source) -> bool:
        """Store an entry at once; say whether it lies there now."""
        for _ in self._storing(shelf, draft, source):
            pass
        return shelf.holds(draft.marks[-1].stored)

    def _storing(
        self, shelf: Shelf, draft: Draft, source: Source
    ) -> Generator[int, None, Record | None]:
        medium = shelf.medium
        self.expect(draft)
        try:
            if isinstance(medium, DiskMedium) and not medium.takes(draft):
                return None
            lock, tick = self.pool.lock, self.tick
            return (yield from storing(shelf, draft, source, lock=lock, tick=tick))
        finally:
            self._drafts.pop(id(draft), None)

    # -- ahead of time ---------------------------------------------------------------------

    def step(self, *, max_bytes: int = 8 << 20) -> bool:
        """Store some of what is next to go, up to about ``max_bytes``; False: nothing is due.

        Call it between steps of the engine, on its thread. O(1) where nothing is due.
        """
        if not self.shelves:
            return False
        with self.pool.lock:
            if self._job is None and not self._begin_job():
                return self._tidy_host()
            moved = 0
            while self._job is not None and moved < max_bytes:
                if self._job_stale:
                    self._end_job()
                    break
                try:
                    moved += next(self._job)
                except StopIteration:
                    self._job, self._job_marks = None, []
            return True

    def end(self) -> None:
        """Give up what is half stored; for the end."""
        self._end_job()

    def _finish_job(self) -> None:
        if self._job is not None and not self._job_stale:
            for _ in self._job:
                pass
        self._end_job()

    @property
    def _job_stale(self) -> bool:
        """Something that is being stored is gone from the device: its pages may hold others."""
        return any(mark.path is None for mark in self._job_marks)

    def _end_job(self) -> None:
        if self._job is not None:
            self._job.close()
        self._job, self._job_marks = None, []

    def _begin_job(self) -> bool:
        """Begin to store the entry that goes next and is not stored; False: there is none."""
        retained, config = self.pool.retained, self.pool.config
        if retained.version == self._scanned:
            return False
        if self.background and self.worker.busy and len(self.shelves) == 1:
            return False
        if self._refuses(self.shelves[0]):
            self._scanned = retained.version
            return False
        margin = max(config.retained_pages // AHEAD, 2 * (1 + config.image_pages))
        slack = min(retained.ledger.free, config.retained_pages - retained.ledger.retained)
        self._look_again()
        for entry in retained.ranking.order(retained.tick):
            if slack >= margin:
                break
            slack += entry.bytes // config.page_bytes
            tip = entry.tip
            if not tip.guards and tip not in self._tried and not self._stored(tip):
                self._tried.add(tip)
                self._begin(entry)
                return True
        self._scanned = retained.version
        return False

    def _stored(self, tip: Checkpoint) -> bool:
        """Say whether an entry lies in the first tier that is large enough for it."""
        if tip.stored is None:
            return False
        shelves = self.shelves if tip.stored in self._oversized else self.shelves[:1]
        return any(shelf.holds(tip.stored) for shelf in shelves)

    def _begin(self, entry: Entry) -> None:
        retained = self.pool.retained
        draft = draft_of(retained, entry)
        marks = list(retained.path_marks(entry))
        shelf = self._roomy(draft)
        if self.background and isinstance(shelf.medium, DiskMedium):
            self._store_first(shelf, draft, marks)
            return
        source = self._device_source(shelf, draft, marks)
        self._job = self._storing(shelf, draft, source)
        wanted = {mark.stored for mark in draft.marks}
        self._job_marks = [mark for mark in marks if mark.stored in wanted]

    def _tidy_host(self) -> bool:
        """Let the worker write what goes next from host memory to disk."""
        if len(self.shelves) < 2 or self.worker.busy:
            return False
        upper, lower = self.shelves
        if self._refuses(lower):
            self._untidied = self.pool.retained.version
        if self._untidied == self.pool.retained.version:
            return False
        margin = upper.medium.budget // AHEAD
        slack = upper.medium.budget - upper.medium.used
        self._look_again()
        for record in upper.order(self.tick):
            if slack >= margin:
                break
            slack += record.entry.bytes
            if record not in self._tried and not lower.holds(record.tip.stored):
                self._tried.add(record)
                draft = upper.draft(record, spares=lower.keeps_spares)
                self._submit(upper, lower, draft, ShelfSource(upper))
                return True
        self._untidied = self.pool.retained.version
        return False

    def _look_again(self) -> None:
        """Forget what was tried, where the device has changed since."""
        since = self.pool.retained.version - self.changes
        if since != self._since:
            self._since = since
            self._tried.clear()

    def _refuses(self, shelf: Shelf) -> bool:
        """Say whether the last store there came to nothing, once: a full disk is asked again only
        when something has changed."""
        count = shelf.traffic.failed + shelf.traffic.dropped
        before, self._refused[shelf.name] = self._refused.get(shelf.name, 0), count
        return count != before

    def _submit(self, holder: Shelf, shelf: Shelf, draft: Draft, source: Source) -> None:
        """Store an entry off this thread; what ``holder`` has of it stays there meanwhile."""
        parts = draft.parts()
        holder.hold(parts)
        self.expect(draft)

        def work() -> None:
            try:
                self.store_now(shelf, draft, source)
            finally:
                with self.pool.lock:
                    holder.drop(parts)

        self.worker.submit(work)

    # -- at the end ------------------------------------------------------------------------

    def flush(self, deadline: float | None) -> int:
        """See `Tiers.flush`."""
        if not self.shelves or not isinstance(self.shelves[-1].medium, DiskMedium):
            return 0
        self.worker.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        left, disk = 0, self.shelves[-1]
        with self.pool.lock:
            self._end_job()
            every = self.pool.retained.entries.values()
            for entry in sorted(every, key=lambda entry: entry.tip.tick, reverse=True):
                if entry.tip.stored is None or not disk.holds(entry.tip.stored):
                    left += not (_before(deadline) and self._flush_entry(disk, entry))
            for upper in self.shelves[:-1]:
                for record in reversed(list(upper.order(self.tick))):
                    here = record.entry.identity in upper.records
                    alone = len(record.marks) == 1 and record.entry.released
                    if here and not alone and not disk.holds(record.tip.stored):
                        left += not (_before(deadline) and self._flush_record(upper, disk, record))
        return left

    def _flush_entry(self, disk: Shelf, entry: Entry) -> bool:
        draft = draft_of(self.pool.retained, entry)
        marks = list(self.pool.retained.path_marks(entry))
        return self._flush_draft(disk, draft, self._device_source(disk, draft, marks))

    def _flush_record(self, upper: Shelf, disk: Shelf, record: Record) -> bool:
        return self._flush_draft(disk, upper.draft(record, spares=False), ShelfSource(upper))

    def _flush_draft(self, disk: Shelf, draft: Draft, source: Source) -> bool:
        disk.latest = draft.marks[-1].tick
        try:
            return self.store_now(disk, draft, source)
        finally:
            disk.latest = None


def _before(deadline: float | None) -> bool:
    return deadline is None or time.monotonic() < deadline


def _descending(down: Descent, upper: Shelf, lower: Shelf) -> Callable[[Record], None]:
    return lambda record: down.descend(upper, lower, record)


def _copied(rows: Sequence[Row]) -> list[Row]:
    return list(np.stack(rows)) if len(rows) else []
