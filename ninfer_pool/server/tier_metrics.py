"""What the metrics say of tiers: where hits came from, and what lies and moves below the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ninfer_pool.core.results import TierStats
from ninfer_pool.server.calls import Report

PREFIX: Final = "ninfer_pool_tier_"
GAUGES: Final = {
    "entries": "Entries that lie whole in a tier below the device",
    "checkpoints": "Their checkpoints",
    "bytes": "Bytes that a tier takes",
    "budget_bytes": "Bytes that a tier may take",
    "damaged": "Entries that could not be read when the tier was opened",
}
COUNTERS: Final = {
    "stored": "Entries written to a tier, those that grew counted again",
    "stored_bytes": "Bytes written to a tier",
    "images": "Images of states written to a tier",
    "promoted": "Checkpoints brought from a tier to the device",
    "promoted_bytes": "Bytes brought from a tier to the device",
    "dropped": "Entries that left the tier above and were not stored",
    "failed": "Writes that failed, and reads of what was damaged",
}


class TierHits:
    """Counts hits and resumed tokens by the tier that they came from. Not thread-safe."""

    def __init__(self) -> None:
        self._hits: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()

    def note(self, report: Report) -> None:
        """Take what came of a request."""
        if report.tier is not None:
            self._hits[report.tier] += 1
            self._tokens[report.tier] += report.cached_tokens

    def json(self) -> dict[str, dict[str, int]]:
        """Return hits and tokens by tier, only those that gave any."""
        return {
            tier: {"hits": count, "cache_hit_tokens": self._tokens[tier]}
            for tier, count in sorted(self._hits.items())
        }

    def collect(self) -> Iterator[Metric]:
        """Yield the counters, for scrapers."""
        for name, text, counts in (
            ("hits", "Requests that resumed something, by where it lay", self._hits),
            ("cached_tokens", "Prompt tokens that were resumed, by where they lay", self._tokens),
        ):
            family = CounterMetricFamily(PREFIX + name, text, labels=("tier",))
            for tier, count in sorted(counts.items()):
                family.add_metric((tier,), count)
            yield family


def collect_tiers(tiers: Sequence[TierStats]) -> Iterator[Metric]:
    """Yield what lies in each tier below the device and went through it; nothing without one."""
    if not tiers:
        return
    for name, text in GAUGES.items():
        gauge = GaugeMetricFamily(PREFIX + name, text, labels=("tier",))
        for tier in tiers:
            gauge.add_metric((tier.tier,), getattr(tier, name))
        yield gauge
    for name, text in COUNTERS.items():
        counter = CounterMetricFamily(PREFIX + name, text, labels=("tier",))
        for tier in tiers:
            counter.add_metric((tier.tier,), getattr(tier, name))
        yield counter


def tiers_json(tiers: Sequence[TierStats]) -> list[dict[str, Any]]:
    """Return every tier below the device as JSON, the fastest first."""
    return [asdict(tier) for tier in tiers]
