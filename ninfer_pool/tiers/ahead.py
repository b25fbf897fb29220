"""Ahead of time: what goes next is stored between the engine's steps, so that no request waits."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress

from ninfer_pool.core.entry import Checkpoint, Entry
from ninfer_pool.errors import StoreError
from ninfer_pool.tiers.disk_medium import DiskMedium
from ninfer_pool.tiers.down import Descent
from ninfer_pool.tiers.parts import Record
from ninfer_pool.tiers.shelf import Shelf
from ninfer_pool.tiers.sources import ShelfSource

AHEAD = 8
"""What is next to go is stored ahead of time, until this part of a tier is free or has its copy
below."""


class Ahead:
    """Stores what is next to go, a few megabytes at a time. Called under the pool's lock."""

    def __init__(self, down: Descent) -> None:
        self.down = down
        down.finish_stored = self.finish
        self.changes = 0
        """How often what the tiers hold has changed."""
        self._job: Generator[int, None, Record | None] | None = None
        self._job_marks: list[Checkpoint] = []
        self._scanned = self._untidied = -1
        self._refused: dict[str, int] = {}
        self._since = -1
        self._tried: set[Checkpoint | Record] = set()
        """What was stored ahead of time since the device last changed: not again, lest two entries
        that a tier cannot hold at once take each other's place for ever."""

    def step(self, max_bytes: int) -> bool:
        """See `Tiers.step`."""
        if self._job is None and not self._begin():
            return self._tidy_host() or self._settle()
        moved = 0
        while self._job is not None and moved < max_bytes:
            if self._stale:
                self.end()
                break
            try:
                moved += next(self._job)
            except StopIteration:
                self._job, self._job_marks = None, []
        return True

    def finish(self, mark: Checkpoint) -> bool:
        """Store at once what is half stored, if a checkpoint is part of it; say whether it was."""
        if mark not in self._job_marks:
            return False
        if self._job is not None and not self._stale:
            for _ in self._job:
                pass
        self.end()
        return True

    def end(self) -> None:
        """Give up what is half stored."""
        if self._job is not None:
            self._job.close()
        self._job, self._job_marks = None, []

    @property
    def _stale(self) -> bool:
        """Something that is being stored is gone from the device: its pages may hold others."""
        return any(mark.node is None for mark in self._job_marks)

    def _begin(self) -> bool:
        """Begin to store the entry that goes next and is not stored; False: there is none."""
        down = self.down
        state, config = down.pool.state, down.pool.config
        if state.catalog.version == self._scanned:
            return False
        if down.background and down.worker.busy and len(down.shelves) == 1:
            return False
        if self._refuses(down.shelves[0]):
            self._scanned = state.catalog.version
            return False
        margin = max(config.retained_pages // AHEAD, 2 * (1 + config.image_pages))
        slack = min(state.ledger.free, config.retained_pages - state.ledger.retained)
        self._look_again()
        for entry in state.catalog.order.victims(state.tick):
            if slack >= margin:
                break
            slack += entry.bytes // config.page_bytes
            tip = entry.tip
            if not tip.refs and tip not in self._tried and not down.lies_below(tip):
                self._tried.add(tip)
                self._store(entry)
                return True
        self._scanned = state.catalog.version
        return False

    def _store(self, entry: Entry) -> None:
        down = self.down
        draft, marks = down.drafted(entry)
        shelf = down.roomy(draft)
        if down.background and isinstance(shelf.medium, DiskMedium):
            down.store_first(shelf, draft, marks)
            return
        source = down.device_source(shelf, draft, marks)
        self._job = down.steps(shelf, draft, source)
        wanted = {mark.stored for mark in draft.marks}
        self._job_marks = [mark for mark in marks if mark.stored in wanted]

    def _tidy_host(self) -> bool:
        """Let the worker write what goes next from host memory to disk."""
        down = self.down
        if len(down.shelves) < 2 or down.worker.busy:
            return False
        version = down.pool.state.catalog.version
        upper, lower = down.shelves
        if self._refuses(lower):
            self._untidied = version
        if self._untidied == version:
            return False
        margin = upper.medium.budget // AHEAD
        slack = upper.medium.budget - upper.medium.used
        self._look_again()
        for record in upper.order(down.tick):
            if slack >= margin:
                break
            slack += record.entry.bytes
            if record not in self._tried and not lower.holds(record.tip.stored):
                self._tried.add(record)
                draft = upper.draft(record, spares=lower.keeps_spares)
                down.submit(upper, lower, draft, ShelfSource(upper))
                return True
        self._untidied = version
        return False

    def _settle(self) -> bool:
        """Let the worker make what was removed from disk stay so."""
        medium = self.down.shelves[-1].medium
        if not isinstance(medium, DiskMedium) or not medium.folder.unsure or self.down.worker.busy:
            return False

        def work() -> None:
            with suppress(StoreError):  # then the next commit does it, or a loss of power undoes it
                medium.folder.settle()

        self.down.worker.submit(work)
        return True

    def _look_again(self) -> None:
        """Forget what was tried, where the device has changed since."""
        since = self.down.pool.state.catalog.version - self.changes
        if since != self._since:
            self._since = since
            self._tried.clear()

    def _refuses(self, shelf: Shelf) -> bool:
        """Say whether the last store there came to nothing, once: a full disk is asked again only
        when something has changed."""
        count = shelf.traffic.failed + shelf.traffic.dropped
        before, self._refused[shelf.name] = self._refused.get(shelf.name, 0), count
        return count != before
