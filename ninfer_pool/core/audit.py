"""The audit recounts every number from checkpoints and leases; `describe` shows an entry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ninfer_pool.core.entry import Checkpoint, Entry, Node
from ninfer_pool.core.ledger import Units
from ninfer_pool.core.results import EntryInfo
from ninfer_pool.core.state import PoolState


class Hold(NamedTuple):
    """The units that one running lease holds."""

    own: Units
    borrowed: Units
    source: Checkpoint | None
    """The checkpoint that holds the borrowed ones."""


def audit(state: PoolState, holds: Sequence[Hold]) -> None:
    """Raise AssertionError with the first count that is off. O(everything retained)."""
    catalog = state.catalog
    state.ledger.check()
    checkpoints = [each for root in catalog.roots.values() for each in _check_tree(root)]
    assert len(checkpoints) == catalog.checkpoints, "checkpoints miscounted"
    _check_counts(state, checkpoints, holds)
    _check_entries(state)
    live = {each for entry in catalog.entries.values() for each in catalog.path_checkpoints(entry)}
    evictable = all(each.superseded or each in live for each in checkpoints)
    assert evictable, "a checkpoint that nothing can evict"
    superseded = {each for each in checkpoints if each.superseded}
    assert superseded == set(catalog.superseded), "superseded checkpoints and their order disagree"
    limit = state.config.retained_pages
    assert state.ledger.retained <= limit, "over the byte budget (G9)"
    most = state.config.max_entries
    assert most is None or len(catalog.entries) <= most, "over max_entries (G9)"


def _check_tree(root: Node) -> list[Checkpoint]:
    found: list[Checkpoint] = []
    for node in root.subtree():
        positions = [each.position for each in node.checkpoints]
        assert node.positions == positions, "positions stale"
        assert positions == sorted(positions), "checkpoints out of order"
        assert all(node.start < p <= node.end for p in positions), "checkpoint off its node"
        assert all(each.node is node for each in node.checkpoints), "checkpoint of another node"
        _check_children(node)
        found += node.checkpoints
    return found


def _check_children(node: Node) -> None:
    children = list(node.children_from())
    tip = int(node.tip is not None)
    assert node.entries == tip + sum(c.entries for c in children), "entries miscounted"
    below = [(c.start, c.entries) for c in children if c.entries]
    counted = {q: sum(n for start, n in below if start == q) for q, _ in below}
    assert node.live == counted, "entries at children miscounted"
    ends = [*node.positions[-1:], *(node.children or ())]
    assert node.parent is None or ends, "a node that holds nothing"
    assert max(ends, default=node.start) == node.end, "tokens that nothing holds"
    for position, group in (node.children or {}).items():
        assert node.start <= position <= node.end, "child off its node"
        assert group, "a position without children"
        for key, child in group.items():
            assert child.parent is node, "child of another node"
            assert child.key == key, "child under a wrong key"
            assert child.start == position, "child at a wrong position"


def _check_counts(
    state: PoolState, checkpoints: Sequence[Checkpoint], holds: Sequence[Hold]
) -> None:
    ledger = state.ledger
    count = len(ledger.checkpoint_refs)
    retained, leased, pinned = (np.zeros(count, dtype=np.int64) for _ in range(3))
    refs: dict[Checkpoint, int] = {}
    gone: dict[Checkpoint, Units] = {}  # their table may have grown otherwise since
    for entry in state.catalog.entries.values():
        for checkpoint in entry.pinned or ():
            refs[checkpoint] = refs.get(checkpoint, 0) + 1
    for own, borrowed, source in holds:
        leased[own] += 1
        leased[borrowed] += 1
        if source is not None:
            refs[source] = refs.get(source, 0) + 1
            if source.node is None:
                gone[source] = borrowed
    for checkpoint in checkpoints:
        units = state.units_of(checkpoint)
        assert len(np.unique(units)) == len(units), "a checkpoint holds a page twice"
        retained[units] += 1
    for checkpoint, counted in refs.items():
        assert checkpoint.refs == counted, "references miscounted"
        pinned[gone[checkpoint] if checkpoint in gone else state.units_of(checkpoint)] += 1
    assert all(each in refs for each in checkpoints if each.refs), "a reference without a holder"
    assert np.array_equal(ledger.checkpoint_refs, retained), "checkpoint_refs are off"
    assert np.array_equal(ledger.lease_refs, leased), "lease_refs are off"
    assert np.array_equal(ledger.pin_refs, pinned), "pin_refs are off"


def _check_entries(state: PoolState) -> None:
    catalog = state.catalog
    for identity, entry in catalog.entries.items():
        assert entry.identity == identity, "entry under a wrong number"
        node = entry.tip.node
        assert node is not None, "a tip that is not indexed"
        assert node.tip is entry, "a tip that is not its node's"
        assert not entry.tip.superseded, "a superseded tip"
        assert catalog.keys[entry.key][identity] is entry, "entry under a wrong key"
        deeper = [c for c in node.children_from(entry.tip.position) if c.entries]
        assert not deeper, "an entry that is a prefix of another"
    assert sum(len(named) for named in catalog.keys.values()) == len(catalog.entries)
    counted = sum(root.entries for root in catalog.roots.values())
    assert counted == len(catalog.entries), "entries that no node counts"


def describe(state: PoolState, entry: Entry) -> EntryInfo:
    """Return an entry at this moment. O(its pages)."""
    catalog, ledger, size = state.catalog, state.ledger, state.config.page_bytes
    checkpoints = sorted(catalog.path_checkpoints(entry), key=lambda each: each.position)
    held = [state.units_of(each) for each in catalog.private_checkpoints(entry)]
    units, holders = np.unique(np.concatenate(held), return_counts=True)
    alone = units[holders == ledger.checkpoint_refs[units]]
    images = alone[alone >= ledger.total]
    return EntryInfo(
        key=entry.key,
        entry=entry.identity,
        namespace=entry.namespace,
        tokens=entry.tip.position,
        lane=entry.lane,
        checkpoints=tuple((each.position, each.kind) for each in checkpoints),
        superseded=tuple(each.position for each in checkpoints if each.superseded),
        bytes=ledger.size(alone) * size,
        image_bytes=ledger.size(images) * size,
        hits=entry.hits,
        priority=entry.priority,
        pinned=entry.pinned is not None,
        released=entry.released,
    )
