"""`python -m ninfer_pool` is the console command `ninfer-pool`."""

from __future__ import annotations

import sys

from ninfer_pool.cli import main

if __name__ == "__main__":
    sys.exit(main())
