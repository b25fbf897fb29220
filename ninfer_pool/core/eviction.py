"""Making room: which checkpoints are evicted so that others fit, and no more (G1, G2)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from ninfer_pool.core.entry import Checkpoint, Entry
from ninfer_pool.core.results import EvictionCost
from ninfer_pool.core.state import PoolState


def evict_for(state: PoolState, pages: int, cost: EvictionCost) -> None:
    """Evict until ``pages`` are free. The caller checked that `PageLedger.freeable` suffices."""
    ledger = state.ledger
    if ledger.free < pages:
        _evict_until(state, lambda: ledger.free >= pages, cost)


def enforce_budget(
    state: PoolState, cost: EvictionCost, *, fresh: list[Checkpoint], keep: Entry | None
) -> None:
    """Evict until the bytes and then the entries fit their bounds (G9).

    ``fresh`` was just committed and goes last: not at all for bytes, see `select_within_budget`.
    """
    ledger, limit = state.ledger, state.config.retained_pages
    if ledger.retained > limit:
        for checkpoint in fresh:
            state.ref(checkpoint)
        _evict_until(state, lambda: ledger.retained <= limit, cost)
        for checkpoint in fresh:
            state.unref(checkpoint)
    most = state.config.max_entries
    while most is not None and len(state.catalog.entries) > most:
        _evict_next(state, keep, cost)
    state.note_peaks()


def _evict_next(state: PoolState, keep: Entry | None, cost: EvictionCost) -> None:
    """Evict one entry whole; the one just committed where all others are protected."""
    catalog = state.catalog
    victims = catalog.order.victims(state.tick)
    others = (each for each in victims if each is not keep and not catalog.protects(each))
    entry = next(others, keep)
    assert entry is not None, "more protected entries than max_entries"
    state.hooks.on_evict(entry, entry.tip)
    evict_entry(state, entry, cost)


def _evict_until(state: PoolState, done: Callable[[], bool], cost: EvictionCost) -> None:
    while not done():
        if not (_evict_superseded(state, cost) or _truncate_next(state, cost)):
            _evict_above_tip(state, cost)


def _evict_superseded(state: PoolState, cost: EvictionCost) -> bool:
    for checkpoint in state.catalog.superseded:
        if not checkpoint.refs:
            state.hooks.on_evict(None, checkpoint)
            freed = state.remove_superseded(checkpoint)
            cost.add(freed)
            state.counters.superseded_evicted += 1
            state.counters.evicted_pages += freed
            return True
    return False


def _truncate_next(state: PoolState, cost: EvictionCost) -> bool:
    order, tick = state.catalog.order, state.tick
    for entry in chain(order.truncation_candidates(tick), order.victims(tick)):
        if not entry.tip.refs:
            state.hooks.on_evict(entry, entry.tip)
            truncate_entry(state, entry, cost)
            return True
    return False


def _evict_above_tip(state: PoolState, cost: EvictionCost) -> None:
    """Evict a checkpoint above a protected tip: the last resort."""
    catalog = state.catalog
    victims = catalog.order.victims(state.tick)
    checkpoints = chain.from_iterable(catalog.path_checkpoints(entry) for entry in victims)
    checkpoint = next((each for each in checkpoints if not each.refs), None)
    assert checkpoint is not None, "the room promised cannot be made"
    state.hooks.on_evict(None, checkpoint)
    freed = state.remove_checkpoint(checkpoint)
    cost.add(freed)
    state.counters.truncations += 1
    state.counters.evicted_pages += freed


def truncate_entry(state: PoolState, entry: Entry, cost: EvictionCost) -> None:
    """Evict the entry's tip, with an event."""
    key = entry.key
    freed = state.truncate(entry)
    gone = entry.identity not in state.catalog.entries
    state.counters.evictions += gone
    state.counters.truncations += not gone
    _account(state, entry, cost, freed, "evicted" if gone else "truncated", key)


def evict_entry(state: PoolState, entry: Entry, cost: EvictionCost) -> None:
    """Evict the entry whole, with an event."""
    key = entry.key
    freed = state.remove_entry(entry)
    state.counters.evictions += 1
    _account(state, entry, cost, freed, "evicted", key)


def _account(
    state: PoolState, entry: Entry, cost: EvictionCost, freed: int, kind: str, key: str
) -> None:
    cost.add(freed)
    state.counters.evicted_pages += freed
    state.emit(kind, entry, key=key, freed=freed)
    state.catalog.sweep(entry.namespace)


def select_within_budget(
    state: PoolState, fresh: list[Checkpoint], prompt_end: int
) -> list[Checkpoint]:
    """Return those of ``fresh`` (one table, ascending) that the byte budget has room for (G3, G9).

    The prompt's end comes first, then the deepest, then the others from the deepest. Room is the
    budget less protected pages, since all else may be evicted. O(pages).
    """
    ledger, size = state.ledger, state.config.page_tokens
    room = state.config.retained_pages - ledger.pinned
    images = state.config.image_pages
    if -(-fresh[-1].position // size) + images * len(fresh) <= room:
        return fresh
    order = sorted(fresh, key=lambda each: (each.position != prompt_end, -each.position))
    chosen: list[Checkpoint] = []
    deepest = 0
    for checkpoint in order:
        reach = max(deepest, checkpoint.position)
        pages = fresh[-1].table.ids[: -(-reach // size)]  # earlier ones: made before `extend`
        needed = int((ledger.pin_refs[pages] == 0).sum()) + images * (1 + len(chosen))
        if needed <= room:
            chosen.append(checkpoint)
            deepest = reach
    return sorted(chosen, key=lambda each: each.position)


def fits_without_eviction(state: PoolState, fresh: list[Checkpoint]) -> bool:
    """Return whether ``fresh`` (one table, ascending) fits with nothing evicted. O(pages)."""
    ledger, config = state.ledger, state.config
    pages = fresh[-1].table.ids[: -(-fresh[-1].position // config.page_tokens)]
    new = int((ledger.checkpoint_refs[pages] == 0).sum()) + config.image_pages * len(fresh)
    most = config.max_entries
    room = most is None or len(state.catalog.entries) < most
    return room and ledger.retained + new <= config.retained_pages
