"""The options of `ninfer-pool demo`."""

from __future__ import annotations

import argparse
from pathlib import Path

from ninfer_pool.errors import UsageError
from ninfer_pool.sim import options

DEFAULT_ENTRIES = "1,2,4,8"
DEFAULT_PLOT = "demo.html"


def add_demo(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser of `demo`."""
    add = parser.add_argument
    add(
        "--entries",
        metavar="K,…",
        type=_entries,
        default=DEFAULT_ENTRIES,
        help=f"how many conversations the pool retains (default: {DEFAULT_ENTRIES})",
    )
    add("--quick", action="store_true", help="fewer turns")
    add(
        "--plot",
        metavar="FILE",
        type=_plot,
        default=DEFAULT_PLOT,
        help="the picture, .svg, .png or .html, which holds the tables too "
        f"(default: {DEFAULT_PLOT}); needs the extra ninfer-pool[plot]",
    )
    add("--json", type=Path, metavar="OUT", help="everything that is printed")


def _entries(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted(options.parse_entries(text)))
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _plot(text: str) -> Path:
    try:
        return options.parse_plot(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
