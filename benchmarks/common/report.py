"""Reports of the benchmarks: the JSON of ``--json`` and the table for a terminal."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.timing import Row

CAVEAT = (
    "One machine, one process, the garbage collector off; each prompt is built before it is timed, "
    "and up to 64 conversations are looked up in turn. lookup repeats the same Prompt while the "
    "pool stays as it is, as a scheduler does for a waiting request; first_lookup, like the peers' "
    "lookups, takes a new one. commit is acquire and commit, without the engine's calls between. "
    "The ratio to the floor carries over to another machine: one xxh3-128 pass over the prompt's "
    "bytes plus one comparison of the matched bytes, measured between the calls of the same run."
)
HEAD = ("op", "probe", "shape", "tokens", "entries", "median µs", "p90 µs", "floor µs", "ratio")


class BenchmarkReport(ABC):
    """The result of one run of a benchmark."""

    @abstractmethod
    def to_json(self) -> Mapping[str, object]:
        """Return the contract of ``--json``, version 1."""

    @abstractmethod
    def text(self) -> str:
        """Return the table for a terminal, its caveat first."""

    def publish(self, path: Path | None) -> None:
        """Print the table; write the JSON where a path is given."""
        print(self.text())
        if path is not None:
            self.write_json(path)

    def write_json(self, path: Path) -> None:
        """Write the whole file or nothing."""
        write_whole(path, json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreReport(BenchmarkReport):
    """Rows of the pool and of its peers; `missing` lists absent peers as (name, reason)."""

    results: Sequence[Row]
    peers: Sequence[Row]
    missing: Sequence[tuple[str, str]]
    bytes_per_token: float

    def to_json(self) -> dict[str, object]:
        """Return the contract of ``--json``, version 1."""
        return {
            "version": 1,
            "results": [row.to_json() for row in self.results],
            "peers": [row.to_json() for row in self.peers],
            "bytes_per_token": self.bytes_per_token,
        }

    def text(self) -> str:
        """Return a table of the pool and one per peer."""
        lines = [CAVEAT, "", *aligned([HEAD, *map(_cells, self.results)])]
        for name in dict.fromkeys(row.peer for row in self.peers):
            rows = [_cells(row) for row in self.peers if row.peer == name]
            lines += ["", name, *aligned([HEAD, *rows])]
        lines += ["", *(f"not measured: {name} ({why})" for name, why in self.missing)]
        lines.append(f"bookkeeping: {self.bytes_per_token:.2f} bytes per retained token")
        return "\n".join(lines)


def write_whole(path: Path, text: str) -> None:
    """Write a draft next to the file and rename it, so that no reader finds half of it."""
    if path.exists() and not path.is_file():  # /dev/stdout or a pipe is written to, not replaced
        path.write_text(text, encoding="utf-8")
        return
    draft = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def number(value: float) -> str:
    """Format microseconds: one decimal below 100."""
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align text columns to the left, the numbers after the third to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if at < 3 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _cells(row: Row) -> tuple[str, ...]:
    times = map(number, (row.us.median, row.us.p90, row.floor_us))
    sizes = (f"{row.tokens:,}", f"{row.entries:,}")
    return (row.op, row.probe, row.shape, *sizes, *times, f"{row.ratio:.2f}")
