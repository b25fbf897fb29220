"""How long entries live and rest, told from the pool's events and a clock."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final

from ninfer_pool.core.pool import PrefixPool
from ninfer_pool.core.results import Event

AGE_SECONDS: Final = (1, 5, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400, 604800)


class Histogram:
    """Counts values by the first bound that they do not exceed.

    >>> waits = Histogram((1, 5))
    >>> for seconds in (1, 7):
    ...     waits.add(seconds)
    >>> waits.cumulative(), waits.sum
    ([('1.0', 1.0), ('5.0', 1.0), ('+Inf', 2.0)], 8.0)
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Count a value; one below 0, which a clock can only give by mistake, as 0."""
        value = max(0.0, value)
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self._counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """Return (bound, values up to it), as Prometheus wants them."""
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self._counts)), strict=True))


class Lifetimes:
    """Times entries: from making to end, between two uses, from the last use to the end.

    An event happened at the latest when it was read. Memory: two numbers an entry. Not
    thread-safe.
    """

    def __init__(self, pool: PrefixPool, clock: Callable[[], float]) -> None:
        self.lives = Histogram(AGE_SECONDS)
        self.gaps = Histogram(AGE_SECONDS)
        self.idle = Histogram(AGE_SECONDS)
        self._pool = pool
        self._clock = clock
        self._next = 0
        self._made: dict[int, float] = {}
        self._used: dict[int, float] = {}

    def follow(self) -> None:
        """Read the events since the last time. O(events)."""
        events = self._pool.events(self._next)
        if not events:
            return
        now, missed = self._clock(), events[0].number > self._next
        self._next = events[-1].number + 1
        for event in events:
            self._take(event, now)
        if missed:
            self._forget_gone()

    def ages(self, entry: int) -> tuple[float, float]:
        """Return seconds since an entry was made and since its last use; 0 for an unknown one."""
        now = self._clock()
        return now - self._made.get(entry, now), now - self._used.get(entry, now)

    def _take(self, event: Event, now: float) -> None:
        entry = event.entry
        if event.kind == "evicted":
            if entry in self._made:
                self.lives.add(now - self._made.pop(entry))
                self.idle.add(now - self._used.pop(entry))
        elif event.kind in ("stored", "touched"):
            self._made.setdefault(entry, now)
            before = self._used.get(entry, now)
            if before < now:  # what one commit or one reading tells twice counts once
                self.gaps.add(now - before)
            self._used[entry] = now

    def _forget_gone(self) -> None:
        """Events were overwritten unread: forget entries whose end was among them."""
        with self._pool.lock:
            alive = set(self._pool.retained.entries)
        for entry in self._made.keys() - alive:
            del self._made[entry], self._used[entry]
