"""Retaining checkpoints: one `insert` for a commit, a promotion and an imported file.

Internal: called under the state's lock. Nothing here depends on requests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ninfer_pool.core import radix
from ninfer_pool.core.entry import Checkpoint, Entry, Node, PageTable
from ninfer_pool.core.identity import Attribute, Namespace
from ninfer_pool.core.radix import Step
from ninfer_pool.core.state import PoolState

GRID_WORTH = 4
"""A point shortly before a prompt's end that spares fewer tokens than this many images hold is
superseded at once: few prompts part just there."""
NEVER_SUPERSEDED = ("system", "junction")


@dataclass(slots=True, kw_only=True)
class NewSequence:
    """A sequence whose checkpoints are to be retained."""

    namespace: Namespace
    tokens: Sequence[memoryview]
    """Its token bytes, in parts."""
    attributes: Sequence[Attribute]
    """Those of its tokens; later ones are ignored."""
    prompt_tokens: int
    priority: int
    origin: int = 0
    source: Checkpoint | None = None
    """A checkpoint on its path, at ``origin`` or past it: tokens before are not compared again."""


class Inserted(NamedTuple):
    """The result of `insert`."""

    key: str
    entry: Entry | None
    """The entry that ends with the sequence; None where a longer entry continues it."""
    added: list[Checkpoint]
    standing: list[Checkpoint]
    """Those added, and older ones of the same computation that replace the rest."""


def insert(state: PoolState, sequence: NewSequence, fresh: list[Checkpoint]) -> Inserted:
    """Retain ``fresh``: ascending, the last at the sequence's end, all in one page table.

    The caller makes room afterwards (see `enforce_budget`). O(bytes past the origin) at the speed
    of memcmp, and one hash pass.
    """
    catalog, source, origin = state.catalog, sequence.source, sequence.origin
    namespace = sequence.namespace
    view = _from(sequence.tokens, origin)
    total = origin + len(view) // 4
    attributes = [item for item in sequence.attributes if item[0] < total]
    key = catalog.key(namespace, sequence.tokens, attributes)
    catalog.version += 1
    root, known = catalog.root(namespace), None
    if source is not None and source.node is not None:
        known, root = radix.path_to(source.node, origin)
    steps = radix.walk(root, view, attributes, origin=origin, known=known)
    entry = _detach_grown(state, steps, total)
    twins = _settle_twins(state, steps, fresh)
    if entry is not None and twins.kept:
        whole = source if source and source.position == origin else None
        _share_table(steps, twins.kept, state.config.page_tokens, source=whole)
    steps = radix.insert(steps, view, attributes, origin=origin)
    _place(state, steps, twins.kept)
    grown = entry
    entry = _set_tip(state, steps, entry, namespace, sequence.prompt_tokens)
    for checkpoint in twins.replaced:
        state.remove_checkpoint(checkpoint)
    useless = _supersede(state, steps, twins.kept, grown=grown)
    if entry is not None:
        catalog.rename(entry, key)
        catalog.order.move(entry, state.tick, priority=sequence.priority, released=False)
        state.move_pin(entry)
        state.emit("stored", entry)
        if useless:
            state.emit("superseded", entry)
    for checkpoint in twins.kept:
        if checkpoint.expires is not None:
            catalog.set_deadline(checkpoint, checkpoint.expires)
    added = [checkpoint for checkpoint in fresh if checkpoint.node is not None]
    return Inserted(key, entry, added, twins.kept + twins.older)


def _from(parts: Sequence[memoryview], origin: int) -> memoryview:
    """Return the token bytes from ``origin`` on; copied only where several parts hold some."""
    found, skip = [], 4 * origin
    for part in parts:
        if len(part) > skip:
            found.append(part[skip:])
        skip = max(0, skip - len(part))
    return found[0] if len(found) == 1 else memoryview(b"".join(found))


def revive(
    state: PoolState, checkpoint: Checkpoint, namespace: Namespace, key: str
) -> Entry | None:
    """Make a consumed superseded checkpoint a tip again, unless an entry continues it.

    Returns its entry; the caller makes room for it.
    """
    catalog, position = state.catalog, checkpoint.position
    catalog.version += 1
    catalog.superseded.discard(checkpoint)
    above, node = radix.path_to(checkpoint.anchor, position)
    if node.continues(position) or (node.tip and node.tip.tip.position >= position):
        return None
    steps = [*above, (node, position)]
    entry = _detach_grown(state, steps, position)
    entry = _set_tip(state, steps, entry, namespace, position)
    assert entry is not None
    catalog.rename(entry, key)
    state.move_pin(entry)
    state.emit("stored", entry)
    return entry


def _detach_grown(state: PoolState, steps: list[Step], total: int) -> Entry | None:
    """Return the entry that the path continues, taken off its tip.

    Either its tip is on the path, or the path parts inside its generated tail that no request
    has consumed; that tail then becomes superseded.
    """
    for node, upto in steps:
        entry = node.tip
        if entry is not None and entry.tip.position <= upto:
            state.catalog.clear_tip(entry)
            return entry
    node, upto = steps[-1]
    entry = node.tip
    if entry is None or upto == total or not _is_unconsumed_tail(entry, node, upto):
        return None
    tail = radix.split_tail(node, upto)
    state.emit("superseded", entry)
    state.catalog.clear_tip(entry)
    tables: dict[PageTable, PageTable] = {}
    for checkpoint in list(tail.checkpoints):  # of one computation or of several: `_share_table`
        checkpoint.table = tables.setdefault(checkpoint.table, checkpoint.table.copy())
        state.supersede(checkpoint, gap=0)
    return entry


def _is_unconsumed_tail(entry: Entry, node: Node, upto: int) -> bool:
    if entry.prompt_tokens > upto or node.continues(upto + 1):
        return False
    pinned = set(entry.pinned or ())
    past = node.checkpoints[bisect_left(node.positions, upto + 1) :]
    return not any(each.uses or each.refs > (each in pinned) for each in past)


class _Twins(NamedTuple):
    kept: list[Checkpoint]
    """Fresh checkpoints to add."""
    replaced: list[Checkpoint]
    """Older ones that they replace."""
    older: list[Checkpoint]
    """Older ones that stay instead of fresh ones."""


def _settle_twins(state: PoolState, steps: list[Step], fresh: list[Checkpoint]) -> _Twins:
    """Choose between fresh and older checkpoints of one position.

    An exact one also serves requests that the other serves. Of two that are not exact the newer
    one stays, since later checkpoints share its pages. Exact ones of the same cuts are the same
    computation: the older one stays and its whole pages are taken over (interning).
    """
    twins = _Twins([], [], [])
    size, strict = state.config.page_tokens, state.config.affinity == "strict"
    for one in fresh:
        others = radix.checkpoints_at(steps, one.position)
        if strict:
            others = [other for other in others if other.lane == one.lane]
        same = [each for each in others if one.cuts is not None and each.cuts == one.cuts]
        if same:
            _intern(state, one, same[0])
            twins.older.append(same[0])
            same[0].tick = state.tick
        elif one.cuts is not None or not any(o.cuts is not None or o.refs for o in others):
            twins.kept.append(one)
            twins.replaced.extend(each for each in others if each.cuts is None and not each.refs)
        else:
            twins.older.append(others[-1])
    for one in twins.kept:  # one below an interned page is partly filled with its rows
        if one.tail >= 0:
            one.tail = int(one.table.ids[one.position // size])
    return twins


def _intern(state: PoolState, checkpoint: Checkpoint, twin: Checkpoint) -> None:
    whole = checkpoint.position // state.config.page_tokens
    mine, theirs = checkpoint.table.ids[:whole], twin.table.ids[:whole]
    state.counters.interned_pages += int(np.count_nonzero(mine != theirs))
    mine[:] = theirs


def _share_table(
    steps: list[Step], fresh: list[Checkpoint], page_tokens: int, *, source: Checkpoint | None
) -> None:
    """Make the growing entry's checkpoints and the fresh ones use one table of pages.

    Only where the fresh ones are past all others on their path and continue from the same pages.
    Those resumed at the last of them, ``source``, do. Then bookkeeping stays linear however many
    turns a conversation has.
    """
    node, upto = steps[-1]
    before = node.checkpoints[-1] if node.checkpoints else None
    if upto < node.end or before is None or before.position >= fresh[0].position:
        return  # checkpoints past the parting may use the table, too
    whole = before.position // page_tokens
    ids = fresh[0].table.ids
    if before is source or np.array_equal(before.table.ids[:whole], ids[:whole]):
        before.table.grow(fresh[0].table, at=whole * page_tokens)
        for checkpoint in fresh:
            checkpoint.table = before.table


def _place(state: PoolState, steps: list[Step], fresh: list[Checkpoint]) -> None:
    rest = fresh
    for node, upto in steps:
        here = [each for each in rest if each.position <= upto]
        rest = rest[len(here) :]
        if here and rest:  # a table is of one node: see `_share_table`
            table = here[0].table.copy()
            for checkpoint in here:
                checkpoint.table = table
        if here:
            radix.add_checkpoints(node, here)
    catalog, config = state.catalog, state.config
    worth = GRID_WORTH * config.image_pages * config.page_tokens
    for checkpoint in fresh:
        checkpoint.tick = state.tick
        state.ledger.ref_checkpoint(state.units_of(checkpoint))
        if checkpoint.kind == "grid" and checkpoint is not fresh[-1]:
            gap = catalog.gap(checkpoint)
            if gap < worth:
                catalog.supersede(checkpoint, gap=gap)
    catalog.checkpoints += len(fresh)


def _set_tip(
    state: PoolState,
    steps: list[Step],
    entry: Entry | None,
    namespace: Namespace,
    prompt_tokens: int,
) -> Entry | None:
    """End ``entry``, or a new one, at the path's end; None where another continues it."""
    catalog, tick = state.catalog, state.tick
    node, total = steps[-1]
    tip = node.checkpoints[bisect_left(node.positions, total + 1) - 1]
    if node.tip is not None or node.continues(total):
        assert entry is None, "an entry that was a prefix of another"
        return None
    grown = entry is not None
    if entry is None:
        identity = next(catalog.serials)
        entry = Entry(identity=identity, namespace=namespace, tip=tip, tick=tick, lane=tip.lane)
        catalog.entries[identity] = entry
    entry.lane = tip.lane
    entry.prompt_tokens = min(prompt_tokens, total)
    catalog.set_tip(entry, tip)
    if grown:
        entry.consume(tick)
        catalog.order.on_hit(entry, tick)
    else:
        catalog.order.on_insert(entry, tick)
    return entry


def _supersede(
    state: PoolState, steps: list[Step], fresh: list[Checkpoint], *, grown: Entry | None
) -> bool:
    """Supersede the checkpoints that newer ones on their path made useless; True if any."""
    node, total = steps[-1]
    before = state.counters.superseded
    if node.tip is None:
        return False
    tip = node.tip
    base = tip.tip.position - tip.saved if tip is grown else state.catalog.base(tip)
    new = {*fresh, tip.tip}
    for checkpoint in radix.checkpoints_upto(steps, total):
        if checkpoint in new:
            continue
        if checkpoint.position <= base or checkpoint.superseded:
            break
        if checkpoint.kind not in NEVER_SUPERSEDED and not checkpoint.refs:
            state.supersede(checkpoint, gap=state.catalog.gap(checkpoint))
    return state.counters.superseded > before
