"""Hit rate against K and against bytes on traces; write hit_rate_vs_k.json and .md.

    python benchmarks/hit_rate_vs_k.py [TRACE ...] [--tiny] [--out FOLDER] [-- simulate options]

With no trace the shipped one is used. What follows `--` goes to `ninfer-pool simulate` as it is.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ninfer_pool import cli
from ninfer_pool.bench.report import markdown_table, write_whole

TINY = ("--entries", "2", "--policy", "lru,default")
COLUMNS = ("trace", "lanes", "policy", "entries", "budget_bytes", "hit_rate", "gap closed")
POLICIES = "default,lru,fifo,gdsf,marconi,s3fifo,return"


def main() -> int:
    """Simulate, then write the table that the docs show; the exit code of `simulate`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="*", metavar="TRACE")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("docs/measurements"), metavar="FOLDER")
    own, options = _split(sys.argv[1:])
    args = parser.parse_args(own)
    args.out.mkdir(parents=True, exist_ok=True)
    out = args.out / "hit_rate_vs_k.json"
    sizes = TINY if args.tiny else ("--policy", POLICIES)
    code = cli.main(["simulate", *args.traces, *sizes, *options, "--json", str(out)])
    if code == 0:
        runs = json.loads(out.read_text(encoding="utf-8"))["runs"]
        write_whole(out.with_suffix(".md"), table(runs))
    return code


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], argv[at + 1 :]


def table(runs: Sequence[dict[str, Any]]) -> str:
    """One line a run: its hit rate, and the share of the gap from lru to clairvoyant closed."""
    rates = {(*_size(run), run["policy"]): run["hit_rate"] for run in runs}
    lines = []
    for run in runs:
        low, high = (rates.get((*_size(run), name)) for name in ("lru", "clairvoyant"))
        lines.append([*(_cell(run[name]) for name in COLUMNS[:-1]), _gap(run, low, high)])
    return "\n".join([*markdown_table(COLUMNS, lines), ""])


def _size(run: dict[str, Any]) -> tuple[object, ...]:
    return run["trace"], run["lanes"], run["entries"], run["budget_bytes"]


def _gap(run: dict[str, Any], low: float | None, high: float | None) -> str:
    if low is None or high is None or high <= low:
        return ""
    return f"{(run['hit_rate'] - low) / (high - low):.0%}"


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    raise SystemExit(main())
