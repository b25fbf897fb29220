"""An entry as others may see it."""

from __future__ import annotations

import numpy as np

from ninfer_pool.core.entry import Entry
from ninfer_pool.core.results import EntryInfo
from ninfer_pool.core.retained import Retained


def describe(retained: Retained, entry: Entry) -> EntryInfo:
    """Return an entry as it stands. O(its pages)."""
    marks = sorted(retained.path_marks(entry), key=lambda mark: mark.position)
    held = [retained.units_of(mark) for mark in retained.private_marks(entry)]
    units, holders = np.unique(np.concatenate(held), return_counts=True)
    alone = units[holders == retained.ledger.held[units]]
    images = alone[alone >= retained.ledger.total]
    size = retained.config.page_bytes
    return EntryInfo(
        key=entry.key,
        entry=entry.identity,
        namespace=entry.namespace,
        tokens=entry.tip.position,
        lane=entry.lane,
        checkpoints=tuple((mark.position, mark.kind) for mark in marks),
        superseded=tuple(mark.position for mark in marks if mark.spare),
        bytes=retained.ledger.size(alone) * size,
        image_bytes=retained.ledger.size(images) * size,
        hits=entry.hits,
        priority=entry.priority,
        pinned=entry.pinned is not None,
        released=entry.released,
    )
