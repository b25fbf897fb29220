"""Measure the pool next to other engines' structures, in the cases that these can hold.

python benchmarks/peers.py [--tiny | --large] [--json FILE]

`benchmarks/common/peer_trees.py` names the packages. Absent ones are listed below the table.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.core import core_parser, run


def main(argv: Sequence[str] | None = None) -> None:
    """Measure at the chosen scale, print the tables, write the JSON."""
    parser = core_parser(__doc__)
    args = parser.parse_args(argv)
    most = 4 * args.scale.peer_tokens
    with parser.checked(args):
        run(dataclasses.replace(args.scale, world_bytes=most, long_tokens=())).publish(args.json)


if __name__ == "__main__":
    main()
