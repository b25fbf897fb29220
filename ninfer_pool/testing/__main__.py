"""``python -m ninfer_pool.testing simulate``: seeded simulation with fault injection.

Exit code 0: every seed passed; 1: a seed failed; 2: a caller's mistake.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import ninfer_pool
from ninfer_pool.errors import PoolError
from ninfer_pool.testing import simulation

LAST_STEPS = 12
FOUND, MISTAKE, INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        code: int = args.run(args)
    except PoolError as error:
        print(f"ninfer_pool.testing: error: {error}", file=sys.stderr)
        return MISTAKE
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


def revision() -> str:
    """Return the commit of the checkout that holds this package, else the package's version."""
    root = Path(ninfer_pool.__file__).resolve().parents[1]
    version = f"version {ninfer_pool.__version__}"
    if not (root / ".git").exists():
        return version
    try:
        head = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--", "ninfer_pool")
    except (OSError, subprocess.CalledProcessError):
        return version
    return f"commit {head}{' with uncommitted edits' if changed else ''}"


def _git(root: Path, *words: str) -> str:
    command = ["git", "-C", str(root), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


# -- simulate --------------------------------------------------------------------------------


def run_simulate(args: argparse.Namespace) -> int:
    """Live through seeds; print the one that fails, and how to replay it."""
    begun, lives = time.monotonic(), []
    seeds = [args.seed] if args.seed is not None else range(args.first, args.first + args.seeds)
    try:
        for life in simulation.lives(seeds, minutes=args.minutes, steps=args.steps):
            lives.append(life)
            if args.seed is not None or len(lives) % 100 == 0:
                spent = time.monotonic() - begun
                print(f"seed {life.seed}: trace {life.digest}, {spent:.0f} s", flush=True)
    except simulation.SimulationFailed as failure:
        _print_failure(failure)
        return FOUND
    steps, victims = sum(life.steps for life in lives), sum(life.victims for life in lives)
    ended = "" if len(lives) == len(seeds) else " when the time was up"
    print(
        f"{len(lives)} of {len(seeds)} seeds{ended}: {steps} steps, {victims} victims, no failure "
        f"in {time.monotonic() - begun:.0f} s; {revision()}"
    )
    return 0


def _print_failure(failure: simulation.SimulationFailed) -> None:
    cause = failure.__cause__
    assert cause is not None
    traceback.print_exception(type(cause), cause, cause.__traceback__)
    print(*failure.log[-LAST_STEPS:], sep="\n")
    print(f"{failure}: {type(cause).__name__}: {cause}")
    print(revision())
    steps = "" if failure.steps == simulation.STEPS else f" --steps {failure.steps}"
    print(f"replay: python -m ninfer_pool.testing simulate --seed {failure.seed}{steps}")


# -- arguments -------------------------------------------------------------------------------


def _least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text}; needs {least} or more")
        return value

    number.__name__ = "number"
    return number


def _minutes(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}; needs more than 0")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ninfer_pool.testing", description=__doc__, allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="simulate")
    live = commands.add_parser("simulate", help="seeded simulation with fault injection")
    live.add_argument("--seeds", type=_least(1), default=200, help="how many (default 200)")
    live.add_argument("--first", type=_least(0), default=0, help="the first of them (default 0)")
    live.add_argument("--minutes", type=_minutes, help="stop after so long (default: never)")
    live.add_argument("--seed", type=_least(0), help="replay this one alone")
    live.add_argument("--steps", type=_least(1), default=simulation.STEPS, help="for each seed")
    live.set_defaults(run=run_simulate)
    return parser


if __name__ == "__main__":
    sys.exit(main())
