"""Plots of hit rate against K and against bytes: `.svg`, `.png`, or a self-contained `.html`.

Needs matplotlib (the extra `plot`), imported here and nowhere else. The same runs give the same
bytes under the same matplotlib: no dates, ids from a fixed salt. Lines are labelled where they end,
so that no legend is needed.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, NullLocator

from ninfer_pool.core.sizes import format_bytes
from ninfer_pool.sim.geometry import PageSizes
from ninfer_pool.sim.options import BOUNDS
from ninfer_pool.sim.report import SWEEPS, Run, below, find, points, policies

INK, MUTED, GRID, SURFACE = "#16181d", "#5b5f66", "#e3e4e6", "#ffffff"
COLOURS = {
    "default": "#2a78d6", "lru": "#eb6834", "return": "#1baf7a", "gdsf": "#4a3aa7",
    "marconi": "#e05d92", "s3fifo": "#c98a00", "fifo": "#2f7d32",
    "clairvoyant": INK, "endless": MUTED, "single_lane": MUTED,
}  # fmt: skip
OTHER_COLOUR = "#8a6d5a"
DASHES = {"endless": (0, (5, 3)), "single_lane": (0, (1.5, 2))}
PANEL_INCHES = (6.0, 3.9)
PAGE_PANEL_INCHES = (4.7, 3.5)  # narrow, so that its letters can be read on a phone
TITLE_INCHES = 0.6
MARGINS_INCHES = (0.55, 1.6, 0.55, 0.4)  # left, right (labels), bottom, top of a panel
LABEL_GAP_POINTS = 12.5
MOST_TICKS = 9
GIB = 2**30
PANEL_TITLES = {
    "entries": "Prompt tokens reused, by entries retained",
    "budget_bytes": "Prompt tokens reused, by bytes retained",
}
AXIS_TITLES = {"entries": "K, entries retained (bytes unlimited)", "budget_bytes": "bytes retained"}
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans", "font.size": 9, "text.color": INK, "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED, "xtick.major.size": 0,
    "ytick.major.size": 0, "axes.spines.top": False, "axes.spines.right": False,
    "axes.spines.left": False, "axes.grid": True, "axes.grid.axis": "y", "grid.color": GRID,
    "grid.linewidth": 0.8, "axes.axisbelow": True, "svg.hashsalt": "ninfer-pool",
    "text.parse_math": False,
    "figure.facecolor": SURFACE, "axes.facecolor": SURFACE, "savefig.facecolor": SURFACE,
}  # fmt: skip
NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotLine:
    """One line of a panel: swept values and hit rates in percent; a flat bound has one rate."""

    name: str
    x: tuple[int, ...]
    y: tuple[float, ...]

    @property
    def colour(self) -> str:
        """Return a policy's own colour, the same in every plot."""
        return COLOURS.get(self.name, OTHER_COLOUR)

    @property
    def flat(self) -> bool:
        """Return True for a bound without size, drawn across the panel."""
        return self.name in DASHES


def plot(groups: Sequence[Sequence[Run]], *, suffix: str, sizes: PageSizes) -> bytes:
    """Return the file: one row of panels for each trace in `groups` (its runs)."""
    if suffix == ".html":
        from ninfer_pool.sim.page import page

        return page(groups, sizes=sizes, draw=panel_svg).encode()
    with mpl.rc_context(STYLE):
        return file_bytes(_figure(groups), suffix.removeprefix("."))


def panel_svg(runs: Sequence[Run], field: str) -> str:
    """Return one panel as SVG whose letters stay text, for a page with others."""
    with mpl.rc_context(page_style(f"{runs[0]['trace']} {field}")):
        figure = Figure(figsize=PAGE_PANEL_INCHES)
        _panel(figure, runs, field, inches=PAGE_PANEL_INCHES)
        return file_bytes(figure, "svg").decode()


def page_style(salt: str) -> dict[Any, Any]:
    """Return the style of a drawing inside a page: letters stay text, ids come from `salt`."""
    return {**STYLE, "svg.fonttype": "none", "svg.hashsalt": salt, "font.size": 10}


def lines(runs: Sequence[Run], field: str) -> list[PlotLine]:
    """Return the lines of one panel: bounds first, so that policies are drawn over them."""
    values = sorted(points(runs, field))
    found = []
    for name in (*BOUNDS, *reversed(policies(runs))):
        pairs = [(value, find(runs, name, field, value)) for value in values]
        known = [(value, 100 * run["hit_rate"]) for value, run in pairs if run is not None]
        if known:
            x, y = zip(*known, strict=True)
            found.append(PlotLine(name=name, x=x, y=y))
    return found


def spread(heights: Sequence[float], *, gap: float, low: float, high: float) -> list[float]:
    """Return label heights moved apart, in order, by as little as a sweep up and down needs.

    Two neighbours end at least `gap` apart, inside [low, high] where there is room for all.
    """
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    placed = list(heights)
    floor = low
    for index in order:
        placed[index] = max(placed[index], floor)
        floor = placed[index] + gap
    ceiling = high
    for index in reversed(order):
        placed[index] = min(placed[index], ceiling)
        ceiling = placed[index] - gap
    return placed


def file_bytes(figure: Figure, kind: str) -> bytes:
    """Return a figure as a file of kind `svg` or `png`, the same bytes each time."""
    buffer = io.BytesIO()
    FigureCanvasAgg(figure)
    metadata = NO_METADATA if kind == "svg" else {"Software": None}
    figure.savefig(buffer, format=kind, dpi=160, metadata=metadata)
    return buffer.getvalue()


