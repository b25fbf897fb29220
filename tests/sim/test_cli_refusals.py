"""Every command line that cannot be run: one line on stderr, exit code 2, no output file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.sim.fake_replay import HEADER, LINE, NEXT, names, refused

BAD_OPTIONS = [
    (["--policy", "nosuch"], "unknown policy 'nosuch'; choose among default, lru, fifo"),
    (["--policy", "endless"], "'endless' is a bound"),
    (["--policy", "lru,"], "--policy: 'lru,': an item is empty"),
    (["--entries", "0"], "--entries: '0': write a whole number from 1"),
    (["--entries", "4,0"], "--entries: '0'"),
    (["--entries", "-2"], "--entries: '-2'"),
    (["--entries", "-2,4"], "--entries: '-2'"),
    (["--entries", ""], "--entries: ''"),
    (["--budget", "8Gib"], "--budget: '8Gib': unit 'Gib' is not known"),
    (["--budget", "-1GiB"], "--budget: '-1GiB' is not a size"),
    (["--budget", "0"], "--budget: '0' is less than one byte"),
    (["--budget", "nan"], "--budget: 'nan' is not a size"),
    (["--budget", "a lot"], "--budget: 'a lot' is not a size"),
    (["--budget", "149MiB"], "149 MiB is smaller than one page plus one image"),
    (["--budget", "8GiB,156254207"], "qwen3.8-27b needs at least 156254208 bytes"),
    (["--lanes", "0"], "--lanes: '0'"),
    (["--lanes", "two"], "--lanes: 'two'"),
    (["--prefill-rate", "0"], "--prefill-rate: '0'"),
    (["--prefill-rate", "nan"], "--prefill-rate: 'nan'"),
    (["--decode-rate", "-4"], "--decode-rate: '-4'"),
    (["--host-budget", "8Gib"], "--host-budget: '8Gib': unit 'Gib' is not known"),
    (["--disk-budget", "0"], "--disk-budget: '0' is less than one byte"),
    (["--host-budget", "149MiB"], "--host-budget: 149 MiB is smaller than one page plus one image"),
    (["--host-budget", "1GiB", "--disk-budget", "1MB"], "--disk-budget: 977 KiB is smaller"),
    (["--host-rate", "25GB"], "--host-rate: there is no host tier; give --host-budget too"),
    (["--host-budget", "1GiB", "--disk-rate", "2GB"], "there is no disk tier"),
    (
        ["--host-budget", "1GiB", "--host-rate", "fast"],
        "--host-rate: 'fast': write bytes per second",
    ),
    (
        ["--disk-budget", "1GiB", "--disk-rate", "-1GB"],
        "--disk-rate: '-1GB': write bytes per second",
    ),
    (["--affinity", "loose"], "--affinity: invalid choice: 'loose'"),
    (["--model", "gpt"], "gpt"),
    (["--kv", "int3"], "int3"),
    (["--explain", "-1"], "--explain: '-1'"),
    (["--explain", "2"], "--explain: no request 2 in small; 0 to 1"),
    (["--plot", "out.gif"], "--plot: 'out.gif': the name must end in .svg, .png, .html"),
    (["--plot", "nowhere/out.svg"], "--plot: folder 'nowhere' does not exist"),
    (["--nosuch"], "unrecognized arguments: --nosuch"),
    (["--entrie", "2"], "unrecognized arguments: --entrie"),
    (["--entries"], "--entries: expected one argument"),
]


@pytest.mark.usefixtures("replay")
@pytest.mark.parametrize(("words", "said"), BAD_OPTIONS, ids=lambda value: str(value)[:40])
def test_a_bad_option_is_one_line_and_no_output(
    words: list[str],
    said: str,
    trace: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    outputs = ["--json", f"{tmp_path}/out.json", "--detail", f"{tmp_path}/out.jsonl"]
    assert said in refused(capsys, ["simulate", str(trace), *outputs, *words])
    assert names(tmp_path) == ["small.jsonl"]


BAD_TRACES = {
    "empty": (b"", ""),
    "binary": (bytes(range(256)) * 8, ""),
    "header only": (HEADER.encode(), "line 2"),
    "no header": (LINE.encode(), "line 1"),
    "nan time": ((HEADER + "\n" + LINE.replace('"t":0', '"t":NaN')).encode(), "line 2"),
    "infinite time": ((HEADER + "\n" + LINE.replace('"t":0', '"t":1e999')).encode(), "line 2"),
    "time back": ("\n".join([HEADER, LINE.replace('"t":0', '"t":9'), NEXT]).encode(), "line 3"),
    "unknown parent": (
        "\n".join([HEADER, LINE, NEXT.replace('"parent":0', '"parent":7')]).encode(),
        "parent",
    ),
    "past the parent": (
        "\n".join([HEADER, LINE, NEXT.replace('"shared":110', '"shared":111')]).encode(),
        "shared",
    ),
    "boundary past input": (
        (HEADER + "\n" + LINE[:-1] + ',"boundaries":[[101,"system"]]}').encode(),
        "boundaries",
    ),
    "not json": ((HEADER + "\n{").encode(), "line 2"),
    "deep": ((HEADER + "\n" + "[" * 100_000).encode(), "line 2"),
}


@pytest.mark.usefixtures("replay")
@pytest.mark.parametrize("case", BAD_TRACES)
def test_a_malformed_trace_is_one_line_and_no_output(
    case: str, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, said = BAD_TRACES[case]
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(content)
    error = refused(capsys, ["simulate", trace, bad, "--json", tmp_path / "out.json"])
    assert "bad.jsonl" in error
    assert said in error
    assert refused(capsys, ["trace", "info", bad]) == error
    assert names(tmp_path) == ["bad.jsonl", "small.jsonl"]


@pytest.mark.usefixtures("replay")
def test_a_missing_trace_and_a_folder_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "gone.jsonl" in refused(capsys, ["simulate", tmp_path / "gone.jsonl"])
    assert str(tmp_path) in refused(capsys, ["simulate", tmp_path])


@pytest.mark.usefixtures("replay")
@pytest.mark.parametrize("content", ["", "[]", '{"hidden": 5120}', "{", '{"models": {}}'])
def test_geometry_that_does_not_add_up_is_one_line(
    content: str, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model.json"
    model.write_text(content)
    assert "model.json" in refused(capsys, ["simulate", trace, "--model", model])


@pytest.mark.usefixtures("replay")
def test_an_output_may_not_replace_an_input_or_another_output(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = trace.read_bytes()
    assert "is also" in refused(capsys, ["simulate", trace, "--json", trace])
    same = tmp_path / "same"
    assert "is also --json" in refused(
        capsys, ["simulate", trace, "--json", same, "--detail", same]
    )
    assert "is a folder" in refused(capsys, ["simulate", trace, "--json", tmp_path])
    assert trace.read_bytes() == before
    assert names(tmp_path) == ["small.jsonl"]


@pytest.mark.usefixtures("replay")
def test_a_plot_without_matplotlib_names_the_command_that_installs_it(
    trace: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    error = refused(capsys, ["simulate", trace, "--plot", tmp_path / "out.svg"])
    assert "pip install '.[plot]'" in error
    assert names(tmp_path) == ["small.jsonl"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--from", "csv", "IN", "OUT"], "--from: invalid choice: 'csv'"),
        (["IN", "OUT"], "--from"),
        (["--from", "mooncake", "IN"], "OUT"),
        (["--from", "mooncake", "--tokenizer", "t", "IN", "OUT"], "only --from openai-jsonl"),
        (["--from", "mooncake", "IN", "IN"], "is also"),
        (["--from", "mooncake", "IN", "gone/OUT"], "folder 'gone' does not exist"),
    ],
)
def test_a_bad_conversion_is_one_line(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in refused(capsys, ["trace", "convert", *words])
    assert names(tmp_path) == []
