"""Policies by expected reuse: ``return``, and ``default``, which uses it only under regret."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush, merge
from itertools import chain
from typing import Any, TypeAlias

from sortedcontainers import SortedList

from ninfer_pool.core.entry import Entry
from ninfer_pool.core.policy.base import Policy

_Item: TypeAlias = tuple[float, int] | tuple[float, int, int]

PATIENCE = 2.0
"""An entry that stays away longer than this many of its own gaps is taken to be over."""
CHEAP = 4
"""A tip that spares this many times less a byte than its entry does had better go first."""
NEW_WEIGHT = 0.75
"""Weight of the newest gap in an entry's own mean."""
COMMON_WEIGHT = 0.04
"""Weight of the newest gap in the mean over all entries."""
REGRET_WEIGHT = 0.25
"""Weight of the newest gap in the mean over entries requested after their eviction."""


class ReuseInterval(Policy):
    """By the chance of coming back soon x tokens saved / bytes; the lowest goes first.

    An entry's chance is one over its own mean gap between uses, in commits; until its second use
    the mean over all entries, or over those that came back too late where that is longer. An
    entry away for more than `PATIENCE` mean gaps is expected no more and goes first, the longest
    unused one first of all. Ties go to the newest: of entries that look alike and do not all
    fit, those that stay are the ones that can still pay. O(log entries) per notice or victim.
    """

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._gaps: dict[int, float] = {}
        self._places: dict[int, tuple[SortedList[Any], _Item]] = {}
        self._used: dict[int, int] = {}
        self._known: SortedList[Any] = SortedList()
        """Entries with a gap of their own, by worth."""
        self._fresh: SortedList[Any] = SortedList()
        """Entries used once, by worth for a gap of 0."""
        self._oldest_fresh: SortedList[Any] = SortedList()
        """The same, by last use."""
        self._over: SortedList[Any] = SortedList()
        """Entries expected no more, by last use."""
        self._cheap: SortedList[Any] = SortedList()
        """Entries whose tip spares little for its bytes, by last use."""
        self._due: list[tuple[float, int, int]] = []
        self._common = 0.0
        self._regret = 0.0

    def on_insert(self, entry: Entry, tick: int) -> None:
        """Await a new entry."""
        self._entries[entry.identity] = entry
        self._await(entry)

    def on_hit(self, entry: Entry, tick: int) -> None:
        """Learn the gap, then await the entry again."""
        self._leave(entry)
        gap = float(max(1, entry.gap))
        own = self._gaps.get(entry.identity, gap)
        self._gaps[entry.identity] = own + NEW_WEIGHT * (gap - own)
        self._learn(gap)
        self._await(entry)

    def on_truncate(self, entry: Entry, tick: int) -> None:
        """Rank the shorter entry."""
        self._leave(entry)
        self._await(entry)

    def on_remove(self, entry: Entry) -> None:
        """Forget an entry."""
        self._leave(entry)
        del self._entries[entry.identity]
        self._gaps.pop(entry.identity, None)

    def on_ghost_hit(self, age: int, gap: int, tick: int) -> None:
        """Learn how long an entry evicted too early would have had to wait."""
        self._learn(float(gap))
        self._regret = self._regret + REGRET_WEIGHT * (gap - self._regret) if self._regret else gap

    def truncation_candidates(self, tick: int) -> Iterator[Entry]:
        """Yield entries whose tip spares far less a byte than the whole entry does."""
        for _, identity in self._cheap:
            yield self._entries[identity]

    def victims(self, tick: int) -> Iterator[Entry]:
        """Yield entries expected no more, then the others, the least worth first."""
        self._give_up(tick)
        expected = self._expected()
        fresh = ((worth / (expected + 1), *rest) for worth, *rest in self._fresh)
        known = (tuple(item) for item in self._known)
        for item in chain(self._over, merge(known, fresh)):
            yield self._entries[item[-1]]

    def _expected(self) -> float:
        """The gap to expect of an entry that has none of its own yet."""
        return max(1.0, self._common, self._regret)

    def _learn(self, gap: float) -> None:
        weight = COMMON_WEIGHT if self._common else 1.0
        self._common += weight * (gap - self._common)

    def _give_up(self, tick: int) -> None:
        """Move entries that have been away for too long."""
        late = tick - PATIENCE * self._expected()
        while self._oldest_fresh and self._oldest_fresh[0][0] < late:
            self._expect_no_more(self._entries[self._oldest_fresh[0][-1]])
        while self._due and self._due[0][0] < tick:
            _, used, identity = heappop(self._due)
            entry = self._entries.get(identity)
            if entry is not None and entry.used == used:
                self._expect_no_more(entry)

    def _expect_no_more(self, entry: Entry) -> None:
        self._leave(entry)
        self._put(entry, self._over, (entry.used, entry.identity))

    def _await(self, entry: Entry) -> None:
        gap = self._gaps.get(entry.identity)
        worth = entry.saved / max(1, entry.bytes)
        if gap is None:
            self._put(entry, self._fresh, (worth, -entry.used, entry.identity))
            self._oldest_fresh.add((entry.used, entry.identity))
            return
        self._put(entry, self._known, (worth / (gap + 1), -entry.used, entry.identity))
        heappush(self._due, (entry.used + PATIENCE * gap, entry.used, entry.identity))
        if len(self._due) > 4 * len(self._entries) + 64:
            # An entry used twice at one tick is due twice: of those the first counts.
            first = {due[2]: due for due in sorted(self._due, reverse=True) if self._current(due)}
            self._due = sorted(first.values())  # a sorted list is a heap

    def _current(self, due: tuple[float, int, int]) -> bool:
        entry = self._entries.get(due[2])
        return entry is not None and entry.used == due[1]

    def _put(self, entry: Entry, place: SortedList[Any], item: _Item) -> None:
        place.add(item)
        self._places[entry.identity] = (place, item)
        self._used[entry.identity] = entry.used
        if CHEAP * entry.gain * entry.bytes < entry.saved * entry.gain_bytes:
            self._cheap.add((entry.used, entry.identity))

    def _leave(self, entry: Entry) -> None:
        place, item = self._places.pop(entry.identity)
        place.remove(item)
        self._cheap.discard((self._used.pop(entry.identity), entry.identity))
        if place is self._fresh:
            self._oldest_fresh.remove((-int(item[1]), entry.identity))


