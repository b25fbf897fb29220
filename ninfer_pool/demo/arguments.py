"""The options of `ninfer-pool demo`; imports nothing that takes time."""

from __future__ import annotations

import argparse
from pathlib import Path

from ninfer_pool.sim import options

DEFAULT_ENTRIES = "1,2,4,8"
DEFAULT_PLOT = "demo.html"


def add_demo(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser of `demo`."""
    add = parser.add_argument
    add(
        "--entries",
        metavar="K,…",
        type=options.argument(_entries),
        default=DEFAULT_ENTRIES,
        help=f"how many conversations the pool retains (default: {DEFAULT_ENTRIES})",
    )
    add("--quick", action="store_true", help="fewer turns")
    add(
        "--plot",
        metavar="FILE",
        type=options.argument(options.parse_plot),
        default=DEFAULT_PLOT,
        help="the picture: .svg, .png, or .html with the tables "
        f"(default: {DEFAULT_PLOT}); needs the extra `plot`",
    )
    add("--json", type=Path, metavar="OUT", help="all printed figures")


def _entries(text: str) -> tuple[int, ...]:
    return tuple(sorted(options.parse_entries(text)))
