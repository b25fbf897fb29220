"""`ninfer-pool simulate` with the real simulator: the JSON contract, field by field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ninfer_pool import PrefixPool, cli
from ninfer_pool.sim.trace import Trace, TraceRequest, write_trace
from tests.sim.fake_replay import names
from tests.sim.made_runs import made_run

BOUNDS = ["single_lane", "endless", "clairvoyant"]
DETAIL_FIELDS = [
    "run", "id", "session", "kind", "input", "reused", "exact", "tier", "reuse", "reason",
    "diverged_at", "lost", "evicted_bytes", "needed_bytes", "victim_max_bytes",
]  # fmt: skip


@pytest.fixture
def interleaved(tmp_path: Path) -> Path:
    """A, an unrelated B, A grown, A grown again: what a single lane loses."""
    shapes = [("a", None, 0, 300), ("b", None, 0, 200), ("a", 0, 320, 400), ("a", 2, 420, 500)]
    requests = tuple(
        TraceRequest(
            id=i, t=1000.0 * i, session=session, kind="main", parent=parent, shared=shared,
            input=length, output=20,
        )
        for i, (session, parent, shared, length) in enumerate(shapes)
    )  # fmt: skip
    path = tmp_path / "interleaved.jsonl"
    header: dict[str, object] = {"name": "interleaved", "source": "made", "licence": "CC0"}
    write_trace(path, Trace(name="interleaved", header=header, requests=requests))
    return path


def simulated(trace: Path, *words: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    out, detail = trace.with_name("out.json"), trace.with_name("detail.jsonl")
    words = ("simulate", str(trace), *words, "--json", str(out), "--detail", str(detail))
    assert cli.main(words) == 0
    content = json.loads(out.read_text())
    assert list(content) == ["version", "runs"]
    assert content["version"] == 1
    return content["runs"], [json.loads(line) for line in detail.read_text().splitlines()]


def test_each_run_and_detail_line_has_the_fields_of_the_contract(interleaved: Path) -> None:
    runs, detail = simulated(interleaved, "--entries", "1,2", "--policy", "default,lru")
    assert {tuple(sorted(run)) for run in runs} == {tuple(sorted(made_run("", "lru", 1, None)))}
    assert {tuple(sorted(line)) for line in detail} == {tuple(sorted(DETAIL_FIELDS))}
    asked = [("default", 1), ("default", 2), ("lru", 1), ("lru", 2)]
    bounds = [("single_lane", None), ("endless", None), ("clairvoyant", 1), ("clairvoyant", 2)]
    assert [(run["policy"], run["entries"]) for run in runs] == [*asked, *bounds]
    assert [(line["run"], line["id"]) for line in detail] == (
        [(run, id) for run in range(len(runs)) for id in range(4)]
    )


def test_the_sums_of_every_run_hold(interleaved: Path) -> None:
    runs, detail = simulated(interleaved, "--budget", "1GiB,8GiB", "--policy", "default,lru")
    for index, run in enumerate(runs):
        lines = [line for line in detail if line["run"] == index]
        assert run["trace"] == "interleaved"
        assert run["input_tokens"] == run["reused_tokens"] + run["prefilled_tokens"] == 1400
        assert run["hit_rate"] == pytest.approx(run["reused_tokens"] / 1400)
        assert run["reused_tokens"] == sum(line["reused"] for line in lines)
        lost = sum(cell["tokens"] for cell in run["reasons"].values())
        assert lost == sum(line["lost"] for line in lines)
        assert sum(run["reuse"].values()) == run["requests"] == 4


def test_an_unrelated_request_costs_a_pool_of_two_nothing(interleaved: Path) -> None:
    runs, detail = simulated(interleaved, "--entries", "2", "--policy", "default")
    reused = {
        runs[index]["policy"]: [line["reused"] for line in detail if line["run"] == index]
        for index in range(len(runs))
    }
    assert reused["default"] == reused["endless"] == [0, 0, 319, 419]
    assert reused["single_lane"] == [0, 0, 0, 419]


def test_the_json_is_the_same_each_time_but_for_lookup_times(interleaved: Path) -> None:
    first, _ = simulated(interleaved, "--entries", "2")
    again, _ = simulated(interleaved, "--entries", "2")
    for run in (*first, *again):
        run.pop("lookup_us")
    assert first == again


def test_explain_says_what_a_request_matched(
    interleaved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["simulate", str(interleaved), "--entries", "2", "--explain", "2"]
    assert cli.main(words) == 0
    assert "319 of 400 tokens resumable" in capsys.readouterr().out


def test_the_simulator_serves_from_the_pool_itself(
    interleaved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("acquire was called")

    monkeypatch.setattr(PrefixPool, "acquire", broken)
    out = interleaved.with_name("out.json")
    with pytest.raises(RuntimeError, match="acquire was called"):
        cli.main(["simulate", str(interleaved), "--entries", "2", "--json", str(out)])
    assert names(interleaved.parent) == ["interleaved.jsonl"]
