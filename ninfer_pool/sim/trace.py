"""Traces, version 1: how the prompts of one workload share prefixes, without text or token ids.

A trace is JSON Lines: one header, then one request a line in order of arrival. The *full sequence*
of a request is its prompt followed by its output. Tokens ``[0, shared)`` of a prompt equal its
parent's full sequence; everything after them is new and occurs nowhere else.

What the reader decides where the format leaves room:

* an unknown field is ignored (a producer may add notes) and not written back;
* a duplicate key, a blank line inside the file and a trace without requests are errors;
* boundaries ascend (two kinds may share a position), lie in ``[1, input]`` and not inside a media
  span; their kinds are those that a prompt may declare, `BOUNDARY_KINDS`;
* ``shared`` speaks of token ids alone. A media span or a salt that differs from the parent's is
  legal: that is how a trace says "the same placeholders, another image", which is never a hit.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ninfer_pool.core.keys import is_text
from ninfer_pool.core.namespace import MAX_SALT
from ninfer_pool.core.prompt import KINDS
from ninfer_pool.errors import TraceError
from ninfer_pool.sim.jsonl import (
    Where,
    file_lines,
    list_of,
    needed,
    parse_object,
    seconds,
    text_lines,
    text_of,
    whole,
)

FORMAT: Final = "ninfer-pool-trace"
VERSION: Final = 1
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
        """Length of the full sequence, prompt and output, in tokens."""
        return self.input + self.output


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A workload: its name, its header (source, licence, notes) and its requests by arrival."""

    name: str
    header: dict[str, object] = field(default_factory=dict)
    requests: tuple[TraceRequest, ...]

    @property
    def input_tokens(self) -> int:
        """Prompt tokens of all requests together."""
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
    texts = text_lines(lines, origin=origin)
    number, text = next(texts)
    header = _header(parse_object(text, where=Where(origin, number)), Where(origin, number))
    requests: list[TraceRequest] = []
    for number, text in texts:
        where = Where(origin, number)
        requests.append(_request(parse_object(text, where=where), requests, where))
    if not requests:
        raise TraceError(f"{origin}, line 2: missing; at least one request must follow the header")
    return Trace(name=name, header=header, requests=tuple(requests))


def check_trace(trace: Trace) -> None:
    """Hold a trace built in memory to the rules of the format.

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
    # Beside the target, so that the rename stays on one file system and is atomic.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        raise TraceError(f"{path}: cannot be written ({error.strerror or error})") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def make_header(name: str, *, source: str, licence: str, notes: str) -> dict[str, object]:
    """Make the header of a trace."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": name,
        "source": source,
        "licence": licence,
        "notes": notes,
    }


def trace_name(path: Path) -> str:
    """Name a trace after its file: without folder, ``.gz`` and the suffix before it.

    What of the name is not UTF-8 is replaced, for a plot could not show it.
    """
    name = os.fsencode(path.name or path.resolve().name).decode("utf-8", "replace")
    return Path(name.removesuffix(".gz")).stem or name


# --- the rules of one line ------------------------------------------------------------------------


def _header(header: dict[str, object], where: Where) -> dict[str, object]:
    for name, wanted in (("format", FORMAT), ("version", VERSION)):
        value = needed(header, name, where)
        if type(value) is not type(wanted) or value != wanted:
            raise where.error(name, value, f"{json.dumps(wanted)} (the header of a trace)")
    for name in ("name", "source", "licence", "notes"):
        if name in header:
            text_of(header[name], name, where)
    return header


def _request(record: dict[str, object], earlier: list[TraceRequest], where: Where) -> TraceRequest:
    for name in _REQUIRED:
        if name not in record:
            raise where.missing(name)
    length = whole(record["input"], "input", where, least=1)
    parent = _parent(record["parent"], earlier, where)
    media = _media(record.get("media", []), length, where)
    return TraceRequest(
        id=_id(record["id"], len(earlier), where),
        t=_time(record["t"], earlier, where),
        session=text_of(record["session"], "session", where),
        kind=text_of(record["kind"], "kind", where),
        parent=None if parent is None else parent.id,
        shared=_shared(record["shared"], parent, length, where),
        input=length,
        output=whole(record["output"], "output", where, least=0),
        boundaries=_boundaries(record.get("boundaries", []), length, media, where),
        salt=_salt(record.get("salt"), where),
        retain=_retain(record.get("retain", True), where),
        media=media,
    )


