"""The server's own log of requests (``--request-log-jsonl``) as a trace.

The log is one JSON object a line in order of *ending*; each start of the server adds a header that
names its run. A line says when its request arrived, what it shares with which earlier one of its
run, how long prompt and answer were, and what was measured; that last part stays out of the trace.

What is inferred:

* requests are put in order of arrival and runs in order of time; nothing is shared between runs.
  Sessions and tenants are the log's numbers, of later runs with the run's number before them;
* a request that never had a lane took no part in the pool and is left out. One whose line is not
  there (the server was killed, the disk was full) cannot be told. What shared with either shares
  now with what that one shared with, or with another that shared with it, as far as both did;
  where there is none, with nothing;
* a request that would neither read nor leave anything gets a salt of its own. One that would not
  read and yet left something is taken as an ordinary one, for others resumed what it left;
* a line that breaks off, as a server that is killed leaves it, is skipped.

The notes say how many there were of each.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from ninfer_pool.errors import TraceError
from ninfer_pool.sim.jsonl import (
    Where,
    file_lines,
    list_of,
    needed,
    parse_object,
    seconds,
    text_of,
    whole,
)
from ninfer_pool.sim.trace import BOUNDARY_KINDS, Trace, TraceRequest, make_header, trace_name

FORMAT: Final = "ninfer-pool-server-log"
VERSION: Final = 1


def convert_server_log(path: Path) -> Trace:
    """Convert a log that the server wrote; O(size of the file).

    Raises:
        TraceError: a line that is no line of such a log; names file, line and field.
    """
    log = _Log()
    rows = list(log.read(path))
    if not any(row.ran for row in rows):
        raise TraceError(f"{path}: holds no request that ran; at least one must")
    rows.sort(key=lambda row: (row.t, row.run, row.id))
    requests = _Linker(rows, log.notes).requests()
    name = trace_name(path)
    header = make_header(
        name,
        source=f"request log of ninfer-pool serve: {path.name}",
        licence="that of the log",
        notes="; ".join(["converted from server-log", *log.told()]),
    )
    return Trace(name=name, header=header, requests=requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A line of the log; `run` counts the log's runs from 0."""

    run: int
    id: int
    t: float
    session: str
    kind: str
    tenant: str | None
    parent: int | None
    shared: int
    input: int
    output: int
    boundaries: tuple[tuple[int, str], ...]
    retain: bool
    read: bool
    ran: bool
    where: Where


@dataclass(slots=True)
class _Log:
    """Reads a log, and counts what its trace cannot tell."""

    runs: dict[str, int] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)

    def read(self, path: Path) -> Iterator[_Row]:
        """Yield the lines that are requests, in file order."""
        seen: set[tuple[int, int]] = set()
        where = Where(str(path))
        for number, raw in enumerate(file_lines(path), start=1):
            where = Where(str(path), number)
            record = self._record(raw, where)
            if record is None:
                continue
            if "format" in record:
                self._open(record, where)
                continue
            row = self._row(record, where)
            if (row.run, row.id) in seen:
                raise where.error("id", row.id, "given once in its run")
            seen.add((row.run, row.id))
            yield row
        if not self.runs:
            raise TraceError(f"{where}, field format: missing; the first line must be a header")

    def told(self) -> Iterator[str]:
        """Yield what a reader of the trace should know."""
        if len(self.runs) > 1:
            yield f"{len(self.runs)} runs of the server one after the other"
        yield from (f"{count} {text}" for text, count in self.notes.items())

    def _record(self, raw: bytes, where: Where) -> dict[str, object] | None:
        line = raw.strip(b" \t\r\n\0")
        if not line:
            return None
        if not line.endswith(b"}") and line.startswith(b"{"):
            self.notes["lines broke off"] += 1
            return None
        return parse_object(_text(line, where), where=where)

    def _open(self, record: dict[str, object], where: Where) -> None:
        for name, wanted in (("format", FORMAT), ("version", VERSION)):
            value = needed(record, name, where)
            if type(value) is not type(wanted) or value != wanted:
                raise where.error(
                    name, value, f"{json.dumps(wanted)} (the header of a server's log)"
                )
        run = text_of(needed(record, "run", where), "run", where)
        if run in self.runs:
            raise where.error("run", run, "another than that of each header before it")
        self.runs[run] = len(self.runs)

    def _row(self, record: dict[str, object], where: Where) -> _Row:
        run = text_of(needed(record, "run", where), "run", where)
        if run not in self.runs:
            raise where.error("run", run, "one that a header before it names")

        def count(name: str, least: int = 0) -> int:
            return whole(needed(record, name, where), name, where, least=least)

        tenant, parent = record.get("tenant"), record.get("parent")
        number, length = self.runs[run], count("input", 1)
        if whole(record.get("forgotten", 0), "forgotten", where, least=0):
            self.notes["requests may share more with ones that the server had forgotten"] += 1
        return _Row(
            run=number,
            id=count("id"),
            t=seconds(needed(record, "t", where), "t", where),
            session=text_of(needed(record, "session", where), "session", where),
            kind=text_of(needed(record, "kind", where), "kind", where),
            tenant=None if tenant is None else text_of(tenant, "tenant", where),
            parent=None if parent is None else _parent(parent, count("id"), where),
            shared=0 if parent is None else _shared(count("shared"), length, where),
            input=length,
            output=count("output"),
            boundaries=_boundaries(record.get("boundaries", []), length, where),
            retain=_flag(record, "retain", where),
            read=_flag(record, "read", where),
            ran=record.get("lane", 0) is not None,
            where=where,
        )


