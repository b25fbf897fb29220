"""The pool's own audit: every count is recounted from the checkpoints and leases themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ninfer_pool.core.entry import Checkpoint
from ninfer_pool.core.ledger import Units
from ninfer_pool.core.radix import Path
from ninfer_pool.core.retained import Retained

if TYPE_CHECKING:
    from ninfer_pool.core.lease import Lease


def check_pool(retained: Retained, leases: list[Lease]) -> None:
    """Raise AssertionError with what is off. O(everything retained)."""
    retained.ledger.check()
    marks = [mark for root in retained.roots.values() for mark in _check_tree(root)]
    assert len(marks) == retained.checkpoints, "checkpoints miscounted"
    _check_counts(retained, marks, leases)
    _check_entries(retained)
    live = {mark for entry in retained.entries.values() for mark in retained.path_marks(entry)}
    assert all(mark.spare or mark in live for mark in marks), "a checkpoint that nothing can evict"
    spares = {mark for mark in marks if mark.spare}
    assert spares == set(retained.spares), "superseded checkpoints and their order disagree"
    limit = retained.config.retained_pages
    assert retained.ledger.retained <= limit, "over the byte budget (G9)"
    most = retained.config.max_entries
    assert most is None or len(retained.entries) <= most, "over max_entries (G9)"


def _check_tree(root: Path) -> list[Checkpoint]:
    found: list[Checkpoint] = []
    for path in root.subtree():
        assert path.positions == [mark.position for mark in path.marks], "positions stale"
        assert path.positions == sorted(path.positions), "marks out of order"
        assert all(path.start < p <= path.end for p in path.positions), "mark off its path"
        assert all(mark.path is path for mark in path.marks), "mark of another path"
        tip = int(path.tip is not None)
        assert path.entries == tip + sum(c.entries for c in path.children()), "entries miscounted"
        below = [(c.start, c.entries) for c in path.children() if c.entries]
        counted = {q: sum(n for start, n in below if start == q) for q, _ in below}
        assert path.live == counted, "entries at forks miscounted"
        ends = [*path.positions[-1:], *(path.forks or ())]
        assert path.parent is None or ends, "a path that holds nothing"
        assert max(ends, default=path.start) == path.end, "tokens that nothing holds"
        for position, group in (path.forks or {}).items():
            assert path.start <= position <= path.end, "fork off its path"
            assert group, "a position where nothing forks"
            for key, child in group.items():
                assert child.parent is path, "fork of another path"
                assert child.key == key, "fork under a wrong key"
                assert child.start == position, "fork at a wrong position"
        found += path.marks
    return found


def _check_counts(retained: Retained, marks: list[Checkpoint], leases: list[Lease]) -> None:
    ledger = retained.ledger
    held, leased, kept = (np.zeros(len(ledger.held), dtype=np.int64) for _ in range(3))
    guards: dict[Checkpoint, int] = {}
    gone: dict[Checkpoint, Units] = {}  # their table may have grown otherwise since
    for entry in retained.entries.values():
        for mark in entry.pinned or ():
            guards[mark] = guards.get(mark, 0) + 1
    for lease in leases:
        leased[lease.grant.own] += 1
        leased[lease.grant.borrowed] += 1
        if lease.grant.source is not None:
            source = lease.grant.source
            guards[source] = guards.get(source, 0) + 1
            if source.path is None:
                gone[source] = lease.grant.borrowed
    for mark in marks:
        units = retained.units_of(mark)
        assert len(np.unique(units)) == len(units), "a checkpoint holds a page twice"
        held[units] += 1
    for mark, count in guards.items():
        assert mark.guards == count, "guards miscounted"
        kept[gone[mark] if mark in gone else retained.units_of(mark)] += 1
    assert all(mark in guards for mark in marks if mark.guards), "guarded by nobody"
    for name, counted in (("held", held), ("leased", leased), ("kept", kept)):
        assert np.array_equal(getattr(ledger, name), counted), f"{name} counts are off"


def _check_entries(retained: Retained) -> None:
    for identity, entry in retained.entries.items():
        assert entry.identity == identity, "entry under a wrong number"
        path = entry.tip.path
        assert path is not None, "a tip that is not indexed"
        assert path.tip is entry, "a tip that its path does not know"
        assert not entry.tip.spare, "a superseded tip"
        assert retained.keys[entry.key][identity] is entry, "entry under a wrong key"
        deeper = [c for c in path.children() if c.start >= entry.tip.position and c.entries]
        assert not deeper, "an entry that is a prefix of another"
    assert sum(len(named) for named in retained.keys.values()) == len(retained.entries)
    counted = sum(root.entries for root in retained.roots.values())
    assert counted == len(retained.entries), "entries that no path counts"
