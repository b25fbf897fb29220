"""The command line: what it runs and writes, and how it refuses what cannot be run."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ninfer_pool import cli
from ninfer_pool.sim import trace_command
from ninfer_pool.sim.tiers import TierSize
from ninfer_pool.sim.trace import Trace, TraceRequest, write_trace
from tests.sim.fake_replay import FakeReplay, names, refused
from tests.sim.made_runs import GIB, made_runs


def test_defaults_are_the_shipped_trace_and_both_sweeps(
    replay: FakeReplay, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["simulate"]) == 0
    (asked,) = replay.asked
    assert asked["trace"].name == "claude_code_side_requests"
    assert asked["policies"] == ("default", "lru")
    assert asked["entries"] == (1, 2, 4, 8, 16)
    assert asked["budgets"] == (8 * GIB, 16 * GIB, 32 * GIB, 64 * GIB)
    setup = asked["setup"]
    assert setup.pop("geometry").name == setup.pop("model") == "qwen3.8-27b"
    assert setup == {
        "kv": "int8-g64", "mtp": True, "lanes": 1, "affinity": "prefer",
        "prefill_rate": 1140.0, "decode_rate": 40.0, "tiers": (),
    }  # fmt: skip
    out, err = capsys.readouterr()
    assert out.startswith("claude_code_side_requests: ")
    assert err == ""


def test_one_sweep_asked_for_is_the_only_one(replay: FakeReplay, trace: Path) -> None:
    assert cli.main(["simulate", str(trace), "--entries", "2,2,3"]) == 0
    assert cli.main(["simulate", str(trace), "--budget", "1GiB"]) == 0
    assert [asked["entries"] for asked in replay.asked] == [(2, 3), ()]
    assert [asked["budgets"] for asked in replay.asked] == [(), (GIB,)]


def test_traces_may_stand_anywhere_and_are_run_in_order(replay: FakeReplay, trace: Path) -> None:
    paths = [trace, *(trace.with_name(f"{name}.jsonl") for name in "bcd")]
    for path in paths[1:]:
        path.write_bytes(trace.read_bytes())
    first, *rest = map(str, paths)
    for words in (
        [first, "--entries", "2", *rest],
        ["--entries", "2", first, *rest],
        ["--no-mtp", first, rest[0], "--entries", "2", rest[1], "--kv", "bf16", rest[2]],
    ):
        replay.asked.clear()
        assert cli.main(["simulate", *words]) == 0
        assert [asked["trace"].name for asked in replay.asked] == ["small", "b", "c", "d"]


def test_every_option_reaches_the_simulator(replay: FakeReplay, trace: Path) -> None:
    words = "--model qwen3.8-35b-a3b --kv bf16 --no-mtp --policy fifo --lanes 3"
    words += " --affinity strict --prefill-rate 2e3 --decode-rate 10.5"
    words += " --disk-budget 1TB --host-budget 64GiB --host-rate 25GiB/s"
    assert cli.main(["simulate", str(trace), *words.split()]) == 0
    (asked,) = replay.asked
    setup = asked["setup"]
    assert asked["policies"] == ("fifo",)
    assert setup.pop("geometry").name == "qwen3.8-35b-a3b"
    assert setup == {
        "model": "qwen3.8-35b-a3b", "kv": "bf16", "mtp": False, "lanes": 3,
        "affinity": "strict", "prefill_rate": 2000.0, "decode_rate": 10.5,
        "tiers": (
            TierSize(name="host", budget_bytes=64 * GIB, bytes_s=25.0 * GIB),
            TierSize(name="disk", budget_bytes=10**12, bytes_s=1.6e9),
        ),
    }  # fmt: skip


@pytest.mark.usefixtures("replay")
def test_json_holds_the_runs_of_all_traces_in_order_and_detail_points_into_it(
    trace: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.jsonl"
    other.write_bytes(trace.read_bytes())
    out, detail = tmp_path / "out.json", tmp_path / "detail.jsonl"
    words = ["simulate", trace, other, "--entries", "2", "--json", out, "--detail", detail]
    assert cli.main([str(word) for word in words]) == 0
    content = json.loads(out.read_text())
    wanted = [
        run for name in ("small", "other") for run in made_runs(name, entries=(2,), budgets=())
    ]
    assert content == {"version": 1, "runs": wanted}
    lines = [json.loads(line) for line in detail.read_text().splitlines()]
    assert lines == [{"run": run, "id": id} for run in range(len(wanted)) for id in (0, 1)]
    first = out.read_bytes()
    assert cli.main([str(word) for word in words]) == 0
    assert out.read_bytes() == first


@pytest.mark.usefixtures("replay")
@pytest.mark.parametrize("suffix", [".svg", ".png", ".html"])
def test_plots_are_written(suffix: str, trace: Path, tmp_path: Path) -> None:
    out = tmp_path / f"out{suffix}"
    assert cli.main(["simulate", str(trace), "--plot", str(out)]) == 0
    data = out.read_bytes()
    assert data.startswith({".svg": b"<?xml", ".png": b"\x89PNG", ".html": b"<!DOCTYPE"}[suffix])
    if suffix == ".svg":
        ElementTree.fromstring(data)


@pytest.mark.usefixtures("replay")
def test_explain_is_asked_under_the_first_policy_and_size(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["simulate", str(trace), "--explain", "1", "--policy", "lru,fifo"]
    assert cli.main([*words, "--entries", "4,2"]) == 0
    out = capsys.readouterr().out
    assert "explained small 1 " in out
    assert "policy='lru', entries=4, budget_bytes=None" in out
    assert cli.main([*words, "--budget", "1GiB"]) == 0
    assert f"policy='lru', entries=None, budget_bytes={GIB}" in capsys.readouterr().out
    assert "give one TRACE" in refused(capsys, [*words, str(trace)])


@pytest.mark.parametrize("error", [RuntimeError("ours"), KeyboardInterrupt()])
def test_a_run_that_breaks_off_leaves_no_file(
    error: BaseException, replay: FakeReplay, trace: Path, tmp_path: Path
) -> None:
    replay.fail = error
    words = ["simulate", str(trace)]
    for option, name in (("--json", "a.json"), ("--detail", "b.jsonl"), ("--plot", "c.svg")):
        words += [option, str(tmp_path / name)]
    if isinstance(error, KeyboardInterrupt):
        assert cli.main(words) == 130
    else:
        with pytest.raises(RuntimeError, match="ours"):
            cli.main(words)
    assert names(tmp_path) == ["small.jsonl"]


def test_trace_info_tells_what_a_trace_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = TraceRequest(
        id=0, t=0.0, session="a", kind="main", parent=None, shared=0, input=100, output=50
    )
    requests = [first]
    for shared in (150, 120, 100, 40):
        requests.append(
            dataclasses.replace(
                first, id=len(requests), t=3900.0, parent=0, shared=shared, input=200, kind="side"
            )
        )
    path = tmp_path / "made.jsonl"
    write_trace(path, Trace(name="made", requests=tuple(requests)))
    assert cli.main(["trace", "info", str(path)]) == 0
    out = capsys.readouterr().out
    for line in (
        "requests  5 over 1 h 5 min",
        "sessions  1",
        "kinds     side 4, main 1",
        "prompts   900 tokens, 410 of them (45.6%) shared with a parent",
        "outputs   250 tokens",
        "longest   250 tokens with output (request 1)",
    ):
        assert line in out
    for how in ("extend the whole of it", "part in its output", "part at its prompt's end",
                "part inside its prompt", "start without a parent"):  # fmt: skip
        assert f"1  {how}\n" in out


def test_convert_writes_what_the_converter_gives(
    trace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = []

    def convert(source: str, path: Path, *, tokenizer: Path | None = None) -> Trace:
        asked.append((source, path, tokenizer))
        return Trace(
            name="log",
            header={"name": "log", "source": "s", "licence": "CC0"},
            requests=(
                TraceRequest(
                    id=0, t=0.0, session="a", kind="main", parent=None, shared=0, input=1, output=0
                ),
            ),
        )

    monkeypatch.setattr(trace_command, "convert", convert)
    out = tmp_path / "out.jsonl"
    words = ["trace", "convert", "--from", "openai-jsonl", "--tokenizer", "tok.json", trace, out]
    assert cli.main([str(word) for word in words]) == 0
    assert asked == [("openai-jsonl", trace, Path("tok.json"))]
    assert "1 requests" in capsys.readouterr().out
    assert len(out.read_text().splitlines()) == 2


def test_bench_runs_a_benchmark_of_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def call(command: list[str]) -> int:
        commands.append(command)
        return 3

    monkeypatch.setattr("subprocess.call", call)
    assert cli.main(["bench", "core", "--tiny", "--json", "out.json"]) == 3
    script = cli.ROOT / "benchmarks" / "core.py"
    assert commands == [[sys.executable, str(script), "--tiny", "--json", "out.json"]]


def test_every_benchmark_has_its_door() -> None:
    files = {path.stem for path in (cli.ROOT / "benchmarks").glob("*.py")}
    assert files == {*cli.BENCHMARKS, "compare", "__init__"}


def test_bench_without_a_checkout_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "ROOT", tmp_path)
    assert "run python benchmarks/core.py in a checkout" in refused(capsys, ["bench", "core"])


def test_bench_without_torch_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "needs torch; from a checkout, run pip install" in refused(
        capsys, ["bench", "runner", "--tiny"]
    )


@pytest.mark.parametrize("words", [[], ["trace"], ["bench"], ["nosuch"]])
def test_an_unknown_or_missing_command_is_one_line(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--help" in refused(capsys, words)


@pytest.mark.parametrize("words", [["--help"], ["simulate", "--help"], ["trace", "info", "-h"]])
def test_help_goes_to_stdout(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 0
    out, err = capsys.readouterr()
    assert out.startswith("usage: ninfer-pool")
    assert err == ""


def python(*words: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(command, text=True, stderr=subprocess.PIPE, check=False, **settings)


def test_as_a_process_a_mistake_is_exit_code_2_without_traceback() -> None:
    done = python("-m", "ninfer_pool", "simulate", "--entries", "0", stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_a_reader_that_goes_away_is_no_error(trace: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = python("-m", "ninfer_pool", "trace", "info", str(trace), stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_terminal_that_knows_ascii_only_is_served() -> None:
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    words = ("-m", "ninfer_pool", "simulate", "--help")
    done = python(*words, stdout=subprocess.DEVNULL, env=ascii_only)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_imports_neither_matplotlib_nor_the_simulator() -> None:
    code = (
        "import sys; from ninfer_pool import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'matplotlib', 'ninfer_pool.sim.replay'} & set(sys.modules)"
    )
    done = python("-c", code, stdout=subprocess.DEVNULL)
    assert (done.returncode, done.stderr) == (0, "")
