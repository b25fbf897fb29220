"""What the server counts: in Prometheus' two formats, and in JSON."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse_plain

from ninfer_pool import PoolConfig
from ninfer_pool.server.chat_request import Control
from ninfer_pool.server.metrics import TENANTS, Metrics, wants_prometheus
from ninfer_pool.server.pool_metrics import Lifetimes
from tests.machinery.driver import Driver
from tests.server.made_reports import report, unheard

PLAIN, OPEN = "text/plain;version=0.0.4", "application/openmetrics-text;version=1.0.0"
PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;q=0.4,*/*;q=0.2"
)
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"


def shop(**changes: Any) -> Driver:
    config = PoolConfig(num_pages=400, page_bytes=16, image_bytes=32, page_tokens=4, grid=16)
    return Driver(config.replace(**changes))


def read(metrics: Metrics, accept: str = PLAIN) -> dict[str, float]:
    """Every sample of an exposition by name and labels, as Prometheus' own parser reads it."""
    body, kind = metrics.prometheus(accept=accept)
    parse: Callable[[str], Iterable[Metric]] = parse_open if "openmetrics" in kind else parse_plain
    found: dict[str, float] = {}
    for family in parse(body.decode()):
        assert family.name.startswith("ninfer_pool_")
        assert family.documentation
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            name = f"{sample.name.removeprefix('ninfer_pool_')}{{{labels}}}"
            assert name not in found
            found[name] = sample.value
    return found


@pytest.mark.parametrize("accept", [PLAIN, OPEN, PROMETHEUS])
def test_both_formats_say_what_the_reports_said(accept: str) -> None:
    metrics = Metrics(shop().pool, running=lambda: 3, queued=lambda: 4)
    metrics.note(report(1))
    metrics.note(report(2, reuse="full_reset", reason="no_entry", cached_tokens=0))
    metrics.note(report(3))
    found = read(metrics, accept)
    assert found["queries_total{reason=hit,reuse=restore_turn_checkpoint}"] == 2
    assert found["queries_total{reason=no_entry,reuse=full_reset}"] == 1
    assert found["hits_total{reason=hit,reuse=restore_turn_checkpoint}"] == 2
    assert found["hits_total{reason=no_entry,reuse=full_reset}"] == 0
    assert found["prompt_tokens_total{reason=no_entry,reuse=full_reset}"] == 100
    assert found["cached_tokens_total{reason=hit,reuse=restore_turn_checkpoint}"] == 120
    assert found["output_tokens_total{reason=hit,reuse=restore_turn_checkpoint}"] == 40
    assert found["draft_tokens_total{fate=accepted}"] == 15
    assert found["requests_total{finish=stop}"] == 3
    assert (found["running{}"], found["queued{}"]) == (3, 4)


def test_the_content_type_is_of_what_was_asked_for() -> None:
    metrics = Metrics(shop().pool)
    assert metrics.prometheus(accept=PLAIN)[1].startswith("text/plain; version=0.0.4")
    assert metrics.prometheus(accept=OPEN)[1].startswith("application/openmetrics-text")
    assert metrics.prometheus(accept=OPEN)[0].endswith(b"# EOF\n")
    odd = "application/openmetrics-text;version=one"
    assert metrics.prometheus(accept=odd)[1].startswith(("text/plain", "application/openmetrics"))


@pytest.mark.parametrize("accept", [PLAIN, OPEN, PROMETHEUS, "text/plain;q=0.5,*/*;q=0.1"])
def test_a_scraper_gets_text(accept: str) -> None:
    assert wants_prometheus(accept)
    assert wants_prometheus(accept.upper().replace("Q=", "q="))


@pytest.mark.parametrize(
    "accept",
    [
        "",
        "*/*",
        BROWSER,
        "application/json",
        "application/json, text/plain, */*",
        "text/plain;q=0.2, application/json;q=0.9",
        "text/plain;q=0",
        "text/plain;q=much",
    ],
)
def test_everyone_else_gets_json(accept: str) -> None:
    assert not wants_prometheus(accept)