def _figure(groups: Sequence[Sequence[Run]]) -> Figure:
    panels = max(sum(bool(points(runs, field)) for field in SWEEPS) for runs in groups)
    width, height = PANEL_INCHES[0] * panels, PANEL_INCHES[1] + TITLE_INCHES
    figure = Figure(figsize=(width, height * len(groups)))
    rows = figure.subfigures(len(groups), 1, squeeze=False)[:, 0]
    for row, runs in zip(rows, groups, strict=True):
        _row(row, runs, width=width, height=height)
    return figure


def _row(row: SubFigure, runs: Sequence[Run], *, width: float, height: float) -> None:
    """One trace: its title above its panels, side by side."""
    first = runs[0]
    lanes = f"{first['lanes']} lane" + ("s" if first["lanes"] > 1 else "")
    model = f"{first['model']}, {first['kv']} KV, {'with' if first['mtp'] else 'without'} MTP"
    left = MARGINS_INCHES[0] / width
    row.text(left, 1 - 0.32 / height, first["trace"], size=13, weight="bold")
    about = f"{model}; {first['requests']:,} requests, {lanes}, affinity {first['affinity']}"
    about += f"; below the device {tiers}" if (tiers := below(first)) else ""
    row.text(left, 1 - 0.58 / height, about, color=MUTED)
    present = [field for field in SWEEPS if points(runs, field)]
    share = PANEL_INCHES[0] / width
    for column, field in enumerate(present):
        part = (column * share, share, PANEL_INCHES[1] / height)
        _panel(row, runs, field, inches=PANEL_INCHES, part=part)


def _panel(
    figure: Figure | SubFigure,
    runs: Sequence[Run],
    field: str,
    *,
    inches: tuple[float, float],
    part: tuple[float, float, float] = (0.0, 1.0, 1.0),
) -> None:
    """Draw one sweep, `inches` large, into `part` of `figure`: left, width, height as shares."""
    wide, high = inches
    left, width, height = part
    west, east, south, north = MARGINS_INCHES
    box = (
        left + west / wide * width,
        south / high * height,
        (wide - west - east) / wide * width,
        (high - south - north) / high * height,
    )
    axes = figure.add_axes(box)
    drawn = lines(runs, field)
    _scale(axes, drawn, field)
    for line in drawn:
        _draw(axes, line)
    _label_ends(axes, drawn, axes_inches=high - south - north)
    axes.set_title(PANEL_TITLES[field], loc="left", size=9.5, color=INK, pad=11)


def _scale(axes: Axes, drawn: Sequence[PlotLine], field: str) -> None:
    values = sorted({value for line in drawn for value in line.x})
    rates = [rate for line in drawn for rate in line.y]
    axes.set_xscale("log", base=2)
    axes.set_xlim(values[0] / 1.15, values[-1] * 1.15)
    # Start at zero unless all rates are high; then at a round number below the lowest.
    low = 10 * max(0, int(min(rates) / 10 - 0.5))
    axes.set_ylim(low if low >= 40 else 0, 102 if max(rates) > 90 else max(rates) * 1.1 + 1)
    ticks = values[:: -(-len(values) // MOST_TICKS)]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    unit, names = _tick_names(ticks, field)
    axes.xaxis.set_major_formatter(FixedFormatter(names))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:g}%"))
    axes.set_xlabel(AXIS_TITLES[field] + unit, loc="left")


def _tick_names(ticks: Sequence[int], field: str) -> tuple[str, list[str]]:
    if field == "entries":
        return "", [str(tick) for tick in ticks]
    if all(tick % GIB == 0 for tick in ticks):
        return " in GiB (K unlimited)", [str(tick // GIB) for tick in ticks]
    return " (K unlimited)", [format_bytes(tick).replace(" ", "\n") for tick in ticks]


def _draw(axes: Axes, line: PlotLine) -> None:
    if line.flat:
        axes.axhline(line.y[0], color=line.colour, linewidth=1.3, linestyle=DASHES[line.name])
        return
    bound = line.name in BOUNDS
    axes.plot(
        line.x, line.y, color=line.colour, linewidth=1.3 if bound else 2.2,
        marker="o", markersize=3.5 if bound else 5.5, markeredgecolor=SURFACE,
        markeredgewidth=0.5 if bound else 0.9, solid_capstyle="round", clip_on=False,
    )  # fmt: skip


def _label_ends(axes: Axes, drawn: Sequence[PlotLine], *, axes_inches: float) -> None:
    """Write name and last rate next to each line's end, moved apart and joined by a thin line."""
    low, high = axes.get_ylim()
    gap = LABEL_GAP_POINTS / (axes_inches * 72) * (high - low)
    heights = spread([line.y[-1] for line in drawn], gap=gap, low=low, high=high)
    for line, height in zip(drawn, heights, strict=True):
        edge = axes.get_xlim()[1]
        label_end(
            axes, f"{line.name} {line.y[-1]:.1f}%",
            end=(edge if line.flat else line.x[-1], line.y[-1]), at=(1.055, height),
            colour=line.colour, bold=line.name == "default", flat=line.flat,
        )  # fmt: skip


def label_end(
    axes: Axes,
    text: str,
    *,
    end: tuple[float, float],
    at: tuple[float, float],
    colour: str,
    bold: bool,
    flat: bool = False,
) -> None:
    """Write `text` at `at` (a share of the width, a value), joined to a line's `end`."""
    axes.annotate(
        text, xy=end, xytext=at, textcoords=axes.get_yaxis_transform(), va="center",
        color=MUTED if flat else INK, weight="bold" if bold else "normal", annotation_clip=False,
        arrowprops={
            "arrowstyle": "-", "color": colour, "linewidth": 0.8, "shrinkA": 1,
            "shrinkB": 0 if flat else 4, "relpos": (0, 0.5),
        },
    )  # fmt: skip
