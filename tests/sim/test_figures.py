"""The figures that the pool must reach on stated workloads, with other seeds and sizes too."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ninfer_pool.sim.geometry import load_geometry
from ninfer_pool.sim.setup import RunOutcome, RunPlan, Setup
from ninfer_pool.sim.simulator import Simulator
from ninfer_pool.sim.single_lane import run_single_lane
from ninfer_pool.sim.trace import Trace, read_trace
from tests.sim.workloads import make

DATA = Path(__file__).parents[1] / "data"
GIB = 1 << 30
SEEDS = (1, 2, 3)


def setup(lanes: int = 1) -> Setup:
    return Setup(geometry=load_geometry("qwen3.8-27b"), model="qwen3.8-27b", lanes=lanes)


def serve(trace: Trace, policy: str = "default", lanes: int = 1, **bound: Any) -> RunOutcome:
    """Replay a trace, and hold G2, G9 and the sums line by line."""
    plan = RunPlan(policy=policy, **bound)
    outcome = Simulator(trace, setup(lanes)).run(plan)
    run = outcome.run
    assert run["input_tokens"] == run["reused_tokens"] + run["prefilled_tokens"]
    for line in outcome.detail:
        assert line["evicted_bytes"] <= line["needed_bytes"] + line["victim_max_bytes"], line
    if plan.budget_bytes is not None:
        assert run["peak_bytes"] <= plan.budget_bytes
    return outcome


def endless(trace: Trace) -> RunOutcome:
    outcome = serve(trace, "lru")
    assert outcome.run["evictions"] == outcome.run["truncations"] == 0  # G1
    return outcome


def first(trace: Trace, count: int) -> Trace:
    return Trace(name=trace.name, header=trace.header, requests=trace.requests[:count])


def reused(outcome: RunOutcome) -> list[int]:
    return [line["reused"] for line in outcome.detail]


def test_seed_interleave_reuses_again_with_two_entries() -> None:
    trace = make("seed_interleave")
    assert [bool(tokens) for tokens in reused(serve(trace, entries=2))] == [0, 0, 1, 1]
    assert run_single_lane(trace, setup()).detail[2]["reused"] == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_title_requests_do_not_evict_the_conversation(seed: int) -> None:
    trace = make("seed_title", seed=seed)
    best = endless(trace).run["hit_rate"]
    assert serve(trace, entries=2).run["hit_rate"] >= 0.95 * best
    assert run_single_lane(trace, setup()).run["hit_rate"] < 0.02


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_two_pass(seed: int, scale: float) -> None:
    trace = make("two_pass", seed=seed, scale=scale)
    half = len(trace.requests) // 2
    room = endless(first(trace, half)).run["peak_bytes"]
    second = sum(request.input for request in trace.requests[half:])
    wide = serve(trace, budget_bytes=room * 11 // 10)
    assert sum(reused(wide)[half:]) >= 0.99 * second
    assert wide.run["evictions"] == 0
    tight = serve(trace, budget_bytes=room // 2)
    assert sum(reused(tight)[half:]) >= 0.40 * second
    assert sum(reused(serve(trace, "lru", budget_bytes=room // 2))[half:]) <= 0.02 * second


def test_rounds_with_seven_entries() -> None:
    lines = serve(make("rounds"), entries=7).detail
    hits = [bool(line["reused"]) for line in lines]
    one, three, six, ten = hits[:12], hits[12:24], hits[24:36], hits[36:]
    assert sum(one) == 11
    assert all(three[3:])
    assert all(six[6:])
    assert sum(ten[10:]) >= 6


@pytest.mark.parametrize("seed", SEEDS)
def test_a_full_pool_never_freezes(seed: int) -> None:
    trace = make("saturate", seed=seed)
    last = reused(serve(trace, budget_bytes=4 * GIB))[-5:]
    assert min(last) >= 11_000
    lines = serve(trace, entries=2).detail
    second = [line["reused"] for line in lines if line["input"] == 26_340]
    assert len(second) == 3
    assert min(second) >= 26_300


@pytest.mark.parametrize("seed", SEEDS)
def test_each_tool_step_prefills_its_growth(seed: int) -> None:
    trace = make("tool_loop", seed=seed)
    lines = serve(trace, entries=1).detail
    for before, request, line in zip(trace.requests, trace.requests[1:], lines[1:], strict=False):
        assert request.input - line["reused"] <= request.input - before.input + 64


def test_rotation() -> None:
    trace = make("rotation")
    best = endless(trace).run["reused_tokens"]
    assert serve(trace, entries=6).run["reused_tokens"] >= 0.98 * best
    assert serve(trace, entries=5).run["reused_tokens"] >= 0.5 * best
    assert serve(trace, "lru", entries=5).run["reused_tokens"] == 0


@pytest.mark.parametrize("lanes", [1, 12])
def test_a_shared_system_prompt_is_prefilled_once(lanes: int) -> None:
    trace = make("fanout")
    lines = serve(trace, lanes=lanes).detail
    cold = [line for line in lines if line["reused"] < 11_500]
    assert len(cold) == 1


@cache
def agents(name: str) -> Trace:
    return read_trace(DATA / f"{name}.jsonl.gz")


@pytest.mark.parametrize(
    ("name", "entries", "gain"),
    [
        ("claude_code_8_lanes", 2, 0.02),
        ("claude_code_8_lanes", 8, -0.003),
        ("claude_code_32_lanes", 4, 0.06),
        ("claude_code_32_lanes", 8, 0.015),
    ],
)
def test_default_beats_recency_on_agents(name: str, entries: int, gain: float) -> None:
    trace = agents(name)
    lru = serve(trace, "lru", entries=entries).run["hit_rate"]
    assert serve(trace, entries=entries).run["hit_rate"] >= lru + gain


def test_simulate_fails_where_the_pool_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from ninfer_pool.core.pool import PrefixPool

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("the pool is used")

    monkeypatch.setattr(PrefixPool, "acquire", broken)
    with pytest.raises(RuntimeError, match="the pool is used"):
        serve(make("rounds"), entries=2)
