"""How a whole entry gets into a tier: planned, its missing parts written, then offered."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import AbstractContextManager
from typing import Any

from ninfer_pool.errors import StoreError
from ninfer_pool.tiers.parts import Draft, Record, Run
from ninfer_pool.tiers.payload import Source
from ninfer_pool.tiers.shelf import Shelf


def storing(
    shelf: Shelf,
    draft: Draft,
    source: Source,
    *,
    lock: AbstractContextManager[Any],
    tick: int,
) -> Generator[int, None, Record | None]:
    """Store an entry, yielding the bytes moved after each part; return its record.

    None where it does not fit, cannot be written, or was deleted meanwhile; then the tier is as
    it was, save for what went for room (G8, G11). Needs the lock while it plans and offers, not
    while it writes to what is slow. Closing it undoes what was written.
    """
    traffic = shelf.traffic
    with lock:
        old = shelf.plan(draft)
        parts = draft.parts()
        missing = shelf.missing(parts)
        sizes = {part: shelf.medium.size(part) for part in missing}
        size = sum(sizes.values()) + shelf.medium.overhead(draft)
        shelf.hold(parts)
        if not shelf.make_room(size, tick=tick, sparing=old):
            traffic.dropped += 1
            shelf.drop(parts)
            return None
        shelf.reserved += size
    record: Record | None = None
    began, moved = time.perf_counter(), size
    try:
        for part in missing:
            place = shelf.medium.write(part, source)
            with lock:
                shelf.places[part] = place
                shelf.reserved -= sizes[part]
                size -= sizes[part]
            traffic.images += not isinstance(part, Run)
            traffic.stored_bytes += sizes[part]
            yield sizes[part]
            if draft.cancelled:
                return None
        name = shelf.medium.commit(draft, shelf.places)
        with lock:
            if draft.cancelled:
                if name is not None:
                    shelf.medium.remove(name)
                return None
            record = shelf.add(draft, name=name, tick=tick)
            for each in old:
                if each.entry.identity in shelf.records and each not in shelf.reading:
                    shelf.remove(each)
            traffic.stored += 1
        shelf.note_write(moved, time.perf_counter() - began)
    except (StoreError, OSError):
        traffic.failed += 1
    finally:
        with lock:
            shelf.reserved -= size
            shelf.drop(parts)
    return record
