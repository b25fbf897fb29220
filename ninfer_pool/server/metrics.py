"""What the server counts and times: as text for scrapers, as JSON for everyone else.

Labels are closed sets of words; no salt, key or text of a request is ever one of them.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder
from prometheus_client.registry import Collector

from ninfer_pool.core.pool import PrefixPool
from ninfer_pool.core.results import Stats
from ninfer_pool.server.calls import Report
from ninfer_pool.server.lifetimes import Histogram, Lifetimes
from ninfer_pool.server.tier_metrics import TierHits, collect_tiers, tiers_json

PREFIX: Final = "ninfer_pool_"
TENANTS: Final = 64
"""Tenants of whom the last request is remembered; those not heard of longest go first."""
LABELS: Final = 256
"""Pairs of reuse path and reason that are counted apart; there are far fewer."""
WAIT_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

COUNTERS: Final = {
    "evicted_pages": "Pages that were freed to make room",
    "captures_skipped": "Checkpoints asked for and not taken, whatever the reason",
    "images_saved": "Images of states that were saved",
    "quarantined": "Checkpoints that failed and are offered no more",
    "position_mismatches": "Requests whose position was not what the pool thought",
    "interned_pages": "Pages that were found to be held already",
    "refused": "Admissions that the pool refused",
}
"""The pool's counters that are told as they are."""
TOKENS: Final = {
    "prompt": "Prompt tokens of requests that ran",
    "cached": "Prompt tokens that were resumed and not computed",
    "output": "Tokens that were generated",
}
EVICTIONS: Final = {
    "evicted": "evictions",
    "truncated": "truncations",
    "superseded": "superseded_evicted",
    "expired": "expired",
}
GAUGES: Final = {
    "entries": "Entries retained",
    "checkpoints": "Checkpoints retained",
    "superseded": "Checkpoints that a newer one made useless, the first to go",
    "leases": "Requests that hold a lane",
    "retained_bytes": "Bytes of retained checkpoints, KV and images",
    "image_bytes": "Bytes of retained images alone",
    "pinned_bytes": "Bytes of checkpoints that are pinned or being resumed from",
}


def wants_prometheus(accept: str) -> bool:
    """Say whether an ``Accept`` header is a scraper's: it names the formats of Prometheus.

    A browser or ``*/*`` is none, nor is a client that likes JSON as much and names it first.

    >>> wants_prometheus("text/plain;version=0.0.4;q=0.5,*/*;q=0.1"), wants_prometheus("*/*")
    (True, False)
    """
    best, text = 0.0, False
    for item in accept.lower().split(","):
        name, *options = (part.strip() for part in item.split(";"))
        named = name in ("text/plain", "application/openmetrics-text")
        if (named or name == "application/json") and (weight := _weight(options)) > best:
            best, text = weight, named
    return text


def _weight(options: list[str]) -> float:
    for option in options:
        name, _, value = option.partition("=")
        if name.strip() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0


