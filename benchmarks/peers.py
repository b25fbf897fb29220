"""Measure the pool beside other engines' structures; write peers.json and the docs' section.

    python benchmarks/peers.py [--tiny | --large] [--out FOLDER]

`ninfer_pool.bench.peers` says how to install them; those that are absent are named in the table.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from ninfer_pool.bench.core import DEFAULT, LARGE, TINY, run
from ninfer_pool.bench.report import write_section


def main() -> None:
    """Run the cases that the peers can hold and write both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--tiny", dest="scale", action="store_const", const=TINY, default=DEFAULT)
    size.add_argument("--large", dest="scale", action="store_const", const=LARGE)
    parser.add_argument("--out", type=Path, default=Path("docs"), metavar="FOLDER")
    args = parser.parse_args()
    (args.out / "measurements").mkdir(parents=True, exist_ok=True)
    # Beyond what peers hold there is nothing to set side by side.
    scale = dataclasses.replace(args.scale, world_bytes=4 * args.scale.peer_tokens, long_tokens=())
    report = run(scale)
    print(report.text())
    report.write_json(args.out / "measurements" / "peers.json")
    write_section(args.out / "performance.md", "peers", report.side_by_side())


if __name__ == "__main__":
    main()
