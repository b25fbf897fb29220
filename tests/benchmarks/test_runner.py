"""`bench runner` checks answers before it times and writes what it promises. Nothing is timed."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import runner as bench_runner
from benchmarks.common import ratios, serving
from benchmarks.common.ratios import Ratio, RatioReport, interleaved, ratio
from benchmarks.common.serving import TINY, Bench
from ninfer_pool.errors import ModelError
from ninfer_pool.runner import TINY as SHIPPED
from ninfer_pool.runner import Model, Runner, Tokenizer
from ninfer_pool.runner.slab import Slab
from tests.runner.models import random_folder

FIELDS = ["op", "shape", "us", "floor", "ratio", "beside", "at_most", "note"]


@pytest.fixture(scope="module")
def bench() -> Bench:
    tokenizer = Tokenizer.load(SHIPPED)
    assert tokenizer is not None
    model = Model.load(SHIPPED)
    return Bench(folder=SHIPPED, model=model, tokenizer=tokenizer, scale=TINY)


@pytest.fixture(scope="module")
def report() -> RatioReport:
    return bench_runner.run(TINY)


def row(report: RatioReport, op: str, shape: str) -> Ratio:
    (found,) = (row for row in report.results if (row.op, row.shape) == (op, shape))
    return found


def test_every_figure_has_a_row_that_is_held_to_it(report: RatioReport) -> None:
    held = {(row.op, row.beside, row.at_most) for row in report.results if row.at_most is not None}
    asked = {
        ("restore", "cold prefill", 0.02),
        ("image save", "plain copy", 2.0),
        ("image load", "plain copy", 2.0),
        ("decode", "no drafts", 1.0),
    }
    assert asked <= held
    measured = ("prefill", "transformers", 1.0) in held
    assert measured != bool(report.missing)


def test_lanes_are_measured_full_and_with_one_request(report: RatioReport) -> None:
    shapes = [row.shape for row in report.results if row.beside == "1 lane"]
    assert shapes == ["1 lanes, 1 requests", "2 lanes, 2 requests", "2 lanes, 1 requests"]
    assert row(report, "decode", "1 lanes, 1 requests").ratio == 1


def test_json_is_the_contract(report: RatioReport, tmp_path: Path) -> None:
    report.write_json(tmp_path / "runner.json")
    written = json.loads((tmp_path / "runner.json").read_text(encoding="utf-8"))
    assert list(written) == ["version", "device", "model", "results"]
    assert written["version"] == 1
    assert written["device"].startswith("cpu, ")
    assert written["model"].startswith("tiny, as shipped, fp32, sha256:")
    assert len(written["results"]) == len(report.results)
    for result in written["results"]:
        assert list(result) == FIELDS
        assert list(result["us"]) == ["median", "p90"]
        assert result["ratio"] == pytest.approx(result["us"]["median"] / result["floor"], rel=0.01)


def test_tables_say_what_is_held_and_what_is_missed() -> None:
    good = ratio("copy", "1 page", [1_000], [1_000], beside="floor", at_most=2)
    bad = ratio("copy", "2 pages", [9_000], [1_000], beside="floor", at_most=2)
    told = ratio("copy", "3 pages", [9_000], [1_000], beside="floor", note="slow")
    both = RatioReport(
        device="cpu", model="m", results=[good, bad, told], missing=[("prefill", "no such package")]
    )
    assert [each.met for each in both.results] == [True, False, True]
    table = both.text()
    assert table.startswith("One machine")
    assert "Device: cpu. Model: m." in table
    assert table.count("≤ 2") == 2
    assert table.count("(missed)") == 1
    assert "Not measured: prefill (no such package)." in table


def test_what_is_compared_runs_in_turn_and_once_before() -> None:
    calls: list[tuple[str, int]] = []

    def act(name: str, number: int) -> int:
        calls.append((name, number))
        return number

    taken = interleaved({"a": partial(act, "a"), "b": partial(act, "b")}, repeats=3)
    assert calls[:2] == [("a", 0), ("b", 0)]
    assert [number for _, number in calls[2:]] == [0, 0, 1, 1, 2, 2]
    assert {name for name, _ in calls[2:4]} == {"a", "b"}
    assert taken == {"a": [1, 1, 2], "b": [1, 1, 2]}  # nothing takes no time at all


def test_the_median_is_not_the_mean() -> None:
    found = ratio("op", "shape", [1_000, 3_000, 800_000], [1_000, 2_000, 900_000], beside="x")
    assert (found.us.median, found.floor, found.ratio) == (3, 2, 1.5)
    assert found.us.p90 == 800


# -- gates ------------------------------------------------------------------------------------


def test_gate_refuses_an_entry_that_was_lost(bench: Bench) -> None:
    runner = bench.runner()
    prompt = runner.prompt(bench.tokens(96), boundaries=[(96, "turn")])
    with pytest.raises(AssertionError, match="resumed 0 "):
        serving.check_resumed(runner, prompt, at=96)
    serving.retain(runner, prompt)
    serving.check_resumed(runner, prompt, at=96)
    with pytest.raises(AssertionError, match="not made cold: 96 tokens reused"):
        serving.retain(runner, prompt)


def test_gate_refuses_a_resumed_run_that_says_something_else(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = bench.runner()
    prompt = runner.prompt(bench.tokens(96), boundaries=[(96, "turn")])
    serving.retain(runner, prompt)
    monkeypatch.setattr("ninfer_pool.kernels.load_image", lambda slab, pages, out: out.fill_(0))
    with pytest.raises(AssertionError, match="the resumed run made"):
        serving.check_resumed(runner, prompt, at=96)


def test_gate_refuses_an_image_that_does_not_come_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = bench.runner().slab.layout
    store = Slab(layout, num_pages=layout.image_pages, lanes=1)
    pages = tuple(range(layout.image_pages))
    bench_runner.check_image(store, pages)
    monkeypatch.setattr("ninfer_pool.kernels.save_image", lambda slab, pages, buffer: None)
    with pytest.raises(AssertionError, match="not the one saved"):
        bench_runner.check_image(store, pages)


def test_gate_refuses_other_logits_than_those_of_transformers(bench: Bench) -> None:
    runner = bench.runner(kv_dtype="fp32")
    prompt = runner.prompt(bench.tokens(20))
    with pytest.raises(AssertionError, match="logits differ from transformers'"):
        bench_runner.check_prefill(runner, prompt, torch.ones(bench.model.config.vocab_size))


def test_gate_refuses_lanes_that_change_what_is_said() -> None:
    serving.check_same([(1, 2), (3, 4)], [(1, 2), (3, 9)])
    with pytest.raises(AssertionError, match="lanes change the tokens"):
        serving.check_same([(1, 2)], [(7, 2)])


# -- what may be absent -----------------------------------------------------------------------


def test_without_transformers_the_report_says_why(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    rows, missing = bench_runner.prefill_rows(bench)
    assert rows == []
    ((what, why),) = missing
    assert what == "prefill in transformers"
    assert why.startswith("ModuleNotFoundError")


def test_a_model_without_draft_head_has_no_draft_rows(bench: Bench) -> None:
    model = Model.load(SHIPPED)
    model.draft_head = None
    without = Bench(
        folder=SHIPPED, model=model, tokenizer=bench.tokenizer, scale=TINY
    )  # fmt: skip
    assert serving.draft_rows(without) == []


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="tokenizer: none"):
        bench_runner.run(TINY, folder=random_folder(tmp_path / "bare"))


def test_rows_of_a_device_are_made(bench: Bench) -> None:
    """On CUDA these are measured; here only that they run."""
    copy, attention = bench_runner.copy_row(bench), bench_runner.attention_row(bench)
    assert (copy.op, copy.at_most) == ("page copy", 1.25)
    assert (attention.op, attention.at_most) == ("decode attention", 1 / 0.6)
    assert attention.shape == "2 rows of 100 tokens"


# -- commands ---------------------------------------------------------------------------------


def test_the_command_prints_the_table_and_writes_json(
    report: RatioReport,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[object] = []

    def run(scale: object, **_: object) -> RatioReport:
        asked.append(scale)
        return report

    monkeypatch.setattr(bench_runner, "run", run)
    out = tmp_path / "out.json"
    bench_runner.main(["--tiny", "--json", str(out)])
    bench_runner.main([])
    assert asked == [serving.TINY, serving.DEFAULT]
    assert json.loads(out.read_text(encoding="utf-8"))["version"] == 1
    assert capsys.readouterr().out.startswith(ratios.CAVEAT)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--json", "nowhere/out.json"], "--json: folder 'nowhere' does not exist"),
        (["--nosuch"], "unrecognized arguments: --nosuch"),
        (["--device", "cuda:99"], "--device: 'cuda:99'; this machine has"),
        (["more"], "unrecognized arguments: more"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench_runner.main(["--tiny", *words])
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert captured.err.count("\n") == 1


def test_runners_of_the_benchmark_have_room_for_its_longest_entry(bench: Bench) -> None:
    runner: Runner = bench.runner(lanes=2)
    pages = 2 * (max(TINY.entry_tokens, *TINY.prefill_tokens) // 64)
    assert runner.pool.config.num_pages > pages