class Metrics(Collector):
    """Counts requests and times entries. Thread-safe; O(1) a request and O(1) an event.

    ``running`` and ``queued`` tell how many requests do and wait; ``clock`` gives seconds.
    Requests that never had a lane looked nothing up: they count in ``requests`` alone.
    """

    def __init__(
        self,
        pool: PrefixPool,
        *,
        running: Callable[[], int] | None = None,
        queued: Callable[[], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._running = running or (lambda: pool.running)
        self._queued = queued or (lambda: 0)
        self._mutex = threading.Lock()
        self._requests: Counter[str] = Counter()
        self._queries: Counter[tuple[str, str]] = Counter()
        self._hits: Counter[tuple[str, str]] = Counter()
        self._tokens = {name: Counter[tuple[str, str]]() for name in TOKENS}
        self._drafts: Counter[str] = Counter()
        self._tiers = TierHits()
        self._first_token = Histogram(WAIT_SECONDS)
        self._queue = Histogram(WAIT_SECONDS)
        self._lifetimes = Lifetimes(pool, clock)
        self._last: OrderedDict[str | None, Report] = OrderedDict()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def note(self, report: Report) -> None:
        """Take what came of a request, and follow the pool."""
        with self._mutex:
            self._requests[report.finish] += 1
            if report.lane is not None:
                self._count(report)
                self._remember(report)
            self._lifetimes.follow()

    def follow(self) -> None:
        """Read the pool's new events and time them; the oftener, the finer. O(events)."""
        with self._mutex:
            self._lifetimes.follow()

    def ages(self, entry: int) -> tuple[float, float]:
        """Return seconds since an entry was made and since its last use; 0 for an unknown one."""
        with self._mutex:
            self._lifetimes.follow()
            return self._lifetimes.ages(entry)

    def _count(self, report: Report) -> None:
        pair = (report.reuse, report.reason)
        if pair not in self._queries and len(self._queries) >= LABELS:
            pair = ("other", "other")
        self._queries[pair] += 1
        self._hits[pair] += report.cached_tokens > 0
        for name, counts in self._tokens.items():
            counts[pair] += getattr(report, f"{name}_tokens")
        self._tiers.note(report)
        self._drafts["proposed"] += report.drafted
        self._drafts["accepted"] += report.accepted
        self._queue.add(report.queued_seconds)
        if report.output_tokens:
            self._first_token.add(report.first_token_seconds)

    def _remember(self, report: Report) -> None:
        salt = report.control.salt
        self._last[salt] = report
        self._last.move_to_end(salt)
        while len(self._last) > TENANTS:
            del self._last[next(tenant for tenant in self._last if tenant is not None)]

    # -- for scrapers ----------------------------------------------------------------------

    def prometheus(self, *, accept: str) -> tuple[bytes, str]:
        """Return the exposition that an ``Accept`` header asks for, and its content type."""
        try:
            encode, kind = choose_encoder(accept)
            return encode(self._registry), kind
        except (ValueError, TypeError, IndexError):  # a version that is none
            return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4

    def collect(self) -> Iterator[Metric]:
        """Yield every metric, for prometheus-client's registry."""
        stats = self._pool.stats()
        with self._mutex:
            self._lifetimes.follow()
            families = [*self._of_requests(), *self._of_times()]
            hits = list(self._tiers.collect())
        yield from families
        yield from self._of_counters(stats)
        yield from self._of_pool(stats)
        yield from hits
        yield from collect_tiers(stats.tiers)

    def _of_requests(self) -> Iterator[Metric]:
        yield _counter("requests", "Requests that ended", {"finish": self._requests})
        yield _by_outcome("queries", "Lookups of requests that ran", self._queries)
        yield _by_outcome("hits", "Requests that resumed something", self._hits)
        for name, text in TOKENS.items():
            yield _by_outcome(f"{name}_tokens", text, self._tokens[name])
        yield _counter("draft_tokens", "Tokens that the draft head made", {"fate": self._drafts})

    def _of_times(self) -> Iterator[Metric]:
        times = self._lifetimes
        for name, text, histogram in (
            ("first_token_seconds", "From arrival to the first token", self._first_token),
            ("queue_seconds", "From arrival to a lane", self._queue),
            ("entry_lifetime_seconds", "From an entry's making to its eviction", times.lives),
            ("entry_reuse_gap_seconds", "Between two uses of an entry", times.gaps),
            ("entry_idle_seconds", "From an entry's last use to its eviction", times.idle),
        ):
            buckets, total = histogram.cumulative(), histogram.sum
            yield HistogramMetricFamily(PREFIX + name, text, buckets=buckets, sum_value=total)

    def _of_counters(self, stats: Stats) -> Iterator[Metric]:
        counters = stats.counters
        kinds = {kind: getattr(counters, name) for kind, name in EVICTIONS.items()}
        yield _counter("evictions", "What went, by how it went", {"kind": kinds})
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(PREFIX + name, text, value=getattr(counters, name))

    def _of_pool(self, stats: Stats) -> Iterator[Metric]:
        uses = self._uses(stats)
        size = self._pool.config.page_bytes
        pages = {use: count // size for use, count in uses.items()}
        yield _gauge("bytes", "Bytes of the slab by use", {"use": uses})
        yield _gauge("pages", "Pages of the slab by use", {"use": pages})
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(PREFIX + name, text, value=getattr(stats, name))
        kv = "Bytes of retained KV alone"
        yield GaugeMetricFamily(PREFIX + "kv_bytes", kv, value=uses["kv"])
        yield GaugeMetricFamily(PREFIX + "running", "Requests in a lane", value=self._running())
        yield GaugeMetricFamily(PREFIX + "queued", "Requests that wait", value=self._queued())

    def _uses(self, stats: Stats) -> dict[str, int]:
        """Return the slab's bytes by use: every byte is of one."""
        size = self._pool.config.page_bytes
        used = (stats.pages_total - stats.pages_free) * size
        return {
            "free": stats.pages_free * size,
            "kv": stats.retained_bytes - stats.image_bytes,
            "image": stats.image_bytes,
            "running": used - stats.retained_bytes,
        }

    # -- for everyone else -----------------------------------------------------------------

    def json(self, *, salt: str | None = None) -> dict[str, Any]:
        """Return totals of all requests, and the last one of the tenant that asks."""
        stats = self._pool.stats()
        uses = self._uses(stats)
        with self._mutex:
            self._lifetimes.follow()
            requests = self._requests.total()
            totals = {name: tokens.total() for name, tokens in self._tokens.items()}
            last, hits = self._last.get(salt), self._tiers.json()
        evictions = {kind: getattr(stats.counters, name) for kind, name in EVICTIONS.items()}
        live = {
            "requests": requests,
            "prompt_tokens": totals["prompt"],
            "cache_hit_tokens": totals["cached"],
            "output_tokens": totals["output"],
            "hit_rate": _rate(totals["cached"], totals["prompt"]),
            "running": self._running(),
            "queued": self._queued(),
            "entries": stats.entries,
            "checkpoints": stats.checkpoints,
            "bytes": stats.retained_bytes,
            "kv_bytes": uses["kv"],
            "image_bytes": uses["image"],
            "pinned_bytes": stats.pinned_bytes,
            "running_bytes": uses["running"],
            "free_bytes": uses["free"],
            "total_bytes": sum(uses.values()),
            "evictions": evictions,
            "hits_by_tier": hits,
            "tiers": tiers_json(stats.tiers),
        }
        return {"live": live, "last": _shown(last)}


def _shown(report: Report | None) -> dict[str, Any]:
    """Return what is told of the last request; every value None before the first."""
    one = report
    return {
        "request": one and one.number,
        "endpoint": one and one.endpoint,
        "prompt_tokens": one and one.prompt_tokens,
        "cache_hit_tokens": one and one.cached_tokens,
        "output_tokens": one and one.output_tokens,
        "reuse": one and one.reuse,
        "reason": one and one.reason,
        "exact": one and one.exact,
        "finish": one and one.finish,
        "ttft_ms": one and milliseconds(one.first_token_seconds),
        "queue_ms": one and milliseconds(one.queued_seconds),
        "total_ms": one and milliseconds(one.seconds),
        "tier": one and one.tier,
    }


def milliseconds(seconds: float) -> float:
    """Return seconds as milliseconds, to the microsecond."""
    return round(1000 * seconds, 3)


def _rate(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0


def _counter(name: str, text: str, values: dict[str, dict[str, int]]) -> Metric:
    return _filled(CounterMetricFamily(PREFIX + name, text, labels=tuple(values)), values)


def _by_outcome(name: str, text: str, counts: Counter[tuple[str, str]]) -> Metric:
    """A counter by reuse path and reason."""
    family = CounterMetricFamily(PREFIX + name, text, labels=("reuse", "reason"))
    for pair, count in sorted(counts.items()):
        family.add_metric(pair, count)
    return family


def _gauge(name: str, text: str, values: dict[str, dict[str, int]]) -> Metric:
    return _filled(GaugeMetricFamily(PREFIX + name, text, labels=tuple(values)), values)


def _filled(
    family: CounterMetricFamily | GaugeMetricFamily, values: dict[str, dict[str, int]]
) -> Metric:
    for labelled in values.values():
        for value, count in sorted(labelled.items()):
            family.add_metric((value,), count)
    return family
