"""The command line of a benchmark: ``--json FILE``, its own options, errors of one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from ninfer_pool.errors import PoolError
from ninfer_pool.sim.options import check_outputs


class BenchmarkParser(argparse.ArgumentParser):
    """Options of one benchmark; its description is the first line of the module's docstring."""

    def __init__(self, description: str | None) -> None:
        super().__init__(description=(description or "").partition("\n")[0], allow_abbrev=False)
        self.add_argument("--json", type=Path, metavar="FILE", help="write the rows to a file, too")

    def add_tiny(self, *, tiny: object, default: object) -> None:
        """Add ``--tiny``: few and small cases; the value is ``args.scale``."""
        self.add_argument(
            "--tiny",
            dest="scale",
            action="store_const",
            const=tiny,
            default=default,
            help="few and small cases, in seconds",
        )

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and one line on standard error."""
        self.exit(2, f"{self.prog}: error: {message.removeprefix('argument ')}\n")

    @contextmanager
    def checked(self, args: argparse.Namespace) -> Iterator[None]:
        """Report a caller's mistake inside the block as one line, an output path first of all."""
        try:
            check_outputs({"--json": args.json})
            yield
        except PoolError as error:
            self.error(str(error))


def progress(text: str) -> None:
    """Show the step that runs now, on a terminal; an empty text clears the line."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
