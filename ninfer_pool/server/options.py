"""The options of `ninfer-pool serve`; imports nothing that takes time."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ninfer_pool.core.config import AFFINITIES
from ninfer_pool.core.policy import POLICIES
from ninfer_pool.core.sizes import parse_size
from ninfer_pool.errors import UsageError
from ninfer_pool.sim.options import argument, parse_count

KEY_VARIABLE = "NINFER_POOL_API_KEY"
MOST_LANES = 8
MOST_PORT = 65535
MOST_SHUTDOWN = 86400
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@A-Z]+")
"""As browsers send it; they leave a scheme's own port out."""
Add = Callable[..., argparse.Action]
_count, _size = argument(parse_count), argument(parse_size)


def add_serve(parser: argparse.ArgumentParser) -> None:
    """Declare every option of the command."""
    _add_server(parser.add_argument_group("the server").add_argument)
    _add_model(parser.add_argument_group("the model").add_argument)
    _add_pool(parser.add_argument_group("the pool").add_argument)
    _add_tiers(parser.add_argument_group("tiers below the device").add_argument)
    _add_requests(parser.add_argument_group("requests").add_argument)


def _add_server(add: Add) -> None:
    add("--host", default="127.0.0.1", help="address to listen on (default: this machine alone)")
    add("--port", type=_port, default=8000, help="0: any that is free (default: 8000)")
    key = os.environ.get(KEY_VARIABLE) or None
    add("--api-key", metavar="KEY", default=key, help=f"asked for (default: ${KEY_VARIABLE})")
    origin = "a page's origin that may call, such as https://chat.example; * for all"
    add("--cors", metavar="ORIGIN", type=_origin, action="append", default=[], help=origin)
    add("--max-request-mib", metavar="N", type=_count, default=32, help="default: 32")
    add("--max-queue", metavar="N", type=_count, default=256, help="that wait (default: 256)")
    add(
        "--shutdown-seconds",
        metavar="N",
        type=argument(partial(parse_count, largest=MOST_SHUTDOWN)),
        default=30,
        help="from a signal to the end: requests have a third, then the disk tier (default: 30)",
    )
    add(
        "--request-log-jsonl",
        metavar="FILE",
        type=Path,
        help="append one line a request, without text: trace convert --from server-log reads it",
    )


def _add_model(add: Add) -> None:
    add("--model", metavar="DIR", help="Hugging Face folder (default: the one shipped)")
    add(
        "--model-id",
        metavar="NAME",
        action="append",
        help="the name it is served under; more of them are further names (default: the folder's)",
    )
    add("--device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    add("--dtype", choices=("fp32", "bf16", "fp16"), help="default: what suits the device")
    add("--max-context", metavar="N", type=_count, help="tokens (default: the model's)")
    add("--spec", choices=("none", "mtp"), help="mtp: the model's own draft head (default: none)")
    add(
        "--draft-tokens",
        metavar="N",
        type=int,
        choices=range(6),
        help="turns --spec mtp on (default with it: 3)",
    )
    add("--prefill-chunk", metavar="N", type=_count, default=2048, help="default: 2048")


def _add_pool(add: Add) -> None:
    kv = ("fp32", "bf16", "fp16", "int8-g64")
    add("--kv-dtype", choices=kv, help="default: bf16")
    add("--kv-budget", metavar="SIZE", help="such as 4GiB (default: a share of free memory)")
    lanes = argument(partial(parse_count, largest=MOST_LANES))
    add("--lanes", metavar="N", type=lanes, help="that run at once, 1 to 8 (default: 4)")
    add("--max-entries", metavar="K", type=_count, help="default: bytes alone decide")
    add("--policy", choices=tuple(POLICIES), help="who goes first (default: default)")
    add("--affinity", choices=AFFINITIES, default="prefer", help="of lanes (default: prefer)")
    add(
        "--min-chunk",
        metavar="N",
        type=lambda text: 0 if text == "0" else _count(text),
        default=0,
        help="no cut nearer than this to the one before: faster cold starts, fewer checkpoints",
    )
    add(
        "--single-lane",
        action="store_true",
        help="as engines without a pool: one lane that keeps what it ran last",
    )
    add("--no-prefix-reuse", action="store_true", help="resume nothing and keep nothing")


def _add_tiers(add: Add) -> None:
    host = "host memory for what the device has no room for, such as 16GiB (default: none)"
    add("--host-budget", metavar="SIZE", type=_size, help=host)
    folder = "a folder of its own for what host memory has no room for; survives a restart"
    add("--disk-dir", metavar="DIR", type=Path, help=folder)
    add("--disk-budget", metavar="SIZE", type=_size, help="bytes of that folder, such as 200GiB")


def _add_requests(add: Add) -> None:
    add("--default-max-tokens", metavar="N", type=_count, default=1024, help="default: 1024")
    add("--no-thinking", action="store_true", help="answer without thoughts, by default")
    add(
        "--preserve-thinking",
        action="store_true",
        help="keep earlier turns' thinking in the prompt, by default",
    )


def check_options(args: argparse.Namespace) -> None:
    """Refuse options that contradict each other.

    Raises:
        UsageError: names them.
    """
    if args.single_lane:
        fixed = {"--lanes": (args.lanes, 1), "--max-entries": (args.max_entries, 1)}
        for option, (given, only) in {**fixed, "--policy": (args.policy, "lru")}.items():
            if given not in (None, only):
                raise UsageError(f"{option}: --single-lane means {only}; leave one of them out")
        if args.no_prefix_reuse:
            raise UsageError("--single-lane: with --no-prefix-reuse nothing is kept; drop one")
    _check_tiers(args)
    if args.spec == "none" and args.draft_tokens:
        raise UsageError("--draft-tokens: nothing drafts with --spec none; needs --spec mtp")
    if args.spec == "mtp" and args.draft_tokens == 0:
        raise UsageError("--spec mtp: --draft-tokens 0 drafts nothing; give 1 to 5")
    key = args.api_key
    if key is not None and not (key and key == key.strip() and key.isprintable()):
        raise UsageError("--api-key: empty, or no header carries it; needs printable characters")


def _check_tiers(args: argparse.Namespace) -> None:
    disk = {"--disk-dir": args.disk_dir, "--disk-budget": args.disk_budget}
    given = [option for option, value in disk.items() if value is not None]
    if len(given) == 1:
        (missing,) = disk.keys() - given
        raise UsageError(f"{given[0]}: {missing} is not given; needs both or neither")
    tier = "--host-budget" if args.host_budget is not None else "--disk-dir"
    if args.host_budget is None and not given:
        return
    without = {"--single-lane": args.single_lane, "--no-prefix-reuse": args.no_prefix_reuse}
    for option in (option for option, given in without.items() if given):
        raise UsageError(f"{tier}: with {option} nothing goes to it; leave one of them out")


def _port(text: str) -> int:
    if not re.fullmatch("[0-9]{1,5}", text) or int(text) > MOST_PORT:
        raise argparse.ArgumentTypeError(f"{text!r}: write a whole number from 0 to {MOST_PORT}")
    return int(text)


def _origin(text: str) -> str:
    if text != "*" and not _ORIGIN.fullmatch(text):
        wanted = "an origin as browsers send it, such as https://chat.example, or *"
        raise argparse.ArgumentTypeError(f"{text!r}: write {wanted}")
    return text
