"""Traces, version 1: how the prompts of one workload share prefixes, without text or token ids.

A trace is JSON Lines: one header, then one request per line in order of arrival. The *full
sequence* of a request is its prompt followed by its output. Tokens ``[0, shared)`` of a prompt
equal its parent's full sequence; everything after them is new and occurs nowhere else.

Rules of the reader:

* an unknown field is ignored (a producer may add notes) and not written back;
* a blank line inside the file and a trace without requests are errors;
* boundaries ascend, two kinds may share a position, and all are in ``[1, input]`` and outside of
  media spans; their kinds are those that a prompt may declare, `BOUNDARY_KINDS`;
* ``shared`` counts token ids alone: a media span or a salt may differ from the parent's. Such a
  trace has the same placeholders for another image, which is never a hit.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ninfer_pool.core.identity import MAX_SALT, is_text
from ninfer_pool.core.prompt import KINDS
from ninfer_pool.errors import TraceError
from ninfer_pool.sim.jsonl import JsonFields, file_lines, read_objects
from ninfer_pool.sim.options import replacing

FORMAT: Final = "ninfer-pool-trace"
VERSION: Final = 1
HEADER_TEXTS: Final = ("name", "source", "licence", "notes")
BOUNDARY_KINDS: Final = tuple(kind for kind in KINDS if kind != "frontier")
_REQUIRED: Final = ("id", "t", "session", "kind", "parent", "shared", "input", "output")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request of a trace; positions and lengths in tokens, `t` in seconds.

    `parent` is the id of an earlier request whose full sequence this prompt begins with, for
    `shared` tokens. `boundaries` are (position, kind), `media` are (begin, end, digest).
    """

    id: int
    t: float
    session: str
    kind: str
    parent: int | None
    shared: int
    input: int
    output: int
    boundaries: tuple[tuple[int, str], ...] = ()
    salt: str | None = None
    retain: bool = True
    media: tuple[tuple[int, int, str], ...] = ()

    @property
    def total(self) -> int:
        """Return the length of the full sequence, prompt and output, in tokens."""
        return self.input + self.output


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A workload: its name, its header (source, licence, notes) and its requests by arrival."""

    name: str
    header: dict[str, object] = field(default_factory=dict)
    requests: tuple[TraceRequest, ...]

    @property
    def input_tokens(self) -> int:
        """Return the prompt tokens of all requests together."""
        return sum(request.input for request in self.requests)


def read_trace(path: Path | str) -> Trace:
    """Read a trace, plain or gzip-compressed; O(size of the file).

    The name of the trace is the file's name without folder and suffix. Nothing is half-read.

    Raises:
        TraceError: the file cannot be read or breaks a rule; names file, line and field.
    """
    path = Path(path)
    return parse_trace(file_lines(path), name=trace_name(path), origin=str(path))


def parse_trace(lines: Iterable[bytes], *, name: str, origin: str) -> Trace:
    """Read a trace from the lines of a JSON Lines file; `origin` names it in errors.

    Raises:
        TraceError: as `read_trace`.
    """
    objects = read_objects(lines, origin=origin)
    header = next(objects)
    header.constants("a trace", format=FORMAT, version=VERSION)
    for text in HEADER_TEXTS:
        header.text(text, "")
    requests: list[TraceRequest] = []
    for fields in objects:
        requests.append(_request(fields, requests))
    if not requests:
        raise TraceError(f"{origin}, line 2: missing; at least one request must follow the header")
    return Trace(name=name, header=header.values, requests=tuple(requests))


def check_trace(trace: Trace) -> None:
    """Check a trace built in memory against the rules of the format.

    Raises:
        TraceError: as `read_trace` would on the file that `write_trace` makes of it.
    """
    parse_trace(io.BytesIO(_encode(trace)), name=trace.name, origin=trace.name)


def write_trace(path: Path | str, trace: Trace) -> None:
    """Write a trace atomically, compressed when the name ends in ``.gz``.

    The same trace gives the same bytes. On any error the old file, if there is one, stays.

    Raises:
        TraceError: the trace breaks a rule of the format, or the file cannot be written.
    """
    path = Path(path)
    data = _encode(trace)
    parse_trace(io.BytesIO(data), name=trace.name, origin=str(path))
    if path.suffix == ".gz":
        data = gzip.compress(data, compresslevel=9, mtime=0)
    try:
        with replacing(path) as draft:
            draft.write_bytes(data)
    except OSError as error:
        raise TraceError(f"{path}: cannot be written ({error.strerror or error})") from error


def make_header(name: str, *, source: str, licence: str, notes: str) -> dict[str, object]:
    """Return the header of a trace."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": name,
        "source": source,
        "licence": licence,
        "notes": notes,
    }


def converted_trace(
    path: Path, requests: Iterable[TraceRequest], *, source: str, licence: str, notes: str
) -> Trace:
    """Return the trace that a converter made of a file or folder, named after it."""
    name = trace_name(path)
    header = make_header(name, source=source, licence=licence, notes=notes)
    return Trace(name=name, header=header, requests=tuple(requests))


