"""`bench tiers` checks answers before it times and writes what it promises. Nothing is timed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import tiers as bench_tiers
from benchmarks.common import moves, overhead
from benchmarks.common.conversations import Conversations, random_tokens, store
from benchmarks.common.moves import MovedEntries, Moves, moving
from benchmarks.common.overhead import CaseRequests, FolderSize
from benchmarks.common.ratios import Ratio, RatioReport
from benchmarks.tiers import DEFAULT, TINY

SMALL = MovedEntries(name="small", tokens=130, entries=3, page_bytes=96, image_bytes=100)
Rows = dict[tuple[str, str], list[Ratio]]


@pytest.fixture(scope="module")
def report() -> RatioReport:
    return bench_tiers.run(TINY)


@pytest.fixture(params=["host", "disk"])
def moved(request: pytest.FixtureRequest) -> Iterator[Moves]:
    with moving(SMALL, tier=request.param) as found:
        yield found


def rows(report: RatioReport, op: str) -> list[Ratio]:
    return [row for row in report.results if row.op == op]


def test_every_figure_has_a_row_that_is_held_to_it(report: RatioReport) -> None:
    held = {(row.op, row.beside, row.at_most) for row in report.results if row.at_most is not None}
    assert held == {
        ("save to host", "plain copy", 1 / 0.6),
        ("load from host", "plain copy", 1 / 0.6),
        ("load from disk", "plain read", 1 / 0.5),
        ("restore from disk", "cold prefill", 0.1),
    }


def test_what_tiers_add_is_told_of_each_case(report: RatioReport) -> None:
    shapes = [row.shape.split(", ", 1)[1] for row in rows(report, "acquire and commit")]
    assert shapes == [f"{case}, 3 others in tiers" for case in overhead.CASES]
    notes = [row.note for row in rows(report, "acquire and commit")]
    assert all("figure ≤ 50" in note for note in notes)
    assert len(rows(report, "step")) == 1


def test_start_and_flush_are_told_in_seconds(report: RatioReport) -> None:
    (start,), (flush,) = rows(report, "start"), rows(report, "flush to disk")
    assert start.note.endswith(" s")
    assert flush.note.endswith(" s in all")


def test_what_was_left_out_is_said(report: RatioReport) -> None:
    assert "Not measured: an entry of a large model" in report.text()
    assert DEFAULT.large is not None


# -- gates ------------------------------------------------------------------------------------


def test_entries_go_down_and_come_back(moved: Moves) -> None:
    for _ in range(2):
        moved.down(0)
        moved.up(0)
    moved.hit(0)
    moved.place.pool.check()


def test_gate_refuses_other_bytes_than_were_stored(moved: Moves) -> None:
    moved.sums[0] = "0" * 32
    with pytest.raises(AssertionError, match="have other bytes"):
        moved.check()


def test_gate_refuses_an_entry_that_is_not_in_the_tier(moved: Moves) -> None:
    moved.down(0)
    moved.place.pool.evict(moved.place.pool.entries()[0].key)
    with pytest.raises(AssertionError, match="2 of 3 entries in the tier"):
        moved.up(0)


def test_files_of_an_entry_are_its_own(tmp_path: Path) -> None:
    with moving(SMALL, tier="disk") as moved:
        groups = moved.files()
        copies = moves.copied(groups, tmp_path)
        assert [len(group) for group in groups] == [2, 2, 2]
        assert len({path for group in groups for path in group}) == 6
        assert moves.plain_read(copies)(0) > 0
        moved.flush(0)


def test_gate_refuses_a_hit_from_another_tier() -> None:
    plan = Conversations(shape="agent", tokens=1024, entries=2)
    with overhead.filled_tiers(plan, pages=400) as place, pytest.raises(AssertionError) as told:
        CaseRequests(place.pool, plan, case="hit")(0)
    assert "resumes 1024 from host" in str(told.value)


@pytest.mark.parametrize("case", overhead.CASES)
def test_requests_of_each_case_are_served_by_the_device(case: str) -> None:
    below = Conversations(shape="agent", tokens=1024, entries=2)
    own = Conversations(shape="agent", tokens=1024, entries=4)
    with overhead.filled_tiers(below, pages=600) as place:
        for index in (2, 3):
            store(place.pool, own.path(index), system=own.system)
        asked = CaseRequests(place.pool, own, case=case, first=2)
        assert min(asked(0), asked(1)) > 0
        assert not place.tiers.step()
        place.pool.check()


def test_folders_that_are_indexed_hold_what_they_say() -> None:
    row = overhead.opening_row(FolderSize(entries=4, tokens=200, run_pages=2), repeats=1)
    assert row.shape == "4 entries of 200 tokens in 2 runs"


def test_gate_refuses_a_folder_that_lost_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "random_tokens", lambda count, *_: random_tokens(count, 0))
    with pytest.raises(AssertionError, match="1 of 2 entries indexed"):
        overhead.opening_row(FolderSize(entries=2, tokens=200, run_pages=4), repeats=1)


# -- commands ---------------------------------------------------------------------------------


def test_the_command_prints_the_table_and_writes_json(
    report: RatioReport,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[Any] = []

    def run(scale: object) -> RatioReport:
        asked.append(scale)
        return report

    monkeypatch.setattr(bench_tiers, "run", run)
    out = tmp_path / "out.json"
    bench_tiers.main(["--tiny", "--json", str(out)])
    bench_tiers.main([])
    assert asked == [TINY, DEFAULT]
    written = json.loads(out.read_text(encoding="utf-8"))
    assert written["version"] == 1
    assert len(written["results"]) == len(report.results)
    assert "restore from disk" in capsys.readouterr().out


def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench_tiers.main(["--tiny", "--json", "nowhere/out.json"])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert "--json: folder 'nowhere' does not exist" in said
    assert said.count("\n") == 1


def test_a_plain_copy_is_of_as_many_bytes() -> None:
    assert SMALL.bytes == 3 * (3 + 2) * 96
    assert moves.plain_copy(SMALL)(0) > 0
    assert moves.middle([1, 9, 2]) == 2
    assert np.all(np.array(moves.beyond([60, 70], [50, 50, 51])[0]) == [10, 20])
