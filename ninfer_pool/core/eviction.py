"""Making room: which checkpoints go so that others fit, and never more than that (G1, G2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from ninfer_pool.core.entry import Checkpoint, Entry
from ninfer_pool.core.retained import Retained


@dataclass(slots=True, kw_only=True)
class Bill:
    """What one request's admission needed and what went for it, in pages."""

    needed: int = 0
    evicted: int = 0
    largest: int = 0
    """The largest single victim."""

    def add(self, pages: int) -> None:
        """Note a victim."""
        self.evicted += pages
        self.largest = max(self.largest, pages)


def free_pages(retained: Retained, pages: int, bill: Bill) -> None:
    """Evict until ``pages`` are free. The caller knows that `PageLedger.freeable` suffices."""
    ledger = retained.ledger
    _evict_until(retained, lambda: ledger.free >= pages, bill)


def fit_budget(
    retained: Retained, bill: Bill, *, fresh: list[Checkpoint], keep: Entry | None
) -> None:
    """Evict until the bytes and then the entries fit their bounds (G9).

    What was just committed goes last: not at all for bytes (`choose_retained` saw to it).
    """
    ledger, limit = retained.ledger, retained.config.retained_pages
    if ledger.retained > limit:
        for mark in fresh:
            retained.guard(mark)
        _evict_until(retained, lambda: ledger.retained <= limit, bill)
        for mark in fresh:
            retained.unguard(mark)
    most = retained.config.max_entries
    while most is not None and len(retained.entries) > most:
        _drop_next(retained, keep, bill)


def _drop_next(retained: Retained, keep: Entry | None, bill: Bill) -> None:
    """Remove one entry whole; the one just committed where all others are protected."""
    for entry in retained.ranking.order(retained.tick):
        if entry is not keep and not any(mark.guards for mark in retained.private_marks(entry)):
            retained.leaving(entry, entry.tip)
            drop_entry(retained, entry, bill)
            return
    assert keep is not None, "more protected entries than max_entries"
    retained.leaving(keep, keep.tip)
    drop_entry(retained, keep, bill)


def _evict_until(retained: Retained, done: Callable[[], bool], bill: Bill) -> None:
    while not done():
        if not (_evict_spare(retained, bill) or _shorten_next(retained, bill)):
            _thin_next(retained, bill)


def _evict_spare(retained: Retained, bill: Bill) -> bool:
    for mark in retained.spares:
        if not mark.guards:
            retained.leaving(None, mark)
            freed = retained.unlink_spare(mark)
            bill.add(freed)
            retained.counters.superseded_evicted += 1
            retained.counters.evicted_pages += freed
            return True
    return False


def _shorten_next(retained: Retained, bill: Bill) -> bool:
    ranking, tick = retained.ranking, retained.tick
    for entry in chain(ranking.thin(tick), ranking.order(tick)):
        if not entry.tip.guards:
            retained.leaving(entry, entry.tip)
            shorten(retained, entry, bill)
            return True
    return False


def _thin_next(retained: Retained, bill: Bill) -> None:
    """Take a checkpoint that lies before a protected tip: the last thing left to go."""
    order = retained.ranking.order(retained.tick)
    marks = chain.from_iterable(retained.path_marks(entry) for entry in order)
    mark = next((mark for mark in marks if not mark.guards), None)
    assert mark is not None, "what was promised to fit does not"
    retained.leaving(None, mark)
    freed = retained.unlink(mark)
    bill.add(freed)
    retained.counters.truncations += 1
    retained.counters.evicted_pages += freed


def shorten(retained: Retained, entry: Entry, bill: Bill) -> None:
    """Take the entry's tip for room, and say so."""
    key = entry.key
    freed = retained.shorten(entry)
    gone = entry.identity not in retained.entries
    retained.counters.evictions += gone
    retained.counters.truncations += not gone
    _account(retained, entry, bill, freed, "evicted" if gone else "truncated", key)


def drop_entry(retained: Retained, entry: Entry, bill: Bill) -> None:
    """Remove the entry whole, and say so."""
    key = entry.key
    freed = retained.drop(entry)
    retained.counters.evictions += 1
    _account(retained, entry, bill, freed, "evicted", key)


def _account(retained: Retained, entry: Entry, bill: Bill, freed: int, kind: str, key: str) -> None:
    bill.add(freed)
    retained.counters.evicted_pages += freed
    retained.emit(kind, entry, key=key, freed=freed)
    retained.sweep(entry.namespace)


def choose_retained(
    retained: Retained, fresh: list[Checkpoint], prompt_end: int
) -> list[Checkpoint]:
    """Return those of ``fresh`` (one table, ascending) that the byte budget has room for (G3, G9).

    The prompt's end comes first, then the deepest, then the others from the deepest; room is the
    budget less what is protected, since all else may go. O(pages).
    """
    ledger, size = retained.ledger, retained.config.page_tokens
    room = retained.config.retained_pages - ledger.protected
    images = retained.config.image_pages
    if -(-fresh[-1].position // size) + images * len(fresh) <= room:
        return fresh
    order = sorted(fresh, key=lambda mark: (mark.position != prompt_end, -mark.position))
    chosen: list[Checkpoint] = []
    deepest = 0
    for mark in order:
        reach = max(deepest, mark.position)
        pages = fresh[-1].table.ids[: -(-reach // size)]  # earlier ones: made before `extend`
        needed = int((ledger.kept[pages] == 0).sum()) + images * (1 + len(chosen))
        if needed <= room:
            chosen.append(mark)
            deepest = reach
    return sorted(chosen, key=lambda mark: mark.position)


def fits_free(retained: Retained, fresh: list[Checkpoint]) -> bool:
    """Say whether ``fresh`` (one table, ascending) fits with nothing evicted. O(pages)."""
    ledger, config = retained.ledger, retained.config
    pages = fresh[-1].table.ids[: -(-fresh[-1].position // config.page_tokens)]
    new = int((ledger.held[pages] == 0).sum()) + config.image_pages * len(fresh)
    most = config.max_entries
    room = most is None or len(retained.entries) < most
    return room and ledger.retained + new <= config.retained_pages
