"""Simulate every shipped policy against K and against bytes on traces.

    python benchmarks/hit_rate_vs_k.py [TRACE ...] [--tiny] [--json FILE] [simulate options]

With no trace the shipped one is used. All other options are those of `ninfer-pool simulate`:
`--plot docs/hit-rate.svg` writes the figure of the README.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from ninfer_pool import cli
from ninfer_pool.core.policy import POLICIES

TINY = ("--entries", "2", "--policy", "lru,default")


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate with the sizes of the scale; return the exit code of `simulate`."""
    options = list(sys.argv[1:] if argv is None else argv)
    if options in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    tiny = "--tiny" in options
    sizes = TINY if tiny else ("--policy", ",".join(POLICIES))
    return cli.main(["simulate", *sizes, *(each for each in options if each != "--tiny")])


if __name__ == "__main__":
    raise SystemExit(main())