def test_bytes_and_pages_by_use_are_the_pools() -> None:
    driver = shop()
    driver.serve(range(20), boundaries=[(9, "system")], answer=[1, 2])
    lease = driver.begin(range(50, 80))
    assert lease is not None
    metrics, stats = Metrics(driver.pool), driver.pool.stats()
    found = read(metrics)
    uses = ("free", "kv", "image", "running")
    pages = [found[f"pages{{use={use}}}"] for use in uses]
    assert sum(pages) == 400
    assert [found[f"bytes{{use={use}}}"] for use in uses] == [16 * each for each in pages]
    assert found["image_bytes{}"] == found["bytes{use=image}"] == stats.image_bytes > 0
    assert found["kv_bytes{}"] + found["image_bytes{}"] == found["retained_bytes{}"]
    assert found["retained_bytes{}"] == stats.retained_bytes
    assert found["bytes{use=running}"] > 0
    assert (found["entries{}"], found["leases{}"], found["running{}"]) == (1, 1, 1)
    assert found["checkpoints{}"] == stats.checkpoints
    lease.release()
    driver.pool.clear()
    found = read(metrics)
    assert found["bytes{use=free}"] == 400 * 16
    assert found["pinned_bytes{}"] == found["entries{}"] == 0


def test_evictions_are_told_by_kind() -> None:
    driver = shop(retained_bytes=16 * 16)
    driver.serve(range(8), answer=[1, 2])
    driver.serve([*range(8), 5, 6, 7])
    for start in range(100, 500, 100):
        driver.serve(range(start, start + 20))
    counters, found = driver.pool.stats().counters, read(Metrics(driver.pool))
    assert found["evictions_total{kind=evicted}"] == counters.evictions > 0
    assert found["evictions_total{kind=truncated}"] == counters.truncations
    assert found["evictions_total{kind=superseded}"] == counters.superseded_evicted > 0
    assert found["evictions_total{kind=expired}"] == 0
    assert found["captures_skipped_total{}"] == counters.captures_skipped
    assert found["evicted_pages_total{}"] == counters.evicted_pages
    begun = driver.begin([*range(400, 420), 1])
    assert begun is not None
    begun.quarantine()
    assert read(Metrics(driver.pool))["quarantined_total{}"] == 1


def test_lifetimes_and_gaps_are_timed_by_the_clock() -> None:
    now = [0.0]
    driver = shop(max_entries=1)
    metrics = Metrics(driver.pool, clock=lambda: now[0])
    driver.serve(range(20))
    metrics.note(report())
    now[0] = 10.0
    driver.serve([*range(20), 1, 2])  # it grows: used after 10 seconds
    metrics.note(report())
    now[0] = 15.0
    (entry,) = driver.pool.entries()
    assert metrics.ages(entry.entry) == (15.0, 5.0)
    assert metrics.ages(-1) == (0.0, 0.0)
    now[0] = 40.0
    metrics.follow()
    driver.serve(range(50, 60))  # and goes 30 seconds later, 40 seconds old
    metrics.note(report())
    found = read(metrics, OPEN)
    for name, seconds in (("reuse_gap", 10), ("lifetime", 40), ("idle", 30)):
        assert found[f"entry_{name}_seconds_count{{}}"] == 1
        assert found[f"entry_{name}_seconds_sum{{}}"] == seconds
    assert found["entry_reuse_gap_seconds_bucket{le=5.0}"] == 0
    assert found["entry_reuse_gap_seconds_bucket{le=15.0}"] == 1
    assert found["entry_reuse_gap_seconds_bucket{le=+Inf}"] == 1


def test_first_token_and_queue_are_histograms() -> None:
    metrics = Metrics(shop().pool)
    metrics.note(report(1))
    metrics.note(report(2, output_tokens=0, finish="cancelled"))
    found = read(metrics)
    assert found["first_token_seconds_count{}"] == 1, "a request without a token has no time of it"
    assert found["first_token_seconds_sum{}"] == pytest.approx(0.0123)
    assert found["first_token_seconds_bucket{le=0.01}"] == 0
    assert found["first_token_seconds_bucket{le=0.025}"] == 1
    assert found["queue_seconds_count{}"] == 2


def timed(driver: Driver, now: list[float]) -> tuple[Lifetimes, Callable[[str], float]]:
    """The pool's lifetimes by a clock that the test sets, and a reader of their histograms."""
    registry = CollectorRegistry()
    lifetimes = Lifetimes(driver.pool, lambda: now[0], registry)

    def read_sample(name: str) -> float:
        value = registry.get_sample_value(f"ninfer_pool_entry_{name}")
        assert value is not None
        return value

    return lifetimes, read_sample


def test_events_overwritten_unread_leave_nothing_behind() -> None:
    driver = shop(max_entries=1, events=4)
    now = [0.0]
    lifetimes, read_sample = timed(driver, now)
    for start in range(0, 200, 20):
        driver.serve(range(start, start + 9))
        if start % 60 == 0:
            now[0] += 1
            lifetimes.follow()
    lifetimes.follow()
    assert len(lifetimes._inserted) == len(lifetimes._used) == 1
    assert read_sample("lifetime_seconds_count") < 9


