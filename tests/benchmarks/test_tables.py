"""Tables and figures of README and docs hold the numbers of the records in docs/measurements."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.common import records, tables
from ninfer_pool.core.policy import POLICIES

FOUND = [
    (page.name, *found.groups()[:2])
    for page in tables.pages()
    for found in tables.MARKER.finditer(page.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize("page", tables.pages(), ids=lambda page: page.name)
def test_a_page_holds_the_numbers_of_the_records(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert tables.rendered(text) == text, "run scripts/make_tables"


@pytest.mark.parametrize("page", tables.pages(), ids=lambda page: page.name)
def test_every_marker_of_a_page_is_closed_and_of_a_known_kind(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count("<!-- end -->") == len(tables.MARKER.findall(text))


def test_every_table_is_on_a_page() -> None:
    assert {name for _, kind, name in FOUND if kind == "table"} == set(tables.TABLES)


@pytest.mark.parametrize("name", records.SIMULATED)
def test_a_simulation_gives_its_record_again(name: str, *, long_run: bool) -> None:
    if not long_run:
        pytest.skip("with --long: minutes")
    assert records.made(name) == records.path(name).read_text(encoding="utf-8")


def test_the_demo_reuses_as_many_tokens_as_its_record_has(*, long_run: bool) -> None:
    if not long_run:
        pytest.skip("with --long: minutes")
    again, before = records.parsed(records.made("demo")), records.record("demo")
    assert reused(again) == reused(before)


def reused(demo: records.Record) -> list[tuple[str, list[int]]]:
    """For each scenario the cached tokens of every play."""
    return [
        (each["name"], [play["cached_tokens"] for play in each["plays"]])
        for each in demo["scenarios"]
    ]


def test_the_figure_is_drawn_from_its_record(*, long_run: bool) -> None:
    if not long_run:
        pytest.skip("with --long: the same bytes only under the same matplotlib")
    assert tables.figure() == tables.FIGURE.read_bytes(), "run scripts/make_tables"


def test_every_policy_has_a_description_that_is_no_number() -> None:
    lines = tables.policy_table().splitlines()[2:]
    assert len(lines) == len(POLICIES)
    for line, name in zip(lines, POLICIES, strict=True):
        text = line.removeprefix(f"| `{name}` | ")
        assert len(text.split()) > 4


def test_a_stale_number_is_written_again() -> None:
    stale = "It is <!-- count: policies -->99<!-- end --> policies."
    fresh = f"It is <!-- count: policies -->{len(POLICIES)}<!-- end --> policies."
    assert tables.rendered(stale) == fresh
    assert tables.rendered(fresh) == fresh


@pytest.mark.parametrize(
    "marker", ["table: nosuch", "rate: below default K=77", "count: nosuch", "measured: core | a"]
)
def test_a_marker_without_a_number_is_refused(marker: str) -> None:
    with pytest.raises(ValueError, match=marker.partition(" ")[0]):
        tables.rendered(f"<!-- {marker} -->1<!-- end -->")


def test_columns_of_numbers_are_aligned_to_the_right() -> None:
    table = tables.markdown(("a", "b", "c"), [("x", "1.5 %", "2 s"), ("y", "-", "two")])
    assert table.splitlines()[1] == "| --- | ---: | --- |"
