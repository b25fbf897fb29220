"""How a whole entry gets into a tier: planned, its missing parts written, then offered."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ninfer_pool.errors import StoreError
from ninfer_pool.tiers.parts import Draft, Part, Record, Run, without_spares
from ninfer_pool.tiers.payload import Source
from ninfer_pool.tiers.shelf import Shelf


@dataclass(slots=True, kw_only=True)
class _Plan:
    """What storing one entry takes."""

    old: list[Record]
    """Records that it replaces."""
    parts: dict[Part, None]
    sizes: dict[Part, int]
    """Bytes of each part that is missing."""
    left: int
    """Bytes reserved that are not written yet."""


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
    with lock:
        plan = _plan(shelf, draft, tick)
    if plan is None:
        shelf.traffic.dropped += 1
        return None
    record: Record | None = None
    began, moved = time.perf_counter(), plan.left
    try:
        for part in plan.sizes:
            _put(shelf, part, source, plan, lock)
            yield plan.sizes[part]
            if draft.cancelled:
                return None
        record = _offer(shelf, draft, plan.old, lock, tick)
        shelf.traffic.note_write(moved, time.perf_counter() - began)
    except (StoreError, OSError):
        shelf.traffic.failed += not draft.cancelled
    finally:
        with lock:
            shelf.reserved -= plan.left
            shelf.drop(plan.parts)
    return record


def _plan(shelf: Shelf, draft: Draft, tick: int) -> _Plan | None:
    """Make room for an entry, without its superseded checkpoints where it is too large."""
    old = shelf.plan(draft)
    if not shelf.could_hold(draft, sparing=old):
        draft.marks = without_spares(draft.marks)
        if not shelf.could_hold(draft, sparing=old):
            return None
    parts = draft.parts()
    sizes = {part: shelf.medium.size(part) for part in shelf.missing(parts)}
    size = sum(sizes.values()) + shelf.medium.overhead(draft)
    shelf.hold(parts)
    keep = {mark.stored for mark in draft.marks}
    if not shelf.make_room(size, tick=tick, sparing=old, keep=keep):
        shelf.drop(parts)
        return None
    shelf.reserved += size
    return _Plan(old=old, parts=parts, sizes=sizes, left=size)


def _put(
    shelf: Shelf, part: Part, source: Source, plan: _Plan, lock: AbstractContextManager[Any]
) -> None:
    """Write a part, unless another entry's storing was quicker."""
    size = plan.sizes[part]
    written = part not in shelf.places
    place = shelf.medium.write(part, source) if written else None
    with lock:
        if part not in shelf.places:
            shelf.places[part] = place
        elif written:
            shelf.medium.free(place)
        shelf.reserved -= size
        plan.left -= size
    if written:
        shelf.traffic.images += not isinstance(part, Run)
        shelf.traffic.stored_bytes += size


def _offer(
    shelf: Shelf, draft: Draft, old: list[Record], lock: AbstractContextManager[Any], tick: int
) -> Record | None:
    """Make an entry last, let it be found, and take out what it replaces."""
    name = shelf.medium.commit(draft, shelf.places)
    with lock:
        if draft.cancelled:
            if name is not None:
                shelf.medium.remove(name)
            return None
        if name is not None:
            shelf.medium.confirm(name)
        record = shelf.add(draft, name=name, tick=tick)
        for each in old:
            if each.entry.identity in shelf.records and each not in shelf.reading:
                shelf.remove(each)
        shelf.traffic.stored += 1
    return record
