"""The server's own log becomes a trace that shares what the traffic shared, to the token."""

from __future__ import annotations

import json
import tempfile
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer_pool import cli
from ninfer_pool.errors import TraceError
from ninfer_pool.server.chat_request import Control
from ninfer_pool.server.request_log import RequestLog, common_tokens
from ninfer_pool.sim.converters import convert
from ninfer_pool.sim.geometry import load_geometry
from ninfer_pool.sim.relations import Relations
from ninfer_pool.sim.setup import RunPlan, Setup, pool_config
from ninfer_pool.sim.simulator import Simulator
from ninfer_pool.sim.tokens import TokenSource
from ninfer_pool.sim.trace import Trace, read_trace
from tests.server.made_reports import report, unheard
from tests.server.played import play
from tests.sim.workloads import make

HEAD = {"format": "ninfer-pool-server-log", "version": 1, "run": "r", "t": 1.0}
Shape = tuple[int | None, int]


def row(id: int, **changes: Any) -> dict[str, Any]:
    """One line of a log."""
    fields = {"run": "r", "id": id, "t": 1000.0 + id, "session": "s1", "kind": "chat"}
    relation = {"tenant": None, "parent": None, "shared": 0, "input": 100, "output": 10}
    flags = {"retain": True, "read": True, "lane": 0, "boundaries": [], "forgotten": 0}
    return {**fields, **relation, **flags, **changes}


def convert_lines(folder: Path, *records: object) -> Trace:
    """Convert a log of these lines; a str stands as it is."""
    path = folder / "log.jsonl"
    texts = (each if isinstance(each, str) else json.dumps(each) for each in records)
    path.write_text("".join(text + "\n" for text in texts))
    return convert("server-log", path)


def shapes(trace: Trace) -> list[Shape]:
    return [(request.parent, request.shared) for request in trace.requests]


def notes(trace: Trace) -> str:
    return str(trace.header["notes"])


# --- to the token ---------------------------------------------------------------------------------

Serving = tuple[list[int], list[int], bool]


@st.composite
def traffic(draw: st.DrawFn, *, alike: bool) -> list[Serving]:
    """Prompts that go on from others or part from them: (prompt, output, ends late).

    ``alike``: outputs may repeat what was there; else each begins with a token of its own.
    """
    few = st.lists(st.integers(1, 3), max_size=4)
    made: list[Serving] = []
    for number in range(draw(st.integers(1, 8))):
        stem: list[int] = []
        if draw(st.booleans()) and made:
            prompt, output, _ = draw(st.sampled_from(made))
            whole = prompt + output
            stem = whole[: draw(st.integers(0, len(whole)))]
        prompt = (stem + draw(few)) or [1]
        output = draw(few) if alike else [100 + number, *draw(few)]
        late = draw(st.booleans())
        made.append((prompt, output, late))
    return made


