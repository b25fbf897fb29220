"""The stated workloads have the stated shapes, at every seed and scale."""

from __future__ import annotations

import math

import pytest

from ninfer_pool.errors import ConfigError
from ninfer_pool.sim.trace import Trace, TraceRequest, check_trace
from tests.sim.workloads import WORKLOADS, make


def lengths(trace: Trace) -> list[int]:
    return [request.input for request in trace.requests]


def links(trace: Trace) -> list[tuple[str, str, int | None]]:
    return [(request.session, request.kind, request.parent) for request in trace.requests]


def ended_at(request: TraceRequest, trace: Trace) -> str:
    """Where on its parent a request parts from it."""
    if request.parent is None:
        return "new"
    parent = trace.requests[request.parent]
    return {parent.total: "answer", parent.input: "prompt"}.get(request.shared, "inside")


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("seed", [1, 2, 77])
@pytest.mark.parametrize("scale", [0.001, 0.1, 1.0, 3.0])
def test_every_workload_keeps_the_rules_of_the_format(name: str, seed: int, scale: float) -> None:
    trace = make(name, seed=seed, scale=scale)
    check_trace(trace)
    assert trace.name == name
    assert trace == make(name, seed=seed, scale=scale)


@pytest.mark.parametrize("name", WORKLOADS)
def test_scale_multiplies_lengths_and_nothing_else(name: str) -> None:
    one, three = make(name), make(name, scale=3.0)
    assert links(one) == links(three)
    for small, large in zip(one.requests, three.requests, strict=True):
        assert large.input == pytest.approx(3 * small.input, rel=0.01)


@pytest.mark.parametrize("name", ["seed_title", "two_pass", "saturate", "tool_loop"])
def test_seed_draws_lengths_and_nothing_else(name: str) -> None:
    one, two = make(name, seed=1), make(name, seed=2)
    assert links(one) == links(two)
    assert lengths(one) != lengths(two)


def test_seed_interleave() -> None:
    assert links(make("seed_interleave")) == [
        ("A", "main", None),
        ("B", "side", None),
        ("A", "main", 0),
        ("A", "main", 2),
    ]


def test_seed_title_asks_for_a_title_before_every_turn() -> None:
    trace = make("seed_title")
    titles, turns = trace.requests[::2], trace.requests[1::2]
    assert len(titles) == len(turns) == 54
    assert all(title.parent is None and title.kind == "side" for title in titles)
    assert (turns[0].input, turns[0].boundaries) == (2090, ((1800, "system"),))
    assert all(130 <= turn.input - turn.shared <= 960 for turn in turns[1:])
    assert max(title.input for title in titles) == 1800


def test_two_pass_asks_39_disjoint_prefixes_twice() -> None:
    trace = make("two_pass")
    first, second = trace.requests[:39], trace.requests[39:]
    assert sorted(r.input for r in first)[:3] == [3000, 3190, 3393]
    assert max(r.input for r in first) == 31_135
    assert all(r.parent is None for r in first)
    assert [(r.parent, r.shared, r.input) for r in second] == [
        (r.id, r.input, r.input) for r in first
    ]


def test_rounds() -> None:
    trace = make("rounds")
    groups = [[r for r in trace.requests if r.session.startswith(f"g{g}")] for g in range(4)]
    assert [len(group) for group in groups] == [12, 12, 12, 20]
    assert [len({r.session for r in group}) for group in groups] == [1, 3, 6, 10]
    assert set(lengths(trace)) == {4000}


def test_saturate() -> None:
    trace = make("saturate")
    strangers, pairs, turns = trace.requests[:50], trace.requests[50:56], trace.requests[56:]
    assert all(r.parent is None and 2000 <= r.input <= 20_000 for r in strangers)
    assert [(r.input, r.shared) for r in pairs] == [(26_300, 0), (26_340, 26_300)] * 3
    assert [(r.input, r.shared) for r in turns[::5]] == [
        (8000, 0),
        (11_000, 8000),
        (14_000, 11_000),
    ]
    assert len(turns) == 15


def test_tool_loop_goes_on_from_every_answer() -> None:
    trace = make("tool_loop")
    assert len(trace.requests) == 60
    assert {ended_at(r, trace) for r in trace.requests[1:]} == {"answer"}
    assert all(200 <= r.input - r.shared <= 900 for r in trace.requests[1:])


def test_rotation() -> None:
    trace = make("rotation")
    assert lengths(trace) == [55_070 + 60 * turn for turn in range(6) for _ in range(6)]
    assert [r.parent for r in trace.requests] == [None] * 6 + list(range(30))


def test_fanout_starts_together_on_one_system_prompt() -> None:
    trace = make("fanout")
    start = trace.requests[:12]
    assert [(r.parent, r.shared) for r in start] == [(None, 0)] + [(0, 11_500)] * 11
    assert start[-1].t - start[0].t < 1
    assert len({r.session for r in trace.requests}) == 12
    assert len(trace.requests) == 72


def test_branches() -> None:
    trace = make("branches")
    base, a, b = trace.requests[:3]
    assert (base.input, a.shared, b.shared) == (119_648, 119_648, 119_648)
    assert [r.session for r in trace.requests[3:23]] == ["filler", "A", "filler", "B"] * 5
    last = trace.requests[-1]
    assert (last.session, last.shared, last.input) == ("A", 121_198, 121_348)


def test_mixed_agents_has_everything_at_once() -> None:
    trace = make("mixed_agents")
    kinds = {kind: [r for r in trace.requests if r.kind == kind] for _, kind, _ in links(trace)}
    assert set(kinds) == {"main", "side", "subagent", "compaction"}
    assert 0.1 < len(kinds["side"]) / len(trace.requests) < 0.6
    assert {ended_at(r, trace) for r in kinds["main"]} == {"new", "answer", "prompt"}
    assert {ended_at(r, trace) for r in kinds["compaction"]} == {"inside"}
    assert len({r.session for r in kinds["main"]}) == 3


def test_an_unknown_workload_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="workload nope: unknown; must be one of seed_interleave"):
        make("nope")


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_a_scale_that_is_none_is_refused(scale: float) -> None:
    with pytest.raises(ConfigError, match="field scale"):
        make("rounds", scale=scale)
