"""What `ninfer-pool bench core` writes: JSON, a table for a terminal, tables for the docs."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ninfer_pool.bench.timing import Row

CAVEAT = (
    "One machine, one process, the garbage collector off; each prompt is built before it is timed, "
    "and up to 64 conversations are asked in turn. lookup asks with the same Prompt again while "
    "the pool stays as it is, as a scheduler does for what waits; first_lookup, like the peers' "
    "lookups, with a new one. commit is acquire and commit, without the engine's calls between. "
    "What carries over to another machine is the "
    "ratio to the floor, one xxh3-128 pass over the prompt's bytes plus one comparison of the "
    "matched bytes, which is measured between the calls of the same run."
)
HEAD = ("op", "probe", "shape", "tokens", "entries", "median µs", "p90 µs", "floor µs", "ratio")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Rows of the pool and of its peers; `missing` says (peer, reason) for those not here."""

    results: Sequence[Row]
    peers: Sequence[Row]
    missing: Sequence[tuple[str, str]]
    bytes_per_token: float

    def to_json(self) -> dict[str, object]:
        """The contract of ``--json``, version 1."""
        return {
            "version": 1,
            "results": [row.to_json() for row in self.results],
            "peers": [row.to_json() for row in self.peers],
            "bytes_per_token": self.bytes_per_token,
        }

    def write_json(self, path: Path) -> None:
        """Write the whole file or nothing."""
        write_whole(path, json.dumps(self.to_json(), indent=1) + "\n")

    def text(self) -> str:
        """The table as a person reads it in a terminal, what it does not say first."""
        lines = [CAVEAT, "", *aligned([HEAD, *map(_cells, self.results)])]
        for name in dict.fromkeys(row.peer for row in self.peers):
            mine = [_cells(row) for row in self.peers if row.peer == name]
            lines += ["", name, *aligned([HEAD, *mine])]
        lines += ["", *(f"not measured: {name} ({why})" for name, why in self.missing)]
        lines.append(f"bookkeeping: {self.bytes_per_token:.2f} bytes a retained token")
        return "\n".join(lines)

    def markdown(self) -> str:
        """The pool's rows as a table of the docs."""
        rows = [_cells(row) for row in self.results]
        memory = f"Bookkeeping: {self.bytes_per_token:.2f} bytes for each retained token."
        return "\n".join([CAVEAT, "", *markdown_table(HEAD, rows), "", memory, ""])

    def side_by_side(self) -> str:
        """Medians of the pool and its peers in one docs table, a line for each case they share."""
        names = list(dict.fromkeys(row.peer for row in self.peers))
        medians = {(*_case(row), row.peer): row.us.median for row in self.peers}
        lines = []
        for row in self.results:
            beside = [medians.get((*_case(row), name)) for name in names]
            if any(median is not None for median in beside):
                cells = [*_cells(row)[:5], _number(row.floor_us), _number(row.us.median)]
                lines.append([*cells, *("" if each is None else _number(each) for each in beside)])
        head = [*HEAD[:5], "floor µs", "ninfer-pool µs", *(f"{name} µs" for name in names)]
        absent = [f"Not measured: {name} ({why})." for name, why in self.missing]
        return "\n".join([CAVEAT, "", *markdown_table(head, lines), "", *absent, ""])


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def write_whole(path: Path, text: str) -> None:
    """Write beside the file and rename, so that no reader finds half of it."""
    if path.exists() and not path.is_file():  # /dev/stdout or a pipe is written to, not replaced
        path.write_text(text, encoding="utf-8")
        return
    draft = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def write_section(page: Path, name: str, text: str) -> None:
    """Put text between the marks ``<!-- name -->`` and ``<!-- /name -->`` of a page, new or old.

    Raises:
        ValueError: the page has no such marks; nothing was written.
    """
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    whole = page.read_text(encoding="utf-8") if page.exists() else f"{begin}{end}\n"
    head, found, rest = whole.partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{page}: no section {name}; needs {begin.strip()} and {end}")
    write_whole(page, f"{head}{begin}\n{text.strip()}\n\n{end}{tail}")


def _case(row: Row) -> tuple[str, str, str, int, int]:
    return row.op, row.probe, row.shape, row.tokens, row.entries


def _cells(row: Row) -> tuple[str, ...]:
    numbers = (row.us.median, row.us.p90, row.floor_us)
    sizes = (f"{row.tokens:,}", f"{row.entries:,}")
    return (row.op, row.probe, row.shape, *sizes, *map(_number, numbers), f"{row.ratio:.2f}")


def _number(value: float) -> str:
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Text columns to the left, the numbers after the third to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if at < 3 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
