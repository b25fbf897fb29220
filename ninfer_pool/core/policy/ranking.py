"""Priority classes: each has a policy of its own; a lower class goes first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

from ninfer_pool.core.entry import Entry
from ninfer_pool.core.policy.base import Policy

Rank: TypeAlias = tuple[int, int]
"""(0 where the conversation is over, else 1; the caller's priority)."""


class Ranking:
    """All entries in the order in which they may go."""

    __slots__ = ("_classes", "_make", "_of")

    def __init__(self, make: Callable[[], Policy]) -> None:
        self._make = make
        self._classes: dict[Rank, Policy] = {(1, 0): make()}
        self._of: dict[int, Rank] = {}

    def added(self, entry: Entry, tick: int) -> None:
        """Put an entry under its class's policy."""
        rank = (int(not entry.released), entry.priority)
        if rank not in self._classes:
            self._classes[rank] = self._make()
            self._classes = dict(sorted(self._classes.items()))
        self._of[entry.identity] = rank
        self._classes[rank].added(entry, tick)

    def used(self, entry: Entry, tick: int) -> None:
        """Pass a use on."""
        self._classes[self._of[entry.identity]].used(entry, tick)

    def shortened(self, entry: Entry, tick: int) -> None:
        """Pass a shortening on."""
        self._classes[self._of[entry.identity]].shortened(entry, tick)

    def removed(self, entry: Entry) -> None:
        """Take an entry out."""
        self._classes[self._of.pop(entry.identity)].removed(entry)

    def returned(self, age: int, gap: int, tick: int) -> None:
        """Tell every class that an evicted sequence was asked for again."""
        for policy in self._classes.values():
            policy.returned(age, gap, tick)

    def stranger(self, tick: int) -> None:
        """Tell every class that a request shared nothing with anything known."""
        for policy in self._classes.values():
            policy.stranger(tick)

    def thin(self, tick: int) -> Iterator[Entry]:
        """Yield entries whose tip had better go before `order` is asked for bytes."""
        for policy in self._classes.values():
            yield from policy.thin(tick)

    def order(self, tick: int) -> Iterator[Entry]:
        """Yield entries, the first victim first."""
        for policy in self._classes.values():
            yield from policy.order(tick)
