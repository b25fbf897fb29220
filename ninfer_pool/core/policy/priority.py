"""Priority classes: each has a policy of its own; a lower class is evicted first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

from ninfer_pool.core.entry import Entry
from ninfer_pool.core.policy.base import Policy

Rank: TypeAlias = tuple[int, int]
"""(0 where the conversation is over, else 1; the caller's priority)."""


class VictimOrder:
    """All entries in the order in which they are evicted; passes each notice to its policy."""

    __slots__ = ("_classes", "_make", "_of")

    def __init__(self, make: Callable[[], Policy]) -> None:
        self._make = make
        self._classes: dict[Rank, Policy] = {(1, 0): make()}
        self._of: dict[int, Rank] = {}

    def on_insert(self, entry: Entry, tick: int) -> None:
        """Put an entry under its class's policy."""
        rank = (int(not entry.released), entry.priority)
        if rank not in self._classes:
            self._classes[rank] = self._make()
            self._classes = dict(sorted(self._classes.items()))
        self._of[entry.identity] = rank
        self._classes[rank].on_insert(entry, tick)

    def on_hit(self, entry: Entry, tick: int) -> None:
        """Pass a use on."""
        self._classes[self._of[entry.identity]].on_hit(entry, tick)

    def on_truncate(self, entry: Entry, tick: int) -> None:
        """Pass a truncation on."""
        self._classes[self._of[entry.identity]].on_truncate(entry, tick)

    def on_remove(self, entry: Entry) -> None:
        """Take an entry out."""
        self._classes[self._of.pop(entry.identity)].on_remove(entry)

    def on_ghost_hit(self, age: int, gap: int, tick: int) -> None:
        """Notify every class that an evicted sequence was requested again."""
        for policy in self._classes.values():
            policy.on_ghost_hit(age, gap, tick)

    def on_cold_miss(self, tick: int) -> None:
        """Notify every class that a request shared nothing with anything remembered."""
        for policy in self._classes.values():
            policy.on_cold_miss(tick)

    def move(self, entry: Entry, tick: int, *, priority: int, released: bool) -> None:
        """Put an entry into another class."""
        if (entry.priority, entry.released) != (priority, released):
            self.on_remove(entry)
            entry.priority, entry.released = priority, released
            self.on_insert(entry, tick)

    def truncation_candidates(self, tick: int) -> Iterator[Entry]:
        """Yield entries whose tip is better evicted before `victims` are."""
        for policy in self._classes.values():
            yield from policy.truncation_candidates(tick)

    def victims(self, tick: int) -> Iterator[Entry]:
        """Yield entries, the first victim first."""
        for policy in self._classes.values():
            yield from policy.victims(tick)