def test_a_clock_that_goes_back_counts_as_no_time() -> None:
    driver = shop(max_entries=1)
    now = [5.0]
    lifetimes, read_sample = timed(driver, now)
    driver.serve(range(9))
    lifetimes.follow()
    now[0] = 0.0
    driver.serve(range(20, 29))
    lifetimes.follow()
    for name in ("lifetime", "idle"):
        assert read_sample(f"{name}_seconds_count") == 1
        assert read_sample(f"{name}_seconds_sum") == 0


def test_json_has_totals_and_the_last_request() -> None:
    driver = shop()
    metrics = Metrics(driver.pool, running=lambda: 1, queued=lambda: 2)
    before = metrics.json()
    assert before["live"]["cache_hit_tokens"] == before["live"]["hit_rate"] == 0
    assert set(before["last"].values()) == {None}
    driver.serve(range(20), boundaries=[(9, "system")])
    metrics.note(report(7))
    metrics.note(report(8, cached_tokens=0, reuse="full_reset", reason="diverged"))
    told = json.loads(json.dumps(metrics.json()))
    live, last = told["live"], told["last"]
    assert (live["requests"], live["prompt_tokens"], live["output_tokens"]) == (2, 200, 40)
    assert (live["cache_hit_tokens"], live["hit_rate"]) == (60, 0.3)
    assert (live["running"], live["queued"], live["entries"]) == (1, 2, 1)
    assert live["bytes"] == live["kv_bytes"] + live["image_bytes"] > 0
    assert live["total_bytes"] == live["bytes"] + live["free_bytes"] + live["running_bytes"]
    assert (last["request"], last["cache_hit_tokens"], last["prompt_tokens"]) == (8, 0, 100)
    assert (last["reuse"], last["reason"], last["ttft_ms"]) == ("full_reset", "diverged", 12.3)


def test_json_and_text_agree_with_what_the_reports_said() -> None:
    metrics = Metrics(shop().pool)
    reports = [report(n, cached_tokens=n, reuse=f"restore_{n % 3}_checkpoint") for n in range(30)]
    for one in reports:
        metrics.note(one)
    cached = sum(one.cached_tokens for one in reports)
    text = read(metrics)
    assert metrics.json()["live"]["cache_hit_tokens"] == cached
    assert sum(text[name] for name in text if name.startswith("cached_tokens_total")) == cached


def test_a_request_that_never_had_a_lane_looked_nothing_up() -> None:
    metrics = Metrics(shop().pool)
    metrics.note(report(1))
    metrics.note(unheard(2))
    told = metrics.json()
    assert (told["live"]["requests"], told["live"]["prompt_tokens"]) == (2, 100)
    assert told["last"]["request"] == 1
    assert read(metrics)["requests_total{finish=cancelled}"] == 1


def test_one_tenants_last_request_is_no_others() -> None:
    metrics = Metrics(shop().pool)
    metrics.note(report(1))
    metrics.note(report(2, control=Control(salt="a"), prompt_tokens=77))
    assert metrics.json()["last"]["request"] == 1
    assert metrics.json(salt="a")["last"]["request"] == 2
    assert metrics.json(salt="b")["last"]["request"] is None
    for number in range(2 * TENANTS):
        metrics.note(report(number, control=Control(salt=f"tenant {number}")))
    assert metrics.json()["last"]["request"] == 1
    assert metrics.json(salt="a")["last"]["request"] is None, "memory is bounded"


def test_labels_hold_no_secret_and_are_bounded() -> None:
    metrics = Metrics(shop().pool)
    secret = Control(salt="the-salt", hint="the-hint")
    for number in range(1000):
        metrics.note(report(number, reason=f"made up {number}", control=secret))
    body, _ = metrics.prometheus(accept=PLAIN)
    for word in (b"the-salt", b"the-hint", b"a-key-of-the-pool"):
        assert word not in body
        assert word not in json.dumps(metrics.json(salt="the-salt")).encode()
    assert body.count(b"ninfer_pool_queries_total{") <= 257
    assert sum(v for name, v in read(metrics).items() if name.startswith("queries_total")) == 1000


def test_threads_may_note_and_read_at_once() -> None:
    metrics = Metrics(shop().pool)

    def work() -> None:
        for number in range(50):
            metrics.note(report(number))
            metrics.json()
            metrics.prometheus(accept=PLAIN)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metrics.json()["live"]["requests"] == 200
    assert metrics.json()["live"]["cache_hit_tokens"] == 200 * 60
