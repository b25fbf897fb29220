"""Measure `benchmarks/core.py` of two checkouts in turn; print the ratio of each row's times.

python benchmarks/compare.py OLD NEW [--runs N] [--at-most RATIO] [--json FILE]

The order turns round with every run. A row's ratio is the median over the runs of new over old,
so that a busy minute of the machine counts once. Exits with 1 where a ratio is above --at-most.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean, median

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common.command import BenchmarkParser, progress
from benchmarks.common.report import aligned, number, write_whole

CASE = ("op", "probe", "shape", "tokens", "entries")
Case = tuple[str, ...]
Times = Mapping[Case, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Compare two checkouts; return 1 where a row of NEW is slower than allowed."""
    parser = BenchmarkParser(__doc__)
    parser.add_argument("old", type=Path, metavar="OLD")
    parser.add_argument("new", type=Path, metavar="NEW")
    parser.add_argument("--runs", type=int, default=5, metavar="N")
    parser.add_argument("--at-most", type=float, default=1.05, metavar="RATIO")
    args = parser.parse_args(argv)
    pairs = []
    with parser.checked(args):
        for number_of_run in range(args.runs):
            sides = [args.old, args.new][:: 1 if number_of_run % 2 else -1]
            times = {}
            for side in sides:
                progress(f"run {number_of_run + 1} of {args.runs}: {side}")
                times[side] = measured(side)
            pairs.append((times[args.old], times[args.new]))
        progress("")
        ratios = ratios_of(pairs)
        print(report(ratios, pairs, at_most=args.at_most))
        if args.json is not None:
            rows = [
                {**dict(zip(CASE, case, strict=True)), "ratio": ratios[case]} for case in ratios
            ]
            write_whole(args.json, json.dumps({"version": 1, "results": rows}, indent=1) + "\n")
    return int(any(ratio > args.at_most for ratio in ratios.values()))


def measured(checkout: Path) -> Times:
    """Run the benchmark of a checkout; return the median of each row in microseconds."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "core.json"
        command = [sys.executable, "-m", "ninfer_pool", "bench", "core", "--json", str(out)]
        environment = {**os.environ, "PYTHONPATH": str(checkout.resolve())}
        subprocess.run(
            command, check=True, cwd=checkout, env=environment, stdout=subprocess.DEVNULL
        )
        rows = json.loads(out.read_text(encoding="utf-8"))["results"]
    return {tuple(str(row[field]) for field in CASE): row["us"]["median"] for row in rows}


def ratios_of(pairs: Sequence[tuple[Times, Times]]) -> dict[Case, float]:
    """Return the median over the runs of new over old, for each row that both have."""
    cases = [case for case in pairs[0][0] if all(case in new for _, new in pairs)]
    return {case: median(new[case] / old[case] for old, new in pairs) for case in cases}


def report(
    ratios: Mapping[Case, float], pairs: Sequence[tuple[Times, Times]], *, at_most: float
) -> str:
    """Return the table of rows, then the middle per operation, then the rows above the limit."""
    rows = [
        (
            *case,
            *(number(median(pair[side][case] for pair in pairs)) for side in (0, 1)),
            f"{ratio:.3f}",
        )
        for case, ratio in ratios.items()
    ]
    groups: dict[str, list[float]] = defaultdict(list)
    for case, ratio in ratios.items():
        groups[case[0]].append(ratio)
    lines = aligned([(*CASE, "old µs", "new µs", "new / old"), *rows])
    for op, found in groups.items():
        middle = f"median {median(found):.3f}, geometric mean {geometric_mean(found):.3f}"
        above = sum(ratio > at_most for ratio in found)
        lines.append(f"{op}: {middle}, {above} of {len(found)} rows above {at_most:g}")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