def _id(value: object, expected: int, where: Where) -> int:
    if type(value) is not int or value != expected:
        raise where.error("id", value, f"{expected} (ids count 0, 1, 2 ... in file order)")
    return value


def _time(value: object, earlier: list[TraceRequest], where: Where) -> float:
    now = seconds(value, "t", where)
    if earlier and now < earlier[-1].t:
        raise where.error("t", value, f"{earlier[-1].t} or later (time never goes back)")
    return now


def _parent(value: object, earlier: list[TraceRequest], where: Where) -> TraceRequest | None:
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < len(earlier):
        wanted = f"null or the id of an earlier request, 0 to {len(earlier) - 1}"
        raise where.error("parent", value, wanted if earlier else "null on the first request")
    return earlier[value]


def _shared(value: object, parent: TraceRequest | None, length: int, where: Where) -> int:
    shared = whole(value, "shared", where, least=0)
    if parent is None:
        if shared:
            raise where.error("shared", shared, "0 where parent is null")
        return 0
    if shared > parent.total:
        wanted = f"at most {parent.total}, the full sequence of parent {parent.id}"
        raise where.error("shared", shared, wanted)
    if shared > length:
        raise where.error("shared", shared, f"at most {length}, the input")
    return shared


def _boundaries(
    value: object, length: int, media: tuple[tuple[int, int, str], ...], where: Where
) -> tuple[tuple[int, str], ...]:
    previous = 0
    found: list[tuple[int, str]] = []
    for item in _items(value, "boundaries", 2, "[position, kind]", where):
        position = whole(item[0], "boundaries", where, least=1)
        kind = item[1]
        if position > length:
            raise where.error("boundaries", position, f"at most {length}, the input")
        if position < previous:
            raise where.error("boundaries", position, f"{previous} or more, as the one before it")
        if any(begin < position < end for begin, end, _ in media):
            raise where.error("boundaries", position, "outside every media span")
        if not isinstance(kind, str) or kind not in BOUNDARY_KINDS:
            raise where.error("boundaries", kind, "one of " + ", ".join(BOUNDARY_KINDS))
        found.append((position, kind))
        previous = position
    return tuple(found)


def _media(value: object, length: int, where: Where) -> tuple[tuple[int, int, str], ...]:
    previous = 0
    found: list[tuple[int, int, str]] = []
    for item in _items(value, "media", 3, "[begin, end, digest]", where):
        begin = whole(item[0], "media", where, least=0)
        end = whole(item[1], "media", where, least=1)
        digest = item[2]
        if begin < previous:
            wanted = f"begin at {previous} or later (spans ascend and do not overlap)"
            raise where.error("media", begin, wanted)
        if not begin < end <= length:
            raise where.error("media", [begin, end], f"begin < end <= {length}, the input")
        if not isinstance(digest, str) or not digest:
            raise where.error("media", digest, "a digest, a string that is not empty")
        found.append((begin, end, digest))
        previous = end
    return tuple(found)


def _items(value: object, name: str, size: int, shape: str, where: Where) -> Iterator[list[object]]:
    for item in list_of(value, name, where):
        if not isinstance(item, list) or len(item) != size:
            raise where.error(name, item, shape)
        yield item


def _salt(value: object, where: Where) -> str | None:
    if value is None:
        return None
    salt = text_of(value, "salt", where)
    if not 1 <= len(salt) <= MAX_SALT or not is_text(salt):
        raise where.error("salt", value, f"1 to {MAX_SALT} characters of valid Unicode")
    return salt


def _retain(value: object, where: Where) -> bool:
    if not isinstance(value, bool):
        raise where.error("retain", value, "true or false")
    return value


# --- writing --------------------------------------------------------------------------------------


def _encode(trace: Trace) -> bytes:
    header = {**{"format": FORMAT, "version": VERSION}, **trace.header}
    records = itertools.chain([header], map(_record, trace.requests))
    return "".join(_dump(record) + "\n" for record in records).encode()


_dump: Final[Callable[[object], str]] = json.JSONEncoder(separators=(",", ":")).encode


def _record(request: TraceRequest) -> dict[str, object]:
    record: dict[str, object] = {name: getattr(request, name) for name in _REQUIRED}
    optional: Iterable[tuple[str, object]] = (
        ("boundaries", request.boundaries),
        ("salt", request.salt),
        ("media", request.media),
    )
    record.update((name, value) for name, value in optional if value or value == "")
    if not request.retain:
        record["retain"] = False
    return record
