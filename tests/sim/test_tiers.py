"""Tiers in the simulator: what they give, what a restore takes, and that the sums hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ninfer_pool.sim.geometry import load_geometry
from ninfer_pool.sim.replay import Replay
from ninfer_pool.sim.setup import RunOutcome, RunPlan, Setup
from ninfer_pool.sim.simulator import Simulator
from ninfer_pool.sim.tiers import TierSize
from ninfer_pool.sim.tokens import TokenSource
from ninfer_pool.sim.trace import Trace, TraceRequest, read_trace
from tests.sim.workloads import make

GIB = 1 << 30
SHIPPED = Path(__file__).parents[2] / "ninfer_pool/sim/traces/claude_code_side_requests.jsonl"
SETUP = Setup(geometry=load_geometry("qwen3.8-27b"), model="qwen3.8-27b")


def host(budget: int, *, rate: float = 25e9) -> TierSize:
    return TierSize(name="host", budget_bytes=budget, bytes_s=rate)


def disk(budget: int, *, rate: float = 1.6e9) -> TierSize:
    return TierSize(name="disk", budget_bytes=budget, bytes_s=rate)


def serve(trace: Trace, *tiers: TierSize, lanes: int = 1, **bound: Any) -> RunOutcome:
    """Replay a trace under the default policy, and hold the sums of its tiers."""
    setup = replace(SETUP, tiers=tiers, lanes=lanes)
    outcome = Simulator(trace, setup).run(RunPlan(policy="default", **bound))
    run = outcome.run
    told = {each["tier"]: each for each in run["tiers"]}
    assert list(told) == ["device", *(tier.name for tier in tiers)]
    assert sum(each["reused_tokens"] for each in told.values()) == run["reused_tokens"]
    for name, each in told.items():
        here = [line for line in outcome.detail if line["tier"] == name]
        assert each["hits"] == len(here)
        assert each["reused_tokens"] == sum(line["reused"] for line in here)
    for tier in tiers:
        each = told[tier.name]
        assert each["bytes"] <= each["budget_bytes"] == tier.budget_bytes  # G9
        assert each["restore_seconds"] == pytest.approx(each["promoted_bytes"] / tier.bytes_s)
    return outcome


def endless(trace: Trace, *, lanes: int = 1) -> RunOutcome:
    return serve(trace, lanes=lanes)


@cache
def agents() -> Trace:
    """The first 400 requests of the trace that ships."""
    trace = read_trace(SHIPPED)
    return Trace(name=trace.name, header=trace.header, requests=trace.requests[:400])


def test_three_times_the_device_loses_next_to_nothing_with_host_and_disk() -> None:
    best = endless(agents()).run
    device = best["peak_bytes"] // 3
    run = serve(agents(), host(device), disk(3 * device), budget_bytes=device).run
    assert run["reused_tokens"] >= 0.97 * best["reused_tokens"]


@pytest.mark.parametrize("tier", [host, disk])
def test_a_rotation_that_the_device_forgets_comes_back_from_below(
    tier: Callable[[int], TierSize],
) -> None:
    """Six prompts in turn, room for two: each is gone from the device when it returns."""
    trace = make("rotation")
    best = endless(trace).run
    device = best["peak_bytes"] // 3
    alone = serve(trace, budget_bytes=device).run
    assert alone["reused_tokens"] < 0.5 * best["reused_tokens"]
    run = serve(trace, tier(3 * device), budget_bytes=device).run
    assert run["reused_tokens"] >= 0.97 * best["reused_tokens"]
    assert run["tiers"][1]["promoted_bytes"] > 0


def test_host_and_disk_share_what_neither_could_hold() -> None:
    trace = make("rotation")
    best = endless(trace).run
    third = best["peak_bytes"] // 3
    run = serve(trace, host(third), disk(3 * third), budget_bytes=third).run
    assert run["reused_tokens"] >= 0.97 * best["reused_tokens"]
    assert all(told["reused_tokens"] for told in run["tiers"][1:])


def returning() -> Trace:
    """A, B that needs all of the device, A again, and C that waits for it."""
    shapes: list[tuple[str, float, int | None, int, int]]
    shapes = [("a", 0.0, None, 0, 8_000), ("b", 100.0, None, 0, 8_000)]
    shapes += [("a", 200.0, 0, 8_001, 8_100), ("c", 200.0, None, 0, 500)]
    requests = tuple(
        TraceRequest(
            id=i, t=t, session=session, kind="main", parent=parent, shared=shared,
            input=length, output=1,
        )
        for i, (session, t, parent, shared, length) in enumerate(shapes)
    )  # fmt: skip
    return Trace(name="returning", header={}, requests=requests)


def ended(*tiers: TierSize) -> tuple[float, float]:
    """When the last request of `returning` ends, and what all restores took."""
    trace = returning()
    plan = RunPlan(policy="default", budget_bytes=GIB // 2)
    replay = Replay(trace, TokenSource(trace), replace(SETUP, tiers=tiers), plan)
    replay.run()
    return replay.now, sum(told["restore_seconds"] for told in replay.outcome().run["tiers"])


def test_prefill_begins_when_the_restore_is_done() -> None:
    fast, fast_seconds = ended(host(4 * GIB, rate=1e12))
    slow, slow_seconds = ended(host(4 * GIB, rate=0.2e9))
    assert slow_seconds == pytest.approx(5_000 * fast_seconds)
    assert slow_seconds > 1
    assert slow - fast == pytest.approx(slow_seconds - fast_seconds)


def test_what_is_slower_to_restore_than_to_prefill_stays_below() -> None:
    never, seconds = ended(host(4 * GIB, rate=1e6))
    assert seconds == 0
    assert never == ended()[0]


def test_a_tier_too_large_for_this_machine_costs_nothing() -> None:
    trace = returning()
    some = serve(trace, host(8 * GIB), budget_bytes=GIB // 2).run
    most = serve(trace, host(1 << 50), budget_bytes=GIB // 2).run
    assert most["tiers"][1] == {**some["tiers"][1], "budget_bytes": 1 << 50}


def test_bounds_have_no_tiers_and_owe_nothing_to_runs_that_do() -> None:
    trace, setup = returning(), replace(SETUP, tiers=(host(8 * GIB),))
    simulator, budget = Simulator(trace, setup), GIB // 2
    online = [simulator.run(RunPlan(policy="default", budget_bytes=budget))]
    found = [each.run for each in simulator.bounds(online, (), (budget,))]
    alone = [each.run for each in Simulator(trace, SETUP).bounds([], (), (budget,))]
    for run in (*found, *alone):
        run.pop("lookup_us")
    assert found == alone
    assert {run["host_budget_bytes"] for run in found} == {None}
    assert online[0].run["reused_tokens"] > found[-1]["reused_tokens"]


@pytest.mark.parametrize("lanes", [1, 4])
def test_the_pool_and_its_tiers_stay_whole(lanes: int) -> None:
    trace = make("mixed_agents", scale=0.2)
    setup = replace(SETUP, lanes=lanes, tiers=(host(2 * GIB), disk(8 * GIB)))
    replay = Replay(trace, TokenSource(trace), setup, RunPlan(policy="default", budget_bytes=GIB))
    replay.run()
    replay.pool.check()


def test_explain_names_the_tier() -> None:
    setup = replace(SETUP, tiers=(host(8 * GIB),))
    plan = RunPlan(policy="default", budget_bytes=GIB // 2)
    text = Simulator(returning(), setup).explain(plan, request=2)
    assert "in the host tier" in text
