"""Metrics of the pool: its counters and sizes, and how long entries are retained and unused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ninfer_pool.core.pool import PrefixPool
from ninfer_pool.core.results import Counters, Event, Stats

PREFIX: Final = "ninfer_pool_"
AGE_SECONDS: Final = (1, 5, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400, 604800)
COUNTERS: Final = {
    "evicted_pages": "Pages freed to make room",
    "captures_skipped": "Checkpoints requested and not taken, for any reason",
    "images_saved": "State images saved",
    "quarantined": "Checkpoints quarantined after a failed check",
    "position_mismatches": "Requests whose position differed from the pool's record",
    "interned_pages": "Pages replaced by an equal page that was already retained",
    "refused": "Admissions refused by the pool",
}
EVICTIONS: Final = {
    "evicted": "evictions",
    "truncated": "truncations",
    "superseded": "superseded_evicted",
    "expired": "expired",
}
GAUGES: Final = {
    "entries": "Retained entries",
    "checkpoints": "Retained checkpoints",
    "superseded": "Checkpoints made useless by a newer one, evicted first",
    "leases": "Requests that hold a lane",
    "retained_bytes": "Bytes of retained checkpoints, KV and state images",
    "image_bytes": "Bytes of retained state images",
    "pinned_bytes": "Bytes of checkpoints that are pinned or being resumed",
}
TIER_GAUGES: Final = {
    "entries": "Entries stored whole in a tier below the device",
    "checkpoints": "Checkpoints stored in a tier below the device",
    "bytes": "Bytes used by a tier",
    "budget_bytes": "Byte budget of a tier",
    "damaged": "Entries found unreadable when the tier was opened",
}
TIER_COUNTERS: Final = {
    "stored": "Entries written to a tier, again each time they grow",
    "stored_bytes": "Bytes written to a tier",
    "images": "State images written to a tier",
    "promoted": "Checkpoints promoted from a tier to the device",
    "promoted_bytes": "Bytes promoted from a tier to the device",
    "dropped": "Entries evicted from the tier above and not stored",
    "failed": "Failed writes, and reads of damaged data",
}


class PoolCollector(Collector):
    """Collects the pool's counters, sizes and tiers, and how many requests run and wait."""

    def __init__(
        self, pool: PrefixPool, *, running: Callable[[], int], queued: Callable[[], int]
    ) -> None:
        self._pool = pool
        self._running = running
        self._queued = queued

    def collect(self) -> Iterator[Metric]:
        """Yield every metric, all from one reading of the pool."""
        stats = self._pool.stats()
        evictions = evictions_by_kind(stats.counters)
        yield _by("kind", CounterMetricFamily, "evictions", "Evictions by kind", evictions)
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(PREFIX + name, text, value=getattr(stats.counters, name))
        uses = bytes_by_use(stats, page_bytes=self._pool.config.page_bytes)
        pages = {use: size // self._pool.config.page_bytes for use, size in uses.items()}
        yield _by("use", GaugeMetricFamily, "bytes", "Bytes of the slab by use", uses)
        yield _by("use", GaugeMetricFamily, "pages", "Pages of the slab by use", pages)
        for name, text in GAUGES.items():
            yield _gauge(name, text, getattr(stats, name))
        yield _gauge("kv_bytes", "Bytes of retained KV", uses["kv"])
        yield _gauge("running", "Requests in a lane", self._running())
        yield _gauge("queued", "Requests waiting for a lane", self._queued())
        if stats.tiers:
            yield from _tiers(stats)


def bytes_by_use(stats: Stats, *, page_bytes: int) -> dict[str, int]:
    """Return the slab's bytes by use; each byte has one use."""
    used = (stats.pages_total - stats.pages_free) * page_bytes
    return {
        "free": stats.pages_free * page_bytes,
        "kv": stats.retained_bytes - stats.image_bytes,
        "image": stats.image_bytes,
        "running": used - stats.retained_bytes,
    }


def evictions_by_kind(counters: Counters) -> dict[str, int]:
    """Return how many evictions of each kind there were."""
    return {kind: getattr(counters, name) for kind, name in EVICTIONS.items()}


def _tiers(stats: Stats) -> Iterator[Metric]:
    families = ((GaugeMetricFamily, TIER_GAUGES), (CounterMetricFamily, TIER_COUNTERS))
    for family, texts in families:
        for name, text in texts.items():
            values = {tier.tier: getattr(tier, name) for tier in stats.tiers}
            yield _by("tier", family, f"tier_{name}", text, values)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def _by(
    label: str,
    family: type[CounterMetricFamily | GaugeMetricFamily],
    name: str,
    text: str,
    values: Mapping[str, float],
) -> Metric:
    metric = family(PREFIX + name, text, labels=(label,))
    for value_label, value in values.items():
        metric.add_metric((value_label,), value)
    return metric


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
