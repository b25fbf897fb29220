"""The events that a router follows, in bounded memory."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice

from ninfer_pool.core.results import Event

POSITIONS = 8
"""Positions kept for each event that may be kept, all events together."""


class Journal:
    """The newest events, numbered from 0; the oldest are forgotten when it is full (G8).

    It holds at most ``capacity`` events with `POSITIONS` times as many positions between them,
    four bytes each: a conversation of many checkpoints cannot make it grow without bound.
    """

    __slots__ = ("_capacity", "_events", "_next", "_positions")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._events: deque[tuple[int, str, int, str, array[int], int]] = deque()
        self._next = 0
        self._positions = 0

    def __bool__(self) -> bool:
        """Return whether events are kept at all."""
        return self._capacity > 0

    def add(self, kind: str, key: str, positions: Sequence[int], *, entry: int, freed: int) -> None:
        """Record an event; ``freed`` in bytes."""
        packed = array("i", positions)
        if self._events and self._events[-1][4] == packed:
            packed = self._events[-1][4]  # most events of one commit have the same
        self._events.append((self._next, kind, entry, key, packed, freed))
        self._next += 1
        self._positions += len(packed)
        most = POSITIONS * self._capacity
        while len(self._events) > max(1, self._capacity) or (
            self._positions > most and len(self._events) > 1
        ):
            self._positions -= len(self._events.popleft()[4])

    def since(self, number: int) -> Iterator[Event]:
        """Yield the events of that number and later, the oldest first. O(those)."""
        newest = islice(reversed(self._events), max(0, self._next - number))
        for at, kind, entry, key, positions, freed in reversed(list(newest)):
            yield Event(
                number=at,
                kind=kind,
                entry=entry,
                key=key,
                positions=tuple(positions),
                bytes=freed,
            )
