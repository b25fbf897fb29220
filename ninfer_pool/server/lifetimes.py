"""How long entries are retained, and how long they stay unused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, Histogram

from ninfer_pool.core.pool import PrefixPool
from ninfer_pool.core.results import Event

AGE_SECONDS: Final = (1, 5, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400, 604800)


class Lifetimes:
    """Times entries: from insertion to eviction, between two uses, from last use to eviction.

    An event is timed when it is read. Memory: two numbers per entry. Not thread-safe.
    """

    def __init__(
        self, pool: PrefixPool, clock: Callable[[], float], registry: CollectorRegistry
    ) -> None:
        waits = partial(Histogram, namespace="ninfer_pool", registry=registry, buckets=AGE_SECONDS)
        self._lifetime = waits(
            "entry_lifetime_seconds", "From an entry's insertion to its eviction"
        )
        self._gap = waits("entry_reuse_gap_seconds", "Between two uses of an entry")
        self._idle = waits("entry_idle_seconds", "From an entry's last use to its eviction")
        self._pool = pool
        self._clock = clock
        self._next = 0
        self._inserted: dict[int, float] = {}
        self._used: dict[int, float] = {}

    def follow(self) -> None:
        """Read the events since the last call. O(events)."""
        events = self._pool.events(self._next)
        if not events:
            return
        now, missed = self._clock(), events[0].number > self._next
        self._next = events[-1].number + 1
        for event in events:
            self._take(event, now)
        if missed:
            self._forget_evicted()

    def ages(self, entry: int) -> tuple[float, float]:
        """Return seconds since an entry's insertion and last use; 0 for an unknown entry."""
        now = self._clock()
        return now - self._inserted.get(entry, now), now - self._used.get(entry, now)

    def _take(self, event: Event, now: float) -> None:
        entry = event.entry
        if event.kind == "evicted":
            if entry in self._inserted:
                self._lifetime.observe(_elapsed(self._inserted.pop(entry), now))
                self._idle.observe(_elapsed(self._used.pop(entry), now))
        elif event.kind in ("stored", "touched"):
            self._inserted.setdefault(entry, now)
            before = self._used.get(entry, now)
            if before < now:  # several events of one commit or one reading are one use
                self._gap.observe(now - before)
            self._used[entry] = now

    def _forget_evicted(self) -> None:
        """Forget entries whose eviction was among events that were overwritten unread."""
        with self._pool.state.lock:
            retained = set(self._pool.state.catalog.entries)
        for entry in self._inserted.keys() - retained:
            del self._inserted[entry], self._used[entry]


def _elapsed(begin: float, now: float) -> float:
    """Return the seconds between two readings; 0 where the clock was set back."""
    return max(0.0, now - begin)
