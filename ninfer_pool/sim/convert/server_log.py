"""The server's own log of requests (``--request-log-jsonl``) as a trace.

The log is one JSON object per line in order of *ending*; each start of the server adds a header
that names its run. A line has a request's arrival, its longest prefix shared with an earlier one
of its run, the lengths of prompt and answer, and measurements. Measurements stay out of the trace.

Rules of the conversion:

* requests are put in order of arrival and runs in order of time; nothing is shared between runs.
  Sessions and tenants are the log's numbers, of later runs with the run's number before them;
* a request that never had a lane is left out, for it took no part in the pool. Others are absent
  because their line is (the server was killed, the disk was full). A request that shared with an
  absent one shares with that one's parent, or with another request of the same parent. It shares
  as far as both did; where there is none, nothing;
* a request that neither reads nor retains gets a salt of its own. One that does not read and yet
  retains counts as an ordinary one, for others resumed its checkpoints;
* a line that breaks off, as a server that is killed leaves it, is skipped.

The notes count each of these cases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from ninfer_pool.errors import TraceError
from ninfer_pool.sim.jsonl import JsonFields, decode, file_lines, parse_object
from ninfer_pool.sim.trace import (
    Trace,
    TraceRequest,
    check_shared,
    converted_trace,
    read_boundaries,
)

FORMAT: Final = "ninfer-pool-server-log"
VERSION: Final = 1


def convert_server_log(path: Path) -> Trace:
    """Convert a log that the server wrote; O(size of the file).

    Raises:
        TraceError: a line of another shape; the message names file, line and field.
    """
    log = _Log()
    rows = list(log.read(path))
    if not any(row.ran for row in rows):
        raise TraceError(f"{path}: holds no request that ran; at least one must")
    rows.sort(key=lambda row: (row.t, row.run, row.id))
    requests = _Linker(rows, log.notes).requests()
    return converted_trace(
        path,
        requests,
        source=f"request log of ninfer-pool serve: {path.name}",
        licence="that of the log",
        notes="; ".join(["converted from server-log", *log.remarks()]),
    )


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
    line: JsonFields
    """Names the line in errors; it has no values."""


@dataclass(slots=True)
class _Log:
    """Reads a log, and counts the cases that its trace cannot show."""

    runs: dict[str, int] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)

    def read(self, path: Path) -> Iterator[_Row]:
        """Yield the lines that are requests, in file order."""
        seen: set[tuple[int, int]] = set()
        where = str(path)
        for number, raw in enumerate(file_lines(path), start=1):
            where = f"{path}, line {number}"
            fields = self._fields(raw, where)
            if fields is None:
                continue
            if "format" in fields.values:
                self._open(fields)
                continue
            row = self._row(fields)
            if (row.run, row.id) in seen:
                raise fields.error("id", row.id, "given once in its run")
            seen.add((row.run, row.id))
            yield row
        if not self.runs:
            raise TraceError(f"{where}, field format: missing; the first line must be a header")

    def remarks(self) -> Iterator[str]:
        """Yield the notes of the trace."""
        if len(self.runs) > 1:
            yield f"{len(self.runs)} runs of the server one after the other"
        yield from (f"{count} {text}" for text, count in self.notes.items())

    def _fields(self, raw: bytes, where: str) -> JsonFields | None:
        line = raw.strip(b" \t\r\n\0")
        if not line:
            return None
        if not line.endswith(b"}") and line.startswith(b"{"):
            self.notes["lines broke off"] += 1
            return None
        return parse_object(decode(line, where=where), where=where)

    def _open(self, fields: JsonFields) -> None:
        fields.constants("a server's log", format=FORMAT, version=VERSION)
        run = fields.text("run")
        if run in self.runs:
            raise fields.error("run", run, "another than that of each header before it")
        self.runs[run] = len(self.runs)

    def _row(self, fields: JsonFields) -> _Row:
        run = fields.text("run")
        if run not in self.runs:
            raise fields.error("run", run, "one that a header before it names")
        id, length = fields.whole("id"), fields.whole("input", least=1)
        parent = _parent(fields, id) if fields.has("parent") else None
        if fields.whole("forgotten", 0):
            self.notes["requests may share more with ones that the server had forgotten"] += 1
        return _Row(
            run=self.runs[run],
            id=id,
            t=fields.seconds("t"),
            session=fields.text("session"),
            kind=fields.text("kind"),
            tenant=fields.text("tenant") if fields.has("tenant") else None,
            parent=parent,
            shared=0 if parent is None else _shared(fields, length),
            input=length,
            output=fields.whole("output"),
            boundaries=read_boundaries(fields, length),
            retain=fields.flag("retain", default=True),
            read=fields.flag("read", default=True),
            ran=fields.values.get("lane", 0) is not None,
            line=JsonFields({}, fields.where),
        )


def _parent(fields: JsonFields, id: int) -> int:
    value = fields.whole("parent")
    if value >= id:
        wanted = f"null or the id of an earlier request, below {id}"
        raise fields.error("parent", value, wanted)
    return value


def _shared(fields: JsonFields, length: int) -> int:
    value = fields.whole("shared")
    if value > length:
        raise fields.error("shared", value, f"at most {length}, the input")
    return value


class _Link(NamedTuple):
    """A request of the trace (None: none) and for how many tokens it is shared with."""

    id: int | None
    shared: int


class _Linker:
    """Renumbers requests, and finds another parent for those whose own is not in the trace."""

    def __init__(self, rows: list[_Row], notes: Counter[str]) -> None:
        self._rows = rows
        self._notes = notes
        self._made: dict[tuple[int, int], int] = {}
        self._left_out: set[tuple[int, int]] = set()
        self._heirs: dict[tuple[int, int], list[_Link]] = {}
        """For each request that is not in the trace: the links of those that share with it."""

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
            check_shared(row.line, row.shared, parent, id=row.parent)
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
