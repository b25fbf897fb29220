"""The benchmarks check answers before they time, and write what they promise. Nothing is timed."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from benchmarks import core, hit_rate_vs_k
from benchmarks.common import conversations, peer_trees
from benchmarks.common.conversations import Conversations
from benchmarks.common.probes import check_probe, evictions, probe, turns
from benchmarks.common.report import CoreReport, write_whole
from benchmarks.common.timing import Case, Floor, Microseconds, Row, measure
from ninfer_pool import Prompt
from ninfer_pool.core.policy import POLICIES

ROOT = Path(__file__).parents[2]
CASE = Case(op="lookup", probe="new", shape="agent", tokens=4, entries=1)
FLOOR = Floor(np.arange(8, dtype=np.int32), stored=b"")
FIELDS = ["op", "probe", "shape", "tokens", "entries", "us", "floor_us", "ratio"]


@pytest.fixture(scope="module")
def report() -> CoreReport:
    return core.run(core.TINY, with_peers=False)


def test_every_operation_is_measured_at_every_size_and_shape(report: CoreReport) -> None:
    asked = {
        ("lookup", "resume"), ("lookup", "branch"), ("lookup", "new"),
        ("first_lookup", "resume"), ("first_lookup", "branch"), ("first_lookup", "new"),
        ("explain", "branch"), ("commit", "turn"), ("evict", "entry"),
    }  # fmt: skip
    for plan in core.plans(core.TINY):
        rows = [row for row in report.results if (row.shape, row.entries) == key(plan)]
        assert {(row.op, row.probe) for row in rows} == asked
    assert {"marks", "forks"} < {row.shape for row in report.results}


def key(plan: Conversations) -> tuple[str, int]:
    return plan.shape, plan.entries


def test_json_is_the_contract(report: CoreReport, tmp_path: Path) -> None:
    report.write_json(tmp_path / "core.json")
    written = json.loads((tmp_path / "core.json").read_text(encoding="utf-8"))
    assert list(written) == ["version", "results", "peers", "bytes_per_token"]
    assert written["version"] == 1
    assert all(list(row) == FIELDS for row in written["results"])
    assert all(list(row["us"]) == ["median", "p90"] for row in written["results"])
    assert written["bytes_per_token"] > 4  # an int32 is four bytes


def test_table_begins_with_its_caveat(report: CoreReport) -> None:
    assert report.text().startswith("One machine")


@pytest.mark.parametrize("shape", ["agent", "unrelated"])
def test_gate_refuses_a_pool_that_lost_the_entry(shape: str) -> None:
    world = conversations.filled(Conversations(shape=shape, tokens=1024, entries=3))
    resume = probe(world.plan, 1, name="resume")
    check_probe((world, 1), resume)
    world.pool.evict(world.keys[1])
    with pytest.raises(AssertionError, match="not at 1024"):
        check_probe((world, 1), resume)


def test_gate_refuses_a_turn_that_was_not_stored() -> None:
    world = conversations.filled(Conversations(shape="agent", tokens=1024, entries=2))
    with pytest.raises(AssertionError, match="resumes at 1024 of 1524, not at 1524"):
        list(turns([(world, 0)]))  # the action is never called


def test_gate_refuses_an_eviction_that_did_nothing() -> None:
    world = conversations.filled(Conversations(shape="agent", tokens=1024, entries=2))
    with pytest.raises(AssertionError, match="still found"):
        list(evictions([(world, 0)]))


def test_marks_are_all_there() -> None:
    world = conversations.marked(tokens=4096, marks=1024)
    prompt = Prompt(world.plan.path(0), namespace=conversations.SPACE)
    assert len(world.keys) == 1
    assert len(world.pool.lookup(prompt)) == 1024


def test_forks_part_where_they_say() -> None:
    world = conversations.forked(tokens=4096, forks=16)
    assert len(set(world.keys)) == 17
    assert world.pool.stats().entries == 17


def test_conversations_share_the_system_prompt_and_nothing_more() -> None:
    plan = Conversations(shape="agent", tokens=1024, entries=2)
    first, second = plan.path(0), plan.path(1)
    assert np.array_equal(first[: plan.system], second[: plan.system])
    assert first[plan.system] != second[plan.system]


def test_a_large_world_is_left_to_large() -> None:
    biggest = Conversations(shape="unrelated", tokens=200_000, entries=4_096)
    assert biggest not in list(core.plans(core.DEFAULT))
    assert biggest in list(core.plans(core.LARGE))


def test_floor_compares_what_matched() -> None:
    prompt = np.arange(8, dtype=np.int32)
    digest, equal = cast(tuple[bytes, bool], Floor(prompt, stored=prompt[:3].tobytes())())
    assert equal
    assert len(digest) == 16
    assert cast(tuple[bytes, bool], Floor(prompt, stored=b"other")()) == (digest, False)


def test_every_action_is_called_once() -> None:
    calls: list[int] = []
    row = measure(CASE, [(partial(calls.append, number), FLOOR) for number in range(7)])
    assert calls == list(range(7))
    assert row.us.p90 >= row.us.median > 0


def test_a_slow_action_is_called_at_least_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.common.timing.SECONDS_A_ROW", 0.0)
    calls: list[int] = []
    measure(CASE, [(partial(calls.append, number), FLOOR) for number in range(7)])
    assert calls == [0]


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(UnicodeEncodeError):
        write_whole(tmp_path / "out.json", "\ud800")
    assert list(tmp_path.iterdir()) == []


def test_peers_stand_beside_the_pool(report: CoreReport) -> None:
    mine = report.results[0]
    theirs = Row(
        op=mine.op, probe=mine.probe, shape=mine.shape, tokens=mine.tokens, entries=mine.entries,
        us=Microseconds(median=123.0, p90=130.0), floor_us=1.0, ratio=123.0, peer="Other 1.0",
    )  # fmt: skip
    both = CoreReport(
        results=report.results, peers=[theirs], missing=[("Third", "absent")], bytes_per_token=4.5
    )
    assert "\nOther 1.0\n" in both.text()
    assert theirs.to_json()["peer"] == "Other 1.0"
    assert "not measured: Third (absent)" in both.text()


class Echo:
    """A peer that keeps every stored sequence and compares it from the start."""

    name, version = "Echo", "1"

    def __init__(self) -> None:
        self.held: list[list[int]] = []

    def prompt(self, tokens: Any) -> list[int]:
        return list(map(int, tokens))

    def build(self, entries: Any) -> None:
        self.held = [self.prompt(entry) for entry in entries]

    def lookup(self, prompt: list[int]) -> int:
        return max((shared(prompt, entry) for entry in self.held), default=0)

    def commit(self, prompt: list[int]) -> None:
        self.held.append(prompt)

    def evict(self) -> None:
        self.held.pop(0)


def shared(first: list[int], second: list[int]) -> int:
    both = zip(first, second, strict=False)
    return next((at for at, (a, b) in enumerate(both) if a != b), min(len(first), len(second)))


@pytest.mark.parametrize("entries", [1, 4])
def test_a_peer_is_asked_the_same_questions(entries: int) -> None:
    plan = Conversations(shape="agent", tokens=1024, entries=entries)
    rows = core.peer_rows(plan, Echo(), core.TINY)
    asked = [("first_lookup", name) for name in ("resume", "branch", "new")]
    assert [(row.op, row.probe) for row in rows] == [
        *asked, ("commit", "turn"), ("evict", "entry")
    ]  # fmt: skip
    assert {row.peer for row in rows} == {"Echo 1"}


def test_a_peer_that_answers_wrongly_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Echo, "lookup", lambda self, prompt: 7)
    with pytest.raises(AssertionError, match="Echo 1: 7 of 1024 tokens"):
        core.peer_rows(Conversations(shape="agent", tokens=1024, entries=1), Echo(), core.TINY)


def test_an_absent_peer_is_a_reason_not_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlx_lm", None)
    monkeypatch.setitem(sys.modules, "sglang", None)
    found, missing = peer_trees.available_peers()
    assert found == []
    assert [name for name, _ in missing] == ["mlx-lm", "SGLang"]
    assert all(reason for _, reason in missing)


def test_a_peer_that_imports_is_answering_rightly() -> None:
    for peer in peer_trees.available_peers()[0]:
        rows = core.peer_rows(Conversations(shape="agent", tokens=1024, entries=2), peer, core.TINY)
        assert rows


def test_stand_ins_let_a_tree_import_and_are_gone_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "sglang" / "srt" / "mem_cache"
    folder.mkdir(parents=True)
    (tmp_path / "sglang" / "__init__.py").write_text("raise RuntimeError('needs a GPU')")
    (folder / "base_prefix_cache.py").write_text("import torch\nDEVICE = torch.device('cpu')\n")
    (folder / "radix_cache.py").write_text(
        "import gpu_only.language as tl\n"
        "from sglang.srt.mem_cache.base_prefix_cache import DEVICE\n"
        "from sglang.srt.layers import Layer\n"
        "class Tree(Layer):\n    answer = tl.load(1, 2).anything(3)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    before = set(sys.modules)
    tree, params = peer_trees._load_radix_tree()
    assert tree.DEVICE is params.DEVICE
    assert tree.Tree(1, two=2).answer is not None
    assert not {name for name in set(sys.modules) - before if "sglang" in name}
    assert "gpu_only" not in sys.modules


@pytest.mark.parametrize("name", ["core", "peers"])
def test_a_benchmark_is_a_script_that_writes_json(name: str, tmp_path: Path) -> None:
    script, out = ROOT / "benchmarks" / f"{name}.py", tmp_path / "out.json"
    command = [sys.executable, str(script), "--tiny", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.startswith("One machine")
    assert json.loads(out.read_text(encoding="utf-8"))["version"] == 1


def test_hit_rates_are_simulated_with_every_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, out = tmp_path / "three.jsonl", tmp_path / "out.json"
    trace.write_text(TRACE, encoding="utf-8")
    words = [str(trace), "--entries", "2", "--lanes", "2", "--json", str(out)]
    assert hit_rate_vs_k.main(words) == 0
    runs = json.loads(out.read_text(encoding="utf-8"))["runs"]
    assert {*POLICIES, "clairvoyant"} <= {run["policy"] for run in runs}
    assert {run["lanes"] for run in runs} == {2}
    assert hit_rate_vs_k.main(["--tiny", *words]) == 0
    runs = json.loads(out.read_text(encoding="utf-8"))["runs"]
    assert "fifo" not in {run["policy"] for run in runs}


def line(number: int, *, at: float, parent: int | None, shared: int, tokens: int) -> str:
    request = {
        "id": number, "t": at, "session": "a", "kind": "main", "parent": parent,
        "shared": shared, "input": tokens, "output": 50, "boundaries": [],
    }  # fmt: skip
    return json.dumps(request)


HEADER = {
    "format": "ninfer-pool-trace", "version": 1, "name": "three", "source": "made",
    "licence": "CC0", "notes": "",
}  # fmt: skip
TRACE = "\n".join([
    json.dumps(HEADER),
    line(0, at=0.0, parent=None, shared=0, tokens=500),
    line(1, at=50.0, parent=None, shared=0, tokens=60),
    line(2, at=99.0, parent=0, shared=550, tokens=600),
    "",
])  # fmt: skip
