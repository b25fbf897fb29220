"""The protocol of a policy, and the common ground of those that rank entries once a use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sortedcontainers import SortedList

from ninfer_pool.core.entry import Entry


class Policy:
    """In what order may entries go? Subclass it and define `victims`; the rest are notices.

    The pool asks `victims` whenever it needs room, takes the first entry that nothing protects,
    shortens it to its next earlier checkpoint or, where none is left, drops it, and asks again.
    A policy decides nothing else: pins, leases, superseded checkpoints, priorities and the
    entry just committed are the pool's business. It may keep numbers of its own; it must be
    deterministic and must not look at a clock. One instance serves one priority class of one
    pool and is called under the pool's lock.

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
        """An entry came under this policy."""

    def on_hit(self, entry: Entry, tick: int) -> None:
        """A commit consumed the entry's tip, or made the entry grow."""

    def on_truncate(self, entry: Entry, tick: int) -> None:
        """The entry lost its tip and ends at an earlier checkpoint now."""

    def on_remove(self, entry: Entry) -> None:
        """The entry is gone, or no prefix of its own any more."""

    def on_ghost_hit(self, age: int, gap: int, tick: int) -> None:
        """A request would have hit what was evicted ``age`` and last used ``gap`` commits ago."""

    def on_cold_miss(self, tick: int) -> None:
        """A request shared nothing with anything retained or remembered."""

    def truncation_candidates(self, tick: int) -> Iterator[Entry]:
        """Yield entries that had better lose their tip before `victims` is asked for bytes."""
        return iter(())

    def victims(self, tick: int) -> Iterator[Entry]:
        """Yield entries, the first victim first. The pool seldom takes more than a few."""
        raise NotImplementedError


class Ranked(Policy):
    """A policy that ranks an entry when something happens to it: the lowest rank goes first.

    Subclasses define `rank`. O(log entries) a notice and a victim.
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
        """Rank an entry anew."""
        self._lift(entry)
        self._place(entry, self.rank(entry, tick))

    def on_truncate(self, entry: Entry, tick: int) -> None:
        """Rank an entry anew."""
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
