"""`ninfer-pool demo`: what it prints and writes, and one clear line for a mistake."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ninfer_pool import cli
from ninfer_pool.demo import command
from ninfer_pool.demo.play import Play, PlayedRequest, Setting
from ninfer_pool.demo.scenarios import SCENARIOS, Script
from tests.sim.test_plot import read_page


class FakeStage:
    """Plays the scripts without a model: an entry more, a quarter more of every prompt cached."""

    model = "a model that was made up"

    def play(self, script: Script, setting: Setting) -> Play:
        served = []
        ask = next(script)
        while True:
            prompt = sum(len(str(message)) for message in ask.messages)
            share = min(setting.entries or 0, 4) / 4
            served.append(
                PlayedRequest(
                    label=ask.label,
                    prompt_tokens=prompt,
                    cached_tokens=int(prompt * share),
                    output_tokens=2,
                    reuse="restore_turn_checkpoint" if share else "full_reset",
                    reason="hit" if share else "evicted",
                    exact=True,
                    first_token_ms=10.0 - 8 * share,
                )
            )
            try:
                ask = script.send("Indeed.")
            except StopIteration:
                return Play(setting=setting, served=tuple(served))


class Terminal:
    """Runs `ninfer-pool demo` in an empty folder with a stage that needs no model."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capsys = capsys

    def __call__(self, *words: str) -> tuple[int, str, str]:
        code = cli.main(["demo", *words])
        out, err = self._capsys.readouterr()
        return code, out, err


@pytest.fixture
def run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Terminal:
    monkeypatch.setattr(command, "Stage", FakeStage)
    monkeypatch.chdir(tmp_path)
    return Terminal(tmp_path, capsys)


@pytest.fixture
def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def found(run: Terminal, *words: str) -> dict[str, Any]:
    code, _, _ = run("--json", "out.json", *words)
    assert code == 0
    figures: dict[str, Any] = json.loads((run.folder / "out.json").read_text(encoding="utf-8"))
    return figures


# -- what it prints ---------------------------------------------------------------------------


def test_each_table_has_a_line_above_and_a_line_below(run: Terminal) -> None:
    pytest.importorskip("matplotlib")
    code, out, err = run("--quick")
    assert (code, err) == (0, "")
    head, *parts, rates, times = out.split("\n\n")
    assert "a model that was made up" in head
    assert "append_frontier" in parts[0]
    for number, part in enumerate(parts[1:], 1):
        above, columns, rule, *rows, below = part.splitlines()
        assert above.startswith(f"{number}. ")
        assert columns.split()[:3] == ["request", "prompt", "today"]
        assert set(rule.strip()) == {"-"}
        assert rows
        assert below.endswith(".")
    assert len(parts) == 6
    told = parts[0].splitlines()
    assert [line.partition(":")[0] for line in told[:2]] == ["today", "K=n"]
    for each in SCENARIOS:
        assert each.happens or f"\n{each.title}: {each.means}" in rates
    assert rates.splitlines()[1].split() == ["scenario", "today", "K=1", "K=2", "K=4", "K=8"]
    assert times.endswith("wrote demo.html\n")


def test_lines_fit_a_terminal(run: Terminal) -> None:
    _, out, _ = run()
    assert max(map(len, out.splitlines())) <= 110


def test_the_tables_show_the_largest_pool_and_the_sweep_rises(run: Terminal) -> None:
    _, out, _ = run("--entries", "4,1,4,2")
    assert "K=4  resumed at" in out
    assert "scenario              today    K=1    K=2     K=4" in out
    assert "0.0%  25.0%  50.0%  100.0%" in out


def test_quick_plays_the_same_scenarios_with_fewer_requests(run: Terminal) -> None:
    long, short = found(run, "--entries", "1"), found(run, "--entries", "1", "--quick")
    sizes = [
        [len(scenario["plays"][0]["requests"]) for scenario in each["scenarios"]]
        for each in (short, long)
    ]
    assert all(less <= more for less, more in zip(*sizes, strict=True))
    assert sum(sizes[0]) < 0.6 * sum(sizes[1])


