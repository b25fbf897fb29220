"""Flush: everything is written to disk at a shutdown, the most recently used first."""

from __future__ import annotations

import time

from ninfer_pool.core.entry import Entry
from ninfer_pool.tiers.disk_medium import DiskMedium
from ninfer_pool.tiers.down import Descent
from ninfer_pool.tiers.parts import Draft, Record
from ninfer_pool.tiers.payload import Source
from ninfer_pool.tiers.shelf import Shelf
from ninfer_pool.tiers.sources import ShelfSource


def flush(down: Descent, deadline: float | None) -> int:
    """See `Tiers.flush`; ``deadline`` is of `time.monotonic`."""
    if not down.shelves or not isinstance(down.shelves[-1].medium, DiskMedium):
        return 0
    down.worker.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
    left, disk, state = 0, down.shelves[-1], down.pool.state
    with down.pool.state.lock:
        every = state.catalog.entries.values()
        for entry in sorted(every, key=lambda entry: entry.tip.tick, reverse=True):
            if entry.tip.stored is None or not disk.holds(entry.tip.stored):
                left += not (_before(deadline) and _flush_entry(down, disk, entry))
        for upper in down.shelves[:-1]:
            for record in reversed(list(upper.order(down.tick))):
                here = record.entry.identity in upper.records
                alone = len(record.marks) == 1 and record.entry.released
                if here and not alone and not disk.holds(record.tip.stored):
                    left += not (_before(deadline) and _flush_record(down, upper, disk, record))
    return left


def _flush_entry(down: Descent, disk: Shelf, entry: Entry) -> bool:
    draft, marks = down.drafted(entry)
    return _flush_draft(down, disk, draft, down.device_source(disk, draft, marks))


def _flush_record(down: Descent, upper: Shelf, disk: Shelf, record: Record) -> bool:
    return _flush_draft(down, disk, upper.draft(record, spares=False), ShelfSource(upper))


def _flush_draft(down: Descent, disk: Shelf, draft: Draft, source: Source) -> bool:
    disk.latest = draft.marks[-1].tick
    try:
        return down.store_now(disk, draft, source)
    finally:
        disk.latest = None


def _before(deadline: float | None) -> bool:
    return deadline is None or time.monotonic() < deadline