FORGET = 0.8
"""The evidence that remains after each commit that brings new evidence."""
ENTER, LEAVE = 0.35, 0.15
"""Shares of regret at which `Default` starts and stops to choose by `ReuseInterval`."""
LEAST_EVIDENCE = 0.1


class Default(ReuseInterval):
    """Least recently used; while that loses entries too early, by the chance of return.

    Requests for evicted entries are evidence that it does; requests for retained ones, that it
    does not. Both are forgotten quickly, and cold misses weaken them. So a working set that fits
    is served by recency. One that does not fit keeps the part that pays, instead of losing every
    entry just before its next use. O(log entries) per notice or victim.
    """

    def __init__(self) -> None:
        super().__init__()
        self._recent: SortedList[Any] = SortedList()
        self._ticks: dict[int, int] = {}
        self._regrets = 0.0
        self._hits = 0.0
        self._pressed = False
        self._counted = -1

    def on_hit(self, entry: Entry, tick: int) -> None:
        """A hit is evidence that the retained entries are the requested ones; once per commit."""
        if self._counted != tick:
            self._counted = tick
            self._weigh(regret=0.0, hit=1.0)
        super().on_hit(entry, tick)
        self._note(entry)

    def on_ghost_hit(self, age: int, gap: int, tick: int) -> None:
        """A regret."""
        super().on_ghost_hit(age, gap, tick)
        self._weigh(regret=1.0, hit=0.0)

    def on_cold_miss(self, tick: int) -> None:
        """Neither: the evidence so far is worth less."""
        self._weigh(regret=0.0, hit=0.0)

    def truncation_candidates(self, tick: int) -> Iterator[Entry]:
        """Only under pressure: while recency works, the least recent entry is of least use."""
        return super().truncation_candidates(tick) if self._pressed else iter(())

    def victims(self, tick: int) -> Iterator[Entry]:
        """Yield by chance of return under pressure, else the least recently used first."""
        if self._pressed:
            yield from super().victims(tick)
            return
        for _, identity in self._recent:
            yield self._entries[identity]

    def _weigh(self, *, regret: float, hit: float) -> None:
        self._regrets = FORGET * self._regrets + regret
        self._hits = FORGET * self._hits + hit
        evidence = self._regrets + self._hits
        share = self._regrets / evidence if evidence >= LEAST_EVIDENCE else 0.0
        self._pressed = share >= (LEAVE if self._pressed else ENTER)

    def on_insert(self, entry: Entry, tick: int) -> None:
        """Note the use, too."""
        super().on_insert(entry, tick)
        self._note(entry)

    def on_truncate(self, entry: Entry, tick: int) -> None:
        """Its tip's own last use counts."""
        super().on_truncate(entry, tick)
        self._note(entry)

    def on_remove(self, entry: Entry) -> None:
        """Forget an entry."""
        super().on_remove(entry)
        self._recent.remove((self._ticks.pop(entry.identity), entry.identity))

    def _note(self, entry: Entry) -> None:
        before = self._ticks.get(entry.identity)
        if before is not None:
            self._recent.remove((before, entry.identity))
        self._ticks[entry.identity] = entry.tip.tick
        self._recent.add((entry.tip.tick, entry.identity))