# -- what it writes ---------------------------------------------------------------------------


def test_json_holds_every_request_of_every_play(run: Terminal) -> None:
    figures = found(run, "--quick", "--entries", "1,3")
    assert figures["version"] == 1
    assert [each["name"] for each in figures["scenarios"]] == [each.name for each in SCENARIOS]
    for scenario in figures["scenarios"]:
        settings = [(play["setting"], play["entries"]) for play in scenario["plays"]]
        assert settings == [("single_lane", None), ("pool", 1), ("pool", 3)]
        for play in scenario["plays"]:
            requests = play["requests"]
            assert {each["reason"] for each in requests} <= {"hit", "evicted"}
            for field in ("prompt_tokens", "cached_tokens"):
                assert play[field] == sum(each[field] for each in requests)
            assert play["hit_rate"] == play["cached_tokens"] / play["prompt_tokens"]
            assert 0 < play["first_token_ms"] <= 10


def test_json_holds_what_is_printed(run: Terminal) -> None:
    _, out, _ = run("--quick", "--json", "out.json")
    figures = json.loads((run.folder / "out.json").read_text(encoding="utf-8"))
    assert len(figures["sections"]) == 7
    for section in figures["sections"]:
        assert section["title"] in out
        assert section["shows"] in out
        for row in section["rows"]:
            assert "  ".join(row).split() in [line.split() for line in out.splitlines()]


def test_the_page_holds_the_tables_and_asks_no_host(run: Terminal) -> None:
    pytest.importorskip("matplotlib")
    run("--quick")
    page = (run.folder / "demo.html").read_text(encoding="utf-8")
    text = read_page(page)
    assert page.count("<svg ") == 2
    assert "http" not in page
    assert "sub-agent 3, 2" in text
    assert "Hit rate against K" in text
    assert "all at once 100.0" in text


def test_a_picture_of_either_kind_can_be_drawn(run: Terminal) -> None:
    pytest.importorskip("matplotlib")
    assert run("--quick", "--plot", "a.svg")[0] == run("--quick", "--plot", "a.png")[0] == 0
    ElementTree.fromstring((run.folder / "a.svg").read_bytes())
    assert (run.folder / "a.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert not (run.folder / "demo.html").exists()


@pytest.mark.usefixtures("without_matplotlib")
def test_without_matplotlib_it_says_so_in_a_line_and_goes_on(run: Terminal) -> None:
    code, out, err = run("--quick", "--json", "out.json")
    assert code == 0
    assert "matplotlib" in err
    assert "pip install '.[plot]'" in err
    assert len(err.splitlines()) == 1
    assert out.endswith("wrote out.json\n")
    assert [path.name for path in run.folder.iterdir()] == ["out.json"]


def test_what_fails_leaves_no_file(run: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> Play:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(FakeStage, "play", fails)
    with pytest.raises(RuntimeError, match="out of luck"):
        run("--json", "out.json")
    assert list(run.folder.iterdir()) == []


# -- what it refuses --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--entries", "0"], "--entries: '0': write a whole number from 1"),
        (["--entries", "2,,4"], "--entries: '2,,4': an item is empty"),
        (["--entries", "-1"], "--entries: '-1': write a whole number from 1"),
        (["--plot", "demo.pdf"], "--plot: 'demo.pdf': the name must end in .svg, .png, .html"),
        (["--plot", "none/demo.html"], "--plot: folder 'none' does not exist"),
        (["--json", "."], "--json: '.' is a folder"),
        (["--json", "a.html", "--plot", "a.html"], "--json: 'a.html' is also --plot"),
        (["--seed", "3"], "unrecognized arguments: --seed"),
        (["more"], "unrecognized arguments: more"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_runs(run: Terminal, words: list[str], says: str) -> None:
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert err.startswith(f"ninfer-pool: error: {says}")
    assert len(err.splitlines()) == 1
    assert list(run.folder.iterdir()) == []
