"""The protocol of a policy, and the base of those that rank an entry at each use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sortedcontainers import SortedList

from ninfer_pool.core.entry import Entry


class Policy:
    """The order in which entries are evicted. Subclass it and define `victims`.

    When the pool needs room it takes the first unprotected entry of `victims`. It truncates that
    entry to its next earlier checkpoint, or removes it where there is none, and starts again.
    Pins, leases, superseded checkpoints, priorities and the entry just committed are the pool's
    business. A policy may keep numbers of its own. It must be deterministic and must not read a
    clock. One instance serves one priority class of one pool and is called under the pool's lock.
    The other methods are notices; ``tick`` counts commits.

    >>> class Smallest(Policy):
    ...     def __init__(self):
    ...         self.entries = []
    ...     def on_insert(self, entry, tick):
    ...         self.entries.append(entry)
    ...     def on_remove(self, entry):
    ...         self.entries.remove(entry)
    ...     def victims(self, tick):
    ...         return iter(sorted(self.entries, key=lambda entry: entry.tokens))
    """

    def on_insert(self, entry: Entry, tick: int) -> None:
        """No-op. An entry came under this policy."""

    def on_hit(self, entry: Entry, tick: int) -> None:
        """No-op. A commit consumed the entry's tip, or made the entry grow."""

    def on_truncate(self, entry: Entry, tick: int) -> None:
        """No-op. The entry lost its tip and ends at an earlier checkpoint now."""

    def on_remove(self, entry: Entry) -> None:
        """No-op. The entry was removed, or is no prefix of its own any more."""

    def on_ghost_hit(self, age: int, gap: int, tick: int) -> None:
        """No-op. A request missed a prefix evicted ``age`` and last used ``gap`` commits ago."""

    def on_cold_miss(self, tick: int) -> None:
        """No-op. A request shared nothing with anything retained or remembered."""

    def truncation_candidates(self, tick: int) -> Iterator[Entry]:
        """Yield entries whose tip is better evicted before any of `victims`; none by default."""
        return iter(())

    def victims(self, tick: int) -> Iterator[Entry]:
        """Yield entries, the first victim first. The pool seldom takes more than a few."""
        raise NotImplementedError


class Ranked(Policy):
    """A policy that ranks an entry when something happens to it: the lowest rank goes first.

    Subclasses define `rank`. O(log entries) per notice and victim.
    """

    def __init__(self) -> None:
        self._ranks: dict[int, tuple[Any, ...]] = {}
        self._entries: dict[int, Entry] = {}
        self._sorted: SortedList[tuple[Any, ...]] = SortedList()

    def rank(self, entry: Entry, tick: int) -> tuple[Any, ...]:
        """Return what to sort by; ties are broken by age."""
        raise NotImplementedError

    def on_insert(self, entry: Entry, tick: int) -> None:
        """Rank a new entry."""
        self._place(entry, self.rank(entry, tick))

    def on_hit(self, entry: Entry, tick: int) -> None:
        """Rank an entry again."""
        self._lift(entry)
        self._place(entry, self.rank(entry, tick))

    def on_truncate(self, entry: Entry, tick: int) -> None:
        """Rank an entry again."""
        self.on_hit(entry, tick)

    def on_remove(self, entry: Entry) -> None:
        """Forget an entry."""
        self._lift(entry)
        del self._ranks[entry.identity], self._entries[entry.identity]

    def victims(self, tick: int) -> Iterator[Entry]:
        """Yield entries by rank."""
        for item in self._sorted:
            yield self._entries[item[-1]]

    def _place(self, entry: Entry, rank: tuple[Any, ...]) -> None:
        self._ranks[entry.identity] = item = (*rank, entry.identity)
        self._entries[entry.identity] = entry
        self._sorted.add(item)

    def _lift(self, entry: Entry) -> None:
        self._sorted.remove(self._ranks[entry.identity])