def _text(line: bytes, where: Where) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise TraceError(f"{where}: not UTF-8 text; must be JSON Lines") from error


def _parent(value: object, id: int, where: Where) -> int:
    if type(value) is not int or not 0 <= value < id:
        raise where.error("parent", value, f"null or the id of an earlier request, below {id}")
    return value


def _shared(value: int, length: int, where: Where) -> int:
    if value > length:
        raise where.error("shared", value, f"at most {length}, the input")
    return value


def _flag(record: dict[str, object], name: str, where: Where) -> bool:
    value = record.get(name, True)
    if not isinstance(value, bool):
        raise where.error(name, value, "true or false")
    return value


def _boundaries(value: object, length: int, where: Where) -> tuple[tuple[int, str], ...]:
    found: list[tuple[int, str]] = []
    least = 1
    for item in list_of(value, "boundaries", where):
        pair = list_of(item, "boundaries", where)
        if len(pair) != 2:
            raise where.error("boundaries", item, "[position, kind]")
        least = whole(pair[0], "boundaries", where, least=least)
        if least > length:
            raise where.error("boundaries", least, f"at most {length}, the input")
        kind = text_of(pair[1], "boundaries", where)
        if kind not in BOUNDARY_KINDS:
            raise where.error("boundaries", kind, "one of " + ", ".join(BOUNDARY_KINDS))
        found.append((least, kind))
    return tuple(found)


class _Link(NamedTuple):
    """A request of the trace (None: none) and for how many tokens it is shared with."""

    id: int | None
    shared: int


class _Linker:
    """Renumbers requests, and finds another parent where one's own is not in the trace."""

    def __init__(self, rows: list[_Row], notes: Counter[str]) -> None:
        self._rows = rows
        self._notes = notes
        self._made: dict[tuple[int, int], int] = {}
        self._left_out: set[tuple[int, int]] = set()
        self._heirs: dict[tuple[int, int], list[_Link]] = {}
        """For each request that is not in the trace: those that share with it, from below."""

    def requests(self) -> tuple[TraceRequest, ...]:
        """Return the requests of the trace."""
        made: list[TraceRequest] = []
        start = self._rows[0].t
        for row in self._rows:
            link = self._link(row, made)
            if not row.ran:
                self._notes["requests left out that never had a lane"] += 1
                self._left_out.add((row.run, row.id))
                self._heirs[row.run, row.id] = [link]
                continue
            if row.parent is not None and (row.run, row.parent) not in self._made:
                self._heirs.setdefault((row.run, row.parent), []).append(
                    _Link(len(made), row.shared)
                )
            self._made[row.run, row.id] = len(made)
            made.append(self._request(row, link, len(made), start))
        return tuple(made)

    def _link(self, row: _Row, made: list[TraceRequest]) -> _Link:
        """Return the parent in the trace that shares most with a request, the newest of several."""
        if row.parent is None:
            return _Link(None, 0)
        key = (row.run, row.parent)
        if key in self._made:
            parent = made[self._made[key]]
            if row.shared > parent.total:
                wanted = f"at most {parent.total}, the full sequence of parent {row.parent}"
                raise row.where.error("shared", row.shared, wanted)
            return _Link(parent.id, row.shared)
        if key not in self._left_out:
            self._notes["requests shared with one whose line is missing"] += 1
        links = [_Link(id, min(shared, row.shared)) for id, shared in self._heirs.get(key, ())]
        return max(links, key=lambda link: (link.shared, link.id or 0), default=_Link(None, 0))

    def _request(self, row: _Row, link: _Link, id: int, start: float) -> TraceRequest:
        salt = None if row.tenant is None else _named(row.tenant, row.run)
        if not row.read:
            if row.retain:
                self._notes["requests taken as reading though they did not"] += 1
            else:
                salt = f"alone {id}"
        return TraceRequest(
            id=id,
            t=round(row.t - start, 6),
            session=_named(row.session, row.run),
            kind=row.kind,
            parent=link.id if link.shared else None,
            shared=link.shared,
            input=row.input,
            output=row.output,
            boundaries=row.boundaries,
            salt=salt,
            retain=row.retain,
        )


def _named(tag: str, run: int) -> str:
    return tag if run == 0 else f"{run + 1}.{tag}"