def trace_name(path: Path) -> str:
    """Return a trace's name: its file's, without folder, ``.gz`` and the suffix before it.

    Bytes that are not UTF-8 are replaced, for a plot could not show them.
    """
    name = os.fsencode(path.name or path.resolve().name).decode("utf-8", "replace")
    return Path(name.removesuffix(".gz")).stem or name


# --- the rules of one line ------------------------------------------------------------------------


def _request(fields: JsonFields, earlier: list[TraceRequest]) -> TraceRequest:
    for name in _REQUIRED:
        fields.get(name)
    length = fields.whole("input", least=1)
    parent = _parent(fields, earlier)
    media = _media(fields, length)
    return TraceRequest(
        id=_id(fields, len(earlier)),
        t=_time(fields, earlier),
        session=fields.text("session"),
        kind=fields.text("kind"),
        parent=None if parent is None else parent.id,
        shared=_shared(fields, parent, length),
        input=length,
        output=fields.whole("output"),
        boundaries=read_boundaries(fields, length, media),
        salt=_salt(fields) if fields.has("salt") else None,
        retain=fields.flag("retain", default=True),
        media=media,
    )


def _id(fields: JsonFields, expected: int) -> int:
    value = fields.get("id")
    if type(value) is not int or value != expected:
        raise fields.error("id", value, f"{expected} (ids count 0, 1, 2 ... in file order)")
    return value


def _time(fields: JsonFields, earlier: list[TraceRequest]) -> float:
    now = fields.seconds("t")
    if earlier and now < earlier[-1].t:
        raise fields.error("t", fields.get("t"), f"{earlier[-1].t} or later (time never goes back)")
    return now


def _parent(fields: JsonFields, earlier: list[TraceRequest]) -> TraceRequest | None:
    value = fields.get("parent")
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < len(earlier):
        wanted = f"null or the id of an earlier request, 0 to {len(earlier) - 1}"
        raise fields.error("parent", value, wanted if earlier else "null on the first request")
    return earlier[value]


def _shared(fields: JsonFields, parent: TraceRequest | None, length: int) -> int:
    shared = fields.whole("shared")
    if parent is None:
        if shared:
            raise fields.error("shared", shared, "0 where parent is null")
        return 0
    check_shared(fields, shared, parent)
    if shared > length:
        raise fields.error("shared", shared, f"at most {length}, the input")
    return shared


def check_shared(
    fields: JsonFields, shared: int, parent: TraceRequest, id: int | None = None
) -> None:
    """Check that a request shares no more than its parent has; ``id``: the parent's in the file."""
    if shared > parent.total:
        name = parent.id if id is None else id
        wanted = f"at most {parent.total}, the full sequence of parent {name}"
        raise fields.error("shared", shared, wanted)


def read_boundaries(
    fields: JsonFields, length: int, media: tuple[tuple[int, int, str], ...] = ()
) -> tuple[tuple[int, str], ...]:
    """Return the boundaries of a prompt of `length` tokens, checked."""
    previous = 1
    found: list[tuple[int, str]] = []
    for value, kind in fields.tuples("boundaries", 2, "[position, kind]"):
        position = fields.whole_item("boundaries", value, least=previous)
        if position > length:
            raise fields.error("boundaries", position, f"at most {length}, the input")
        if any(begin < position < end for begin, end, _ in media):
            raise fields.error("boundaries", position, "outside every media span")
        if not isinstance(kind, str) or kind not in BOUNDARY_KINDS:
            raise fields.error("boundaries", kind, "one of " + ", ".join(BOUNDARY_KINDS))
        found.append((position, kind))
        previous = position
    return tuple(found)


def _media(fields: JsonFields, length: int) -> tuple[tuple[int, int, str], ...]:
    previous = 0
    found: list[tuple[int, int, str]] = []
    for first, last, digest in fields.tuples("media", 3, "[begin, end, digest]"):
        begin = fields.whole_item("media", first)
        end = fields.whole_item("media", last, least=1)
        if begin < previous:
            wanted = f"begin at {previous} or later (spans ascend and do not overlap)"
            raise fields.error("media", begin, wanted)
        if not begin < end <= length:
            raise fields.error("media", [begin, end], f"begin < end <= {length}, the input")
        if not isinstance(digest, str) or not digest:
            raise fields.error("media", digest, "a digest, a string that is not empty")
        found.append((begin, end, digest))
        previous = end
    return tuple(found)


def _salt(fields: JsonFields) -> str:
    salt = fields.text("salt")
    if not 1 <= len(salt) <= MAX_SALT or not is_text(salt):
        raise fields.error("salt", salt, f"1 to {MAX_SALT} characters of valid Unicode")
    return salt


# --- writing --------------------------------------------------------------------------------------


def _encode(trace: Trace) -> bytes:
    header = {"format": FORMAT, "version": VERSION, **trace.header}
    records = itertools.chain([header], map(_record, trace.requests))
    return "".join(_dump(record) + "\n" for record in records).encode()


_dump: Final[Callable[[object], str]] = json.JSONEncoder(separators=(",", ":")).encode


def _record(request: TraceRequest) -> dict[str, object]:
    record: dict[str, object] = {name: getattr(request, name) for name in _REQUIRED}
    for name in ("boundaries", "salt", "media"):
        value = getattr(request, name)
        if value or value == "":
            record[name] = value
    if not request.retain:
        record["retain"] = False
    return record