def played(served: list[Serving]) -> Trace:
    """Log requests, those that end late at the end, and convert the log."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.jsonl"
        log, late = RequestLog(path), []
        for number, (prompt, output, ends_late) in enumerate(served):
            arrival = log.arrive(number, prompt, endpoint="/v1/messages", arrived=1.0)
            if ends_late:
                late.append((arrival, output))
            else:
                log.finish(arrival, report(number), output=output)
        for arrival, output in late:
            log.finish(arrival, report(arrival.number), output=output)
        log.close()
        return convert("server-log", path)


@settings(max_examples=150)
@given(traffic(alike=False))
def test_any_two_sequences_share_in_the_trace_what_they_shared(served: list[Serving]) -> None:
    trace = played([(prompt, output, False) for prompt, output, _ in served])
    wholes = [np.array(p + o, dtype=np.int32).tobytes() for p, o, _ in served]
    relations, source = Relations(trace), TokenSource(trace)
    for one, other in combinations(range(len(served)), 2):
        shared = common_tokens(wholes[one], wholes[other])
        made = [np.concatenate((source.prompt(n), source.output(n))) for n in (one, other)]
        assert common_tokens(made[0].tobytes(), made[1].tobytes()) == shared
        assert relations.common(one, other) == shared


@settings(max_examples=150)
@given(traffic(alike=True))
def test_a_prompt_shares_all_that_it_shared_with_any_earlier_one(served: list[Serving]) -> None:
    trace = played([(prompt, output, False) for prompt, output, _ in served])
    wholes = [np.array(p + o, dtype=np.int32).tobytes() for p, o, _ in served]
    for request in trace.requests:
        prompt = wholes[request.id][: 4 * request.input]
        shared = [common_tokens(whole, prompt) for whole in wholes[: request.id]]
        assert request.shared == max(shared, default=0)
        assert request.parent is None or shared[request.parent] == request.shared


@settings(max_examples=150)
@given(traffic(alike=True))
def test_requests_that_overlap_never_share_more_than_they_did(served: list[Serving]) -> None:
    trace = played(served)
    assert [request.input for request in trace.requests] == [len(p) for p, _, _ in served]
    for request in trace.requests:
        if request.parent is None:
            continue
        parent, child = served[request.parent], served[request.id]
        whole = parent[0] + parent[1]
        assert whole[: request.shared] == child[0][: request.shared]
        deeper = slice(request.shared, request.shared + 1)
        told = child[2] or not parent[2]  # the parent ended before the child's line
        assert not told or whole[deeper] != child[0][deeper] or not whole[deeper]


# --- beside the simulator -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["seed_title", "seed_interleave"])
def test_an_endless_pool_reuses_at_least_what_the_server_did(name: str, tmp_path: Path) -> None:
    original = make(name, scale=0.5)
    setup = Setup(geometry=load_geometry("qwen3.8-27b"), model="m")
    plan = RunPlan(policy="default", entries=2)
    config = pool_config(original, setup, plan)
    reports = play(original, tmp_path / "log.jsonl", config)
    trace = convert("server-log", tmp_path / "log.jsonl")
    runs = {
        (outcome.run["policy"], outcome.run["entries"]): outcome.run["reused_tokens"]
        for outcome in Simulator(trace, setup).sweep(policies=["default"], entries=[2], budgets=[])
    }
    cached = sum(each.cached_tokens for each in reports)
    assert cached > 0
    assert runs["endless", None] >= cached
    assert runs["default", 2] == cached, "the same pool, the same sizes, one lane"


def test_a_played_workload_is_the_workload(tmp_path: Path) -> None:
    original = make("seed_title", scale=0.25)
    setup = Setup(geometry=load_geometry("qwen3.8-27b"), model="m")
    config = pool_config(original, setup, RunPlan(policy="default"))
    play(original, tmp_path / "log.jsonl", config)
    trace = convert("server-log", tmp_path / "log.jsonl")
    one, other = Relations(original), Relations(trace)
    assert len(trace.requests) == len(original.requests)
    for mine, theirs in zip(trace.requests, original.requests, strict=True):
        assert (mine.input, mine.output) == (theirs.input, theirs.output)
        assert mine.boundaries == theirs.boundaries
    for pair in combinations(range(len(trace.requests)), 2):
        assert one.common(*pair) == other.common(*pair)


# --- from the command line ------------------------------------------------------------------------


def test_the_command_writes_a_trace_that_simulates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = RequestLog(tmp_path / "log.jsonl")
    for number in range(3):
        prompt = [*range(200), number]
        arrival = log.arrive(number, prompt, endpoint="/", arrived=5.0 + number)
        done = report(number, control=Control(retain=number != 1))
        log.finish(arrival, done, output=[1, 2, 3], boundaries=[(150, "system")])
    source, out = str(tmp_path / "log.jsonl"), str(tmp_path / "trace.jsonl")
    assert cli.main(["trace", "convert", "--from", "server-log", source, out]) == 0
    trace = read_trace(out)
    assert [request.t for request in trace.requests] == [0.0, 1.0, 2.0]
    assert shapes(trace) == [(None, 0), (0, 200), (1, 200)]
    assert [request.retain for request in trace.requests] == [True, False, True]
    assert cli.main(["simulate", out, "--entries", "1", "--lanes", "1"]) == 0
    assert "endless" in capsys.readouterr().out


# --- what a log may hold --------------------------------------------------------------------------


def test_lines_are_sorted_by_arrival_and_measurements_stay_out(tmp_path: Path) -> None:
    late = row(1, parent=0, shared=110, input=150, cached=110, reuse="append_frontier")
    trace = convert_lines(tmp_path, HEAD, late, row(0))
    assert shapes(trace) == [(None, 0), (0, 110)]
    assert [request.t for request in trace.requests] == [0.0, 1.0]
    assert notes(trace) == "converted from server-log"


def test_runs_are_joined_and_share_nothing(tmp_path: Path) -> None:
    again = {"run": "q", "tenant": "t1"}
    trace = convert_lines(
        tmp_path,
        HEAD,
        row(0, tenant="t1"),
        row(1, parent=0, shared=50),
        {**HEAD, "run": "q"},
        row(0, t=2000.0, **again),
        row(1, t=2001.0, parent=0, shared=60, **again),
    )
    assert shapes(trace) == [(None, 0), (0, 50), (None, 0), (2, 60)]
    assert [request.salt for request in trace.requests] == ["t1", None, "2.t1", "2.t1"]
    assert [request.session for request in trace.requests] == ["s1", "s1", "2.s1", "2.s1"]
    assert "2 runs of the server" in notes(trace)


def test_what_shared_with_a_lost_line_shares_with_the_others_that_did(tmp_path: Path) -> None:
    trace = convert_lines(
        tmp_path,
        HEAD,
        row(1, parent=0, shared=60),
        row(2, parent=0, shared=80),
        row(3, parent=0, shared=70),
        row(4, parent=3, shared=100),
    )
    assert shapes(trace) == [(None, 0), (0, 60), (1, 70), (2, 100)]
    assert "3 requests shared with one whose line is missing" in notes(trace)


def test_what_never_ran_is_left_out_and_its_relatives_stay_so(tmp_path: Path) -> None:
    trace = convert_lines(
        tmp_path,
        HEAD,
        row(0),
        row(1, parent=0, shared=80, lane=None, output=0),
        row(2, parent=1, shared=70),
        row(3, parent=1, shared=95),
        row(4, parent=1, shared=90),
    )
    assert shapes(trace) == [(None, 0), (0, 70), (0, 80), (2, 90)]
    assert "1 requests left out that never had a lane" in notes(trace)


def test_a_request_that_was_cancelled_in_the_queue_is_logged_so(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "log.jsonl")
    for number, done in enumerate([report(0), unheard(1), report(2)]):
        arrival = log.arrive(number, range(9), endpoint="/", arrived=1.0)
        log.finish(arrival, done, output=[])
    assert shapes(convert("server-log", tmp_path / "log.jsonl")) == [(None, 0), (0, 9)]


def test_what_neither_reads_nor_leaves_stands_alone(tmp_path: Path) -> None:
    trace = convert_lines(
        tmp_path,
        HEAD,
        row(0),
        row(1, parent=0, shared=100, read=False, retain=False),
        row(2, parent=1, shared=100, read=False),
    )
    first, alone, leaving = trace.requests
    assert alone.salt is not None
    assert alone.salt != first.salt
    assert (alone.retain, leaving.retain, leaving.salt) == (False, True, None)
    assert "1 requests taken as reading though they did not" in notes(trace)


def test_what_the_server_had_forgotten_is_told(tmp_path: Path) -> None:
    trace = convert_lines(tmp_path, HEAD, row(0), row(1, forgotten=500))
    assert "1 requests may share more" in notes(trace)


def test_broken_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    trace = convert_lines(tmp_path, HEAD, '{"run":"r","id":0,"bound', "", row(1), "\0\0", '{"ru')
    assert len(trace.requests) == 1
    assert "2 lines broke off" in notes(trace)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([row(0)], "line 1, field run"),
        ([HEAD], "holds no request that ran"),
        ([HEAD, row(0, lane=None)], "holds no request that ran"),
        ([{**HEAD, "version": 2}, row(0)], "line 1, field version: 2; must be 1"),
        ([{**HEAD, "format": "other"}, row(0)], "line 1, field format"),
        ([HEAD, HEAD, row(0)], "line 2, field run"),
        ([HEAD, row(0), row(0)], "line 3, field id"),
        ([HEAD, row(0, run="other")], "line 2, field run"),
        ([HEAD, row(0, input=0)], "line 2, field input"),
        ([HEAD, row(0, t=-1)], "line 2, field t"),
        ([HEAD, row(0, retain=1)], "line 2, field retain"),
        ([HEAD, row(0, session=3)], "line 2, field session"),
        ([HEAD, row(1, parent=1)], "line 2, field parent"),
        ([HEAD, row(0), row(1, parent=0, shared=101)], "line 3, field shared: 101; must be at"),
        ([HEAD, row(0), row(1, parent=0, shared=111, input=200)], "the full sequence of parent 0"),
        ([HEAD, row(0, boundaries=[[5, "turn"], [4, "turn"]])], "line 2, field boundaries"),
        ([HEAD, row(0, boundaries=[[101, "turn"]])], "line 2, field boundaries: 101"),
        ([HEAD, row(0, boundaries=[[5, "frontier"]])], "line 2, field boundaries"),
        ([HEAD, row(0, boundaries=[[5]])], "line 2, field boundaries"),
        ([HEAD, "{nonsense}"], "line 2: not valid JSON"),
    ],
)
def test_what_breaks_a_rule_is_named(records: list[object], message: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"log\.jsonl") as caught:
        convert_lines(tmp_path, *records)
    assert message in str(caught.value)
