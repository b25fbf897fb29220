"""The demo's picture: hit rate and time to first token, from today's lane to the largest K.

Needs matplotlib (the extra `plot`). The `.html` page holds the drawings and all tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ninfer_pool.demo.play import Play, ScenarioResult
from ninfer_pool.demo.table import HEADLINE, LEGEND, sections
from ninfer_pool.sim.page import document, inline, table_html
from ninfer_pool.sim.plot import (
    COLOURS,
    INK,
    STYLE,
    SURFACE,
    file_bytes,
    label_end,
    page_style,
    spread,
)

PANEL_INCHES = (5.8, 3.7)
LABEL_GAP = 0.055
"""Between the labels of two lines, as a share of the panel's height."""
BOLD = "together"
LINE_COLOURS = [
    COLOURS[name] for name in ("marconi", "s3fifo", "return", "endless", "fifo", "gdsf", "lru")
]

Figures = Callable[[Play], float]
PANELS: dict[str, tuple[str, Figures]] = {
    "rate": ("Prompt tokens cached, in %", lambda play: 100 * play.hit_rate),
    "time": ("Median time to first token, in ms", lambda play: play.first_token_ms),
}


def picture(results: Sequence[ScenarioResult], *, suffix: str) -> bytes:
    """Return the file: `.svg` and `.png` hold both panels, `.html` the tables too."""
    if suffix == ".html":
        return page(results).encode()
    with mpl.rc_context(STYLE):
        wide, high = PANEL_INCHES
        figure = Figure(figsize=(2 * wide, high))
        for index, panel in enumerate(PANELS):
            _draw(figure.add_axes((0.04 + index / 2, 0.13, 0.29, 0.75)), results, panel)
        return file_bytes(figure, suffix.removeprefix("."))


def page(results: Sequence[ScenarioResult]) -> str:
    """Return a page of drawings, tables and remarks that loads nothing from another host."""
    drawings = [
        f"<figure>{inline(panel_svg(results, panel), title=title)}</figure>"
        for panel, (title, _) in PANELS.items()
    ]
    parts = [f"<p>{escape(HEADLINE)}.</p>", f'<div class="panels">{"".join(drawings)}</div>']
    parts.append(_lines("\n".join(LEGEND)))
    for each in sections(results):
        parts.append(f"{table_html(each.table)}{_lines(each.shows)}")
    name = "ninfer-pool demo"
    return document("\n".join(parts), heading=name, title=name)


def _lines(text: str) -> str:
    return f"<p>{escape(text)}</p>".replace("\n", "<br>")


def panel_svg(results: Sequence[ScenarioResult], panel: str) -> str:
    """Return one panel as SVG whose letters stay text, for a page with others."""
    with mpl.rc_context(page_style(f"demo {panel}")):
        figure = Figure(figsize=PANEL_INCHES)
        _draw(figure.add_axes((0.08, 0.13, 0.56, 0.75)), results, panel)
        return file_bytes(figure, "svg").decode()


def _draw(axes: Axes, results: Sequence[ScenarioResult], panel: str) -> None:
    title, value = PANELS[panel]
    settings = [play.setting for play in results[0].plays]
    for colour, result in _coloured(results):
        bold = result.scenario.name == BOLD
        axes.plot(
            range(len(settings)), [value(play) for play in result.plays], color=colour,
            linewidth=2.4 if bold else 1.4, marker="o", markersize=5.5 if bold else 4,
            markeredgecolor=SURFACE, solid_capstyle="round", clip_on=False, zorder=3 if bold else 2,
        )  # fmt: skip
    axes.set_xlim(-0.2, len(settings) - 0.8)
    axes.set_ylim(bottom=0)
    axes.set_xticks(range(len(settings)), [setting.label for setting in settings])
    axes.set_title(title, loc="left", size=9.5, color=INK, pad=11)
    _label_ends(axes, results, value)


def _coloured(results: Sequence[ScenarioResult]) -> list[tuple[str, ScenarioResult]]:
    others = [result for result in results if result.scenario.name != BOLD]
    found = list(zip(LINE_COLOURS, others, strict=False))
    return found + [(COLOURS["default"], r) for r in results if r.scenario.name == BOLD]


def _label_ends(axes: Axes, results: Sequence[ScenarioResult], value: Figures) -> None:
    """Write name and last figure next to each line's end, moved apart."""
    low, high = axes.get_ylim()
    drawn = _coloured(results)
    ends = [value(result.pool) for _, result in drawn]
    heights = spread(ends, gap=LABEL_GAP * (high - low), low=low, high=high)
    for (colour, result), end, height in zip(drawn, ends, heights, strict=True):
        label_end(
            axes, f"{result.scenario.title} {end:.1f}", end=(len(result.plays) - 1, end),
            at=(1.06, height), colour=colour, bold=result.scenario.name == BOLD,
        )  # fmt: skip
