"""The options of `ninfer-pool simulate`: what is served, what is swept, what is written."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ninfer_pool.core.sizes import parse_size
from ninfer_pool.errors import UsageError
from ninfer_pool.sim import options

T = TypeVar("T")

DEFAULT_ENTRIES = "1,2,4,8,16"
DEFAULT_BUDGETS = "8GiB,16GiB,32GiB,64GiB"
DEFAULT_RATES = {"host": "3.1GB", "disk": "1.6GB"}
"""Host: measured on two V100, whose prefill rate is the default too. Disk: 3.5 GB/s, what an NVMe
drive on four lanes of PCIe 3 reads, and then the copy to the device at the rate of the host."""


def add_simulate(parser: argparse.ArgumentParser) -> None:
    """Add traces and options to the parser of `simulate`."""
    traces = "trace files, plain or .gz; none: the one that is shipped"
    parser.add_argument("traces", nargs="*", metavar="TRACE", type=Path, help=traces)
    _add_sweeps(parser.add_argument_group("what is swept").add_argument)
    _add_setup(parser.add_argument_group("what is served").add_argument)
    _add_tiers(parser.add_argument_group("tiers below the device, off by default").add_argument)
    _add_outputs(parser.add_argument_group("what is written").add_argument)


def sweeps(args: argparse.Namespace) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Entry counts and byte budgets to sweep: what was asked for alone, else both defaults."""
    if args.entries is None and args.budget is None:
        return options.parse_entries(DEFAULT_ENTRIES), options.parse_sizes(DEFAULT_BUDGETS)
    return args.entries or (), args.budget or ()


def tier_options(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Name, budget and rate of each tier asked for, the fastest first.

    Raises:
        UsageError: a rate for a tier that has no budget.
    """
    found = []
    for name, default in DEFAULT_RATES.items():
        budget, rate = getattr(args, f"{name}_budget"), getattr(args, f"{name}_rate")
        if budget is None and rate is not None:
            raise UsageError(f"--{name}-rate: there is no {name} tier; give --{name}-budget too")
        if budget is not None:
            rate = float(rate or options.parse_byte_rate(default))
            found.append({"name": name, "budget_bytes": budget, "bytes_s": rate})
    return found


def _add_sweeps(add: Callable[..., argparse.Action]) -> None:
    add(
        "--entries",
        metavar="K,…",
        type=_checked(options.parse_entries),
        help=f"entries retained, bytes unlimited (default: {DEFAULT_ENTRIES})",
    )
    add(
        "--budget",
        metavar="SIZE,…",
        type=_checked(options.parse_sizes),
        help=f"bytes retained, entries unlimited (default: {DEFAULT_BUDGETS}); "
        "where one of the two is given, only that one is swept",
    )
    add(
        "--policy",
        metavar="NAME,…",
        type=_checked(options.parse_policies),
        default="default,lru",
        help="who goes first (default: default,lru)",
    )


def _add_setup(add: Callable[..., argparse.Action]) -> None:
    rate = _checked(options.parse_rate)
    add(
        "--model",
        default="qwen3.8-27b",
        metavar="NAME|FILE.json",
        help="geometry (default: qwen3.8-27b)",
    )
    add("--kv", default="int8-g64", metavar="DTYPE", help="KV dtype (default: int8-g64)")
    add(
        "--mtp",
        default=True,
        action=argparse.BooleanOptionalAction,
        help="hold the draft layer's KV too, or not (default: --mtp)",
    )
    add(
        "--lanes",
        default=1,
        metavar="N",
        type=_checked(options.parse_lanes),
        help="requests served at once (default: 1)",
    )
    add(
        "--affinity",
        default="prefer",
        choices=("prefer", "strict"),
        help="strict: an entry is resumed in its home lane only (default: prefer)",
    )
    add(
        "--prefill-rate",
        default=1140.0,
        metavar="TOK_S",
        type=rate,
        help="prompt tokens a second (default: 1140)",
    )
    add(
        "--decode-rate",
        default=40.0,
        metavar="TOK_S",
        type=rate,
        help="output tokens a second (default: 40)",
    )


def _add_tiers(add: Callable[..., argparse.Action]) -> None:
    where = {"host": "host memory", "disk": "files"}
    why = {
        "host": "measured on the machine of the default --prefill-rate, two V100",
        "disk": "an NVMe drive's 3.5 GB/s and then the copy from host memory",
    }
    for name, place in where.items():
        add(
            f"--{name}-budget",
            metavar="SIZE",
            type=_checked(parse_size),
            help=f"bytes of {place} that keep what the device has no room for; "
            "the bounds have none",
        )
    for name, place in where.items():
        add(
            f"--{name}-rate",
            metavar="SIZE",
            type=_checked(options.parse_byte_rate),
            help=f"bytes a second from {place} to the device, such as 25GB or 25GiB "
            f"(default: {DEFAULT_RATES[name]}: {why[name]})",
        )


def _add_outputs(add: Callable[..., argparse.Action]) -> None:
    add("--json", type=Path, metavar="OUT", help="every figure of every run")
    add("--detail", type=Path, metavar="OUT.jsonl", help="a line for each request and run")
    add(
        "--plot",
        type=_checked(options.parse_plot),
        metavar="OUT.svg|.png|.html",
        help="hit rate against K and bytes; needs the extra ninfer-pool[plot]",
    )
    add(
        "--explain",
        type=_checked(options.parse_index),
        metavar="N",
        help="print what request N matched and lost, why, and what would have helped, "
        "under the first policy and size",
    )


def _checked(parse: Callable[[str], T]) -> Callable[[str], T]:
    """A parser of `options` as argparse wants it; argparse then names the option."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert
