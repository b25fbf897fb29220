"""Plots are written whole, the same each time, and ask no outside host for anything."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from ninfer_pool.sim.geometry import PageSizes
from ninfer_pool.sim.page import DARK, inline
from ninfer_pool.sim.plot import COLOURS, lines, panel_svg, plot, spread
from tests.sim.made_runs import GIB, made_runs, with_tiers

SIZES = PageSizes(page_bytes=2_297_856, image_bytes=153_954_304, page_tokens=64)
VOID = {"meta", "br"}


class Tags(HTMLParser):
    """Holds that every tag that opens also closes, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read_page(page: str) -> str:
    """The page's text, once its tags are seen to be in order."""
    tags = Tags()
    tags.feed(page)
    tags.close()
    assert tags.open == []
    return tags.text


def test_png_is_an_image_with_two_panels_side_by_side() -> None:
    data = plot([made_runs()], suffix=".png", sizes=SIZES)
    assert data.startswith(b"\x89PNG\r\n")
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert width > 2 * height


def test_svg_parses_and_is_the_same_each_time() -> None:
    first = plot([made_runs(), made_runs("other")], suffix=".svg", sizes=SIZES)
    assert ElementTree.fromstring(first).tag == "{http://www.w3.org/2000/svg}svg"
    assert first == plot([made_runs(), made_runs("other")], suffix=".svg", sizes=SIZES)
    assert b"date" not in first.lower()


@pytest.mark.parametrize(("entries", "budgets"), [((4,), ()), ((), (3 * GIB // 2, 2 * GIB))])
def test_one_sweep_or_one_value_can_be_drawn(
    entries: tuple[int, ...], budgets: tuple[int, ...]
) -> None:
    runs = made_runs(entries=entries, budgets=budgets)
    ElementTree.fromstring(plot([runs], suffix=".svg", sizes=SIZES))


def test_a_trace_that_reuses_nothing_can_be_drawn() -> None:
    runs = made_runs()
    for run in runs:
        run["hit_rate"] = 0.0
    ElementTree.fromstring(plot([runs], suffix=".svg", sizes=SIZES))


def test_every_policy_and_bound_has_a_line_in_percent() -> None:
    drawn = {line.name: line for line in lines(made_runs(entries=(4, 1, 2)), "entries")}
    assert set(drawn) == {"default", "lru", "single_lane", "endless", "clairvoyant"}
    assert drawn["default"].x == (1, 2, 4)
    assert list(drawn["default"].y) == sorted(drawn["default"].y)
    assert drawn["endless"].y == (95.0, 95.0, 95.0)


def test_a_panel_names_its_lines_and_values() -> None:
    svg = panel_svg(made_runs(), "budget_bytes")
    for text in ("single_lane 25.0%", "endless 95.0%", ">8<", ">16<", "in GiB"):
        assert text in svg


def test_a_page_is_whole_and_asks_no_host() -> None:
    page = plot([made_runs(), made_runs("other")], suffix=".html", sizes=SIZES).decode()
    text = read_page(page)
    assert "http" not in page
    assert "url(" not in page.replace("url(#", "")
    assert page.count("<svg ") == 4
    assert "made: 40 requests" in text
    assert "other: 40 requests" in text
    assert text.count("Why matched tokens were lost under default") == 4
    assert 'name="viewport"' in page
    assert "prefers-color-scheme: dark" in page


def test_pages_and_drawings_name_the_tiers() -> None:
    tiers = "host 64 GiB, disk 1 TiB"
    page = plot([with_tiers(made_runs())], suffix=".html", sizes=SIZES).decode()
    assert read_page(page).count(f"below the device {tiers}") == 2
    assert page.count(f"with {tiers} below the device") == 2
    assert "Each tier: tokens reused from it" in page
    drawn = plot([with_tiers(made_runs())], suffix=".svg", sizes=SIZES)
    assert drawn != plot([made_runs()], suffix=".svg", sizes=SIZES)


def test_ids_of_a_page_are_unique() -> None:
    page = plot([made_runs(), made_runs("other")], suffix=".html", sizes=SIZES).decode()
    ids = re.findall(r'\sid="([^"]*)"', page)
    assert len(ids) == len(set(ids)) > 0


def test_every_colour_of_a_drawing_changes_with_the_page() -> None:
    element = inline(panel_svg(made_runs(), "entries"), title="a <b>")
    assert re.findall(r"(?:fill|stroke): #\w+", element) == []
    assert 'aria-label="a &lt;b&gt;"' in element
    assert set(COLOURS.values()) <= set(DARK)


def test_a_trace_with_an_odd_name_is_shown_as_it_is() -> None:
    runs = made_runs("<b>$x_1$&")
    ElementTree.fromstring(plot([runs], suffix=".svg", sizes=SIZES))
    assert "<b>$x_1$&: 40 requests" in read_page(plot([runs], suffix=".html", sizes=SIZES).decode())


@pytest.mark.parametrize(
    ("heights", "placed"),
    [
        ([10.0, 50.0], [10.0, 50.0]),
        ([50.0, 50.0, 50.0], [50.0, 60.0, 70.0]),
        ([99.0, 98.0], [100.0, 90.0]),
        ([0.0, 5.0], [0.0, 10.0]),
    ],
)
def test_labels_move_apart_and_keep_their_order(heights: list[float], placed: list[float]) -> None:
    assert spread(heights, gap=10, low=0, high=100) == placed
