"""Measure the pool's own operations; write core.json and the docs' section.

python benchmarks/core.py [--tiny | --large] [--out FOLDER]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ninfer_pool.bench.core import DEFAULT, LARGE, TINY, run
from ninfer_pool.bench.report import write_section


def main() -> None:
    """Run at the size asked for and write both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--tiny", dest="scale", action="store_const", const=TINY, default=DEFAULT)
    size.add_argument("--large", dest="scale", action="store_const", const=LARGE)
    parser.add_argument("--out", type=Path, default=Path("docs"), metavar="FOLDER")
    args = parser.parse_args()
    (args.out / "measurements").mkdir(parents=True, exist_ok=True)
    report = run(args.scale, with_peers=False)
    print(report.text())
    report.write_json(args.out / "measurements" / "core.json")
    write_section(args.out / "performance.md", "core", report.markdown())


if __name__ == "__main__":
    main()
