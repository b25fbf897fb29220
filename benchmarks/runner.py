"""Measure the bundled runner; write runner.json and the docs' section.

python benchmarks/runner.py [--tiny] [--model FOLDER] [--device DEVICE] [--out FOLDER]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ninfer_pool.bench.report import write_section
from ninfer_pool.bench.runner import main
from ninfer_pool.bench.serving import DEFAULT, TINY
from ninfer_pool.runner import TINY as SHIPPED


def write() -> None:
    """Run at the size asked for and write both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", dest="scale", action="store_const", const=TINY, default=DEFAULT)
    parser.add_argument("--model", type=Path, default=SHIPPED, metavar="FOLDER")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("docs"), metavar="FOLDER")
    args = parser.parse_args()
    (args.out / "measurements").mkdir(parents=True, exist_ok=True)
    report = main(
        scale=args.scale,
        folder=args.model,
        device=args.device,
        json_path=args.out / "measurements" / "runner.json",
    )
    write_section(args.out / "performance.md", "runner", report.markdown())


if __name__ == "__main__":
    write()
