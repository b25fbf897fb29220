"""Measure the tiers below the device; write tiers.json and the docs' section.

python benchmarks/tiers.py [--tiny] [--out FOLDER]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ninfer_pool.bench.report import write_section
from ninfer_pool.bench.tiers import DEFAULT, TINY, main


def write() -> None:
    """Run at the size asked for and write both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", dest="scale", action="store_const", const=TINY, default=DEFAULT)
    parser.add_argument("--out", type=Path, default=Path("docs"), metavar="FOLDER")
    args = parser.parse_args()
    (args.out / "measurements").mkdir(parents=True, exist_ok=True)
    report = main(scale=args.scale, json_path=args.out / "measurements" / "tiers.json")
    write_section(args.out / "performance.md", "tiers", report.markdown())


if __name__ == "__main__":
    write()
