"""The options of `ninfer-pool simulate`; imports nothing that takes time."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ninfer_pool.core.sizes import parse_size
from ninfer_pool.errors import UsageError
from ninfer_pool.sim import options
from ninfer_pool.sim.options import argument

if TYPE_CHECKING:
    from ninfer_pool.sim.tiers import TierSize

Add = Callable[..., argparse.Action]

DEFAULT_ENTRIES = "1,2,4,8,16"
DEFAULT_BUDGETS = "8GiB,16GiB,32GiB,64GiB"
DEFAULT_RATES = {"host": "3.1GB", "disk": "1.6GB"}
"""Host: measured on two V100, like the default prefill rate. Disk: an NVMe drive reads 3.5 GB/s on
four lanes of PCIe 3, and the copy to the device follows at the rate of the host."""


def add_simulate(parser: argparse.ArgumentParser) -> None:
    """Add traces and options to the parser of `simulate`."""
    traces = "trace files, plain or .gz (default: the shipped trace)"
    parser.add_argument("traces", nargs="*", metavar="TRACE", type=Path, help=traces)
    _add_sweeps(parser.add_argument_group("the sweep").add_argument)
    _add_setup(parser.add_argument_group("the machine and model").add_argument)
    _add_tiers(parser.add_argument_group("tiers below the device, off by default").add_argument)
    _add_outputs(parser.add_argument_group("the output").add_argument)


def sweeps(args: argparse.Namespace) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the entry counts and byte budgets to sweep: those given, else both defaults."""
    if args.entries is None and args.budget is None:
        return options.parse_entries(DEFAULT_ENTRIES), options.parse_sizes(DEFAULT_BUDGETS)
    return args.entries or (), args.budget or ()


def tier_sizes(args: argparse.Namespace) -> tuple[TierSize, ...]:
    """Return each requested tier, the fastest first.

    Raises:
        UsageError: a rate for a tier that has no budget.
    """
    from ninfer_pool.sim.tiers import TierSize

    found = []
    for name, default in DEFAULT_RATES.items():
        budget, rate = getattr(args, f"{name}_budget"), getattr(args, f"{name}_rate")
        if budget is None and rate is not None:
            raise UsageError(f"--{name}-rate: there is no {name} tier; give --{name}-budget too")
        if budget is not None:
            bytes_s = float(rate or options.parse_byte_rate(default))
            found.append(TierSize(name=name, budget_bytes=budget, bytes_s=bytes_s))
    return tuple(found)


def _add_sweeps(add: Add) -> None:
    add(
        "--entries",
        metavar="K,…",
        type=argument(options.parse_entries),
        help=f"entries retained, bytes unlimited (default: {DEFAULT_ENTRIES})",
    )
    add(
        "--budget",
        metavar="SIZE,…",
        type=argument(options.parse_sizes),
        help=f"bytes retained, entries unlimited (default: {DEFAULT_BUDGETS}); "
        "where one of the two is given, only that one is swept",
    )
    add(
        "--policy",
        metavar="NAME,…",
        type=argument(options.parse_policies),
        default="default,lru",
        help="eviction policies (default: default,lru)",
    )


def _add_setup(add: Add) -> None:
    rate = argument(options.parse_rate)
    model = "a shipped geometry or a file (default: qwen3.8-27b)"
    add("--model", default="qwen3.8-27b", metavar="NAME|FILE.json", help=model)
    add("--kv", default="int8-g64", metavar="DTYPE", help="KV dtype (default: int8-g64)")
    mtp = "hold the draft layer's KV too, or not (default: --mtp)"
    add("--mtp", default=True, action=argparse.BooleanOptionalAction, help=mtp)
    lanes = "requests served at once (default: 1)"
    add("--lanes", default=1, metavar="N", type=argument(options.parse_lanes), help=lanes)
    affinity = "strict: an entry is resumed in its home lane only (default: prefer)"
    add("--affinity", default="prefer", choices=("prefer", "strict"), help=affinity)
    prefill = "prompt tokens per second (default: 1140)"
    add("--prefill-rate", default=1140.0, metavar="TOK_S", type=rate, help=prefill)
    decode = "output tokens per second (default: 40)"
    add("--decode-rate", default=40.0, metavar="TOK_S", type=rate, help=decode)


def _add_tiers(add: Add) -> None:
    places = {"host": "host memory", "disk": "files"}
    reasons = {
        "host": "measured on the machine of the default --prefill-rate, two V100",
        "disk": "an NVMe drive's 3.5 GB/s and then the copy from host memory",
    }
    for name, place in places.items():
        add(
            f"--{name}-budget",
            metavar="SIZE",
            type=argument(parse_size),
            help=f"bytes of {place} for entries that the device has no room for; "
            "the bounds have none",
        )
    for name, place in places.items():
        add(
            f"--{name}-rate",
            metavar="SIZE",
            type=argument(options.parse_byte_rate),
            help=f"bytes per second from {place} to the device, such as 25GB or 25GiB "
            f"(default: {DEFAULT_RATES[name]}: {reasons[name]})",
        )


def _add_outputs(add: Add) -> None:
    add("--json", type=Path, metavar="OUT", help="every figure of every run")
    add("--detail", type=Path, metavar="OUT.jsonl", help="one line per request and run")
    add(
        "--plot",
        type=argument(options.parse_plot),
        metavar="OUT.svg|.png|.html",
        help="hit rate against K and bytes; needs the extra `plot`",
    )
    add(
        "--explain",
        type=argument(options.parse_index),
        metavar="N",
        help="print the match and the loss of request N, the reason and the remedy, "
        "under the first policy and size",
    )
