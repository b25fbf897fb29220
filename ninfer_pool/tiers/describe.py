"""An entry in a tier below, as others may see it."""

from __future__ import annotations

from ninfer_pool.core.results import EntryInfo, TierStats
from ninfer_pool.tiers.disk_medium import DiskMedium
from ninfer_pool.tiers.parts import Draft, Image, Record
from ninfer_pool.tiers.shelf import Shelf


def describe(shelf: Shelf, record: Record) -> EntryInfo:
    """Return a record as it stands. O(its parts)."""
    entry = record.entry
    alone = [part for part in record.parts if shelf.users[part] == 1]
    images = [part for part in alone if isinstance(part, Image)]
    return EntryInfo(
        key=entry.key,
        entry=-1,
        namespace=entry.namespace,
        tokens=record.tokens,
        lane=entry.lane,
        checkpoints=tuple((kept.position, kept.kind) for kept in record.marks),
        superseded=tuple(kept.position for kept in record.marks if kept.superseded),
        bytes=sum(shelf.medium.size(part) for part in alone),
        image_bytes=sum(shelf.medium.size(part) for part in images),
        hits=entry.hits,
        priority=entry.priority,
        pinned=record.pinned,
        released=entry.released,
        tier=shelf.name,
    )


def describe_draft(draft: Draft, shelf: Shelf) -> EntryInfo:
    """Return what is on its way to a tier. O(its parts)."""
    parts = draft.parts()
    return EntryInfo(
        key=draft.key,
        entry=-1,
        namespace=draft.namespace,
        tokens=draft.marks[-1].position,
        lane=draft.marks[-1].lane,
        checkpoints=tuple((mark.position, mark.kind) for mark in draft.marks),
        superseded=tuple(mark.position for mark in draft.marks if mark.superseded),
        bytes=sum(map(shelf.medium.size, parts)),
        image_bytes=sum(shelf.medium.size(part) for part in parts if isinstance(part, Image)),
        hits=draft.hits,
        priority=draft.priority,
        pinned=False,
        released=draft.released,
        tier=shelf.name,
    )


def tier_stats(shelf: Shelf) -> TierStats:
    """Return a tier's sizes and traffic. O(1)."""
    traffic, medium = shelf.traffic, shelf.medium
    return TierStats(
        tier=shelf.name,
        entries=len(shelf.records),
        checkpoints=shelf.checkpoints,
        bytes=medium.used,
        budget_bytes=medium.budget,
        stored=traffic.stored,
        stored_bytes=traffic.stored_bytes,
        images=traffic.images,
        promoted=traffic.promoted,
        promoted_bytes=traffic.promoted_bytes,
        dropped=traffic.dropped,
        failed=traffic.failed,
        damaged=medium.folder.damaged if isinstance(medium, DiskMedium) else 0,
    )
