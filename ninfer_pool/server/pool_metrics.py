"""Metrics whose values are stored in the pool: read from it whenever they are collected."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ninfer_pool.core.pool import PrefixPool
from ninfer_pool.core.results import Counters, Stats, TierStats

PREFIX: Final = "ninfer_pool_"
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
        yield from _counters(stats.counters)
        yield from _gauges(stats, page_bytes=self._pool.config.page_bytes)
        yield _gauge("running", "Requests in a lane", self._running())
        yield _gauge("queued", "Requests waiting for a lane", self._queued())
        if stats.tiers:
            yield from _tiers(stats.tiers)


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


def _counters(counters: Counters) -> Iterator[Metric]:
    evictions = CounterMetricFamily(PREFIX + "evictions", "Evictions by kind", labels=("kind",))
    yield _filled(evictions, evictions_by_kind(counters))
    for name, text in COUNTERS.items():
        yield CounterMetricFamily(PREFIX + name, text, value=getattr(counters, name))


def _gauges(stats: Stats, *, page_bytes: int) -> Iterator[Metric]:
    uses = bytes_by_use(stats, page_bytes=page_bytes)
    pages = {use: size // page_bytes for use, size in uses.items()}
    for name, text, values in (
        ("bytes", "Bytes of the slab by use", uses),
        ("pages", "Pages of the slab by use", pages),
    ):
        yield _filled(GaugeMetricFamily(PREFIX + name, text, labels=("use",)), values)
    for name, text in GAUGES.items():
        yield _gauge(name, text, getattr(stats, name))
    yield _gauge("kv_bytes", "Bytes of retained KV", uses["kv"])


def _tiers(tiers: Sequence[TierStats]) -> Iterator[Metric]:
    for kind, texts in (
        (GaugeMetricFamily, TIER_GAUGES),
        (CounterMetricFamily, TIER_COUNTERS),
    ):
        for name, text in texts.items():
            values = {tier.tier: getattr(tier, name) for tier in tiers}
            yield _filled(kind(f"{PREFIX}tier_{name}", text, labels=("tier",)), values)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[str, float]) -> Metric:
    for label, value in values.items():
        family.add_metric((label,), value)
    return family
