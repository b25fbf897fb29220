"""Logs of chat requests in OpenAI's format, one per line, as a trace.

A line is a request with ``messages`` and optional ``tools``, or holds one under ``body`` or
``request``. Optional fields of the line:

* the time: ``t``, ``timestamp``, ``created``; numbers or ISO 8601, in order. Without any, requests
  arrive one per second;
* the client: ``session_id``, ``user``, ``prompt_cache_key``;
* the answer: ``response``, a text, a message, or the API's answer;
* its length: ``usage.completion_tokens``, else ``max_tokens``.

Rules of the conversion:

* the parent is the earlier request whose full sequence shares the longest prefix, compared
  position by position, the most recent one where several do;
* an answer that is not logged is read from the first later prompt that repeats the whole prompt
  and continues with an assistant's message. An answer with hidden reasoning is never read so.
  Until then its length is the logged one, in the log's tokens whatever positions are;
* a request without a hint of its session has that of the prompt it continues, or a new one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Final

from ninfer_pool.sim.convert.chatml import MEDIA_POSITIONS, render_prompt, render_reply
from ninfer_pool.sim.convert.counting import ByteCounter, PositionCounter, TokenCounter
from ninfer_pool.sim.convert.radix import RadixTree
from ninfer_pool.sim.jsonl import JsonFields, file_lines, read_objects
from ninfer_pool.sim.trace import Trace, TraceRequest, converted_trace

_SESSION_FIELDS: Final = ("session_id", "user", "prompt_cache_key")
_TIME_FIELDS: Final = ("t", "timestamp", "created", "created_at")
_MILLISECONDS_FROM: Final = 1e11
"""A time from here on is one in milliseconds; in seconds it would be the year 5138."""


def convert_chat(path: Path, *, tokenizer: Path | None = None) -> Trace:
    """Convert a log of chat requests; positions are `tokenizer`'s tokens, else UTF-8 bytes.

    Memory holds unique content once; time is linear in the log.

    Raises:
        TraceError: a malformed line, or a tokenizer that cannot be used.
    """
    counter: PositionCounter = ByteCounter() if tokenizer is None else TokenCounter(tokenizer)
    linker = _Linker(counter)
    for line in _lines(path):
        linker.add(line)
    return converted_trace(
        path,
        linker.requests,
        source=f"log of chat requests {path.name}",
        licence="that of the log",
        notes=f"converted from openai-jsonl; positions are {counter.label} of the prompts in "
        f"ChatML; media count {MEDIA_POSITIONS} positions each",
    )


# --- reading a line -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """One line of the log: the chat request and the optional fields of the line."""

    t: float
    request: JsonFields
    session: str | None
    kind: str
    reply: JsonFields | None
    counted: int
    """Logged length of the answer in tokens; 0 where there is none."""
    hidden: bool
    """The answer held reasoning that is not in the log."""


def _lines(path: Path) -> Iterator[_Line]:
    clock = _Clock()
    for line in read_objects(file_lines(path), origin=str(path)):
        request = _request(line)
        records = (line,) if request is line else (line, request)
        answer = _answer(line)
        reply = _reply(answer)
        counted, reasoning = _counted([*records, answer])
        shown = reply is not None and any(
            reply.values.get(name) for name in ("reasoning_content", "reasoning")
        )
        yield _Line(
            t=clock.read(line),
            request=request,
            session=_session(records),
            kind=line.text("kind", "main"),
            reply=reply,
            counted=counted,
            hidden=reasoning > 0 and not shown,
        )


def _request(line: JsonFields) -> JsonFields:
    for name in ("body", "request"):
        if "messages" not in line.values and line.has(name):
            return JsonFields(line.child(name).values, line.where)  # errors name its own fields
    return line


def _session(records: tuple[JsonFields, ...]) -> str | None:
    for record in records:
        for name in _SESSION_FIELDS:
            if record.has(name):
                value = record.get(name)
                return str(value) if type(value) is int else record.text(name)
    return None


def _answer(line: JsonFields) -> JsonFields:
    """Return the answer in a line: an API answer, a message, or nothing."""
    response = line.values.get("response")
    if response is None:
        choices = {"choices": line.values["choices"]} if line.has("choices") else {}
        return JsonFields(choices, line.where, "response.")
    if isinstance(response, str):
        return JsonFields({"role": "assistant", "content": response}, line.where, "response.")
    answer = line.child("response")
    return answer.child("body") if answer.has("body") else answer


def _reply(answer: JsonFields) -> JsonFields | None:
    if not answer.has("choices"):
        return answer if {"content", "tool_calls"} & set(answer.values) else None
    choices = answer.items("choices")
    first = answer.item("choices[0]", choices[0]) if choices else None
    return first.child("message") if first is not None and first.has("message") else None


def _counted(records: list[JsonFields]) -> tuple[int, int]:
    """Return the tokens of the answer and of its reasoning, as the log counts them."""
    for record in records:
        usage = record.child("usage") if record.has("usage") else None
        if usage is None or not usage.has("completion_tokens"):
            continue
        reasoning = 0
        if usage.has("completion_tokens_details"):
            details = usage.child("completion_tokens_details")
            if details.has("reasoning_tokens"):
                reasoning = details.whole("reasoning_tokens")
        return usage.whole("completion_tokens"), reasoning
    for record in records:
        for name in ("max_completion_tokens", "max_tokens"):
            if record.has(name):
                return record.whole(name), 0
    return 0, 0


@dataclass(slots=True)
class _Clock:
    """Turns the times of a log into seconds since its first request."""

    field: str | None = None
    first: float = 0.0
    last: float = -1.0

    def read(self, line: JsonFields) -> float:
        """Return the time of the next request, one second after the last where none is logged."""
        found = next((name for name in _TIME_FIELDS if line.has(name)), None)
        if self.last < 0:
            self.field = found
        if found != self.field:
            if self.field is None:
                wanted = "left out, as on the first line, or given on every line"
                raise line.error(str(found), line.get(str(found)), wanted)
            raise line.missing(self.field)
        if found is None:
            self.last = self.last + 1.0 if self.last >= 0 else 0.0
            return self.last
        now = _time(line, found)
        if self.last < 0:
            self.first = now
        elif now < self.first + self.last:
            wanted = "no earlier than on the line before; sort the lines by it"
            raise line.error(found, line.get(found), wanted)
        # Not below the one before by a rounding error.
        self.last = max(self.last, round(now - self.first, 6))
        return self.last


def _time(line: JsonFields, name: str) -> float:
    value = line.get(name)
    if isinstance(value, str):
        try:
            return datetime.fromisoformat(value.strip().replace("Z", "+00:00")).timestamp()
        except (ValueError, OverflowError, OSError) as error:
            wanted = "a number of seconds or a time in ISO 8601"
            raise line.error(name, value, wanted) from error
    time = line.seconds(name)
    return time / 1000 if time >= _MILLISECONDS_FROM else time


# --- linking --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Laid:
    """A prompt in positions: `replies` maps a turn point to the end of its reply."""

    units: bytes = b""
    boundaries: list[tuple[int, str]] = field(default_factory=list)
    media: list[tuple[int, int, str]] = field(default_factory=list)
    replies: dict[int, int] = field(default_factory=dict)


class _Linker:
    """Finds each prompt's parent among all earlier full sequences."""

    def __init__(self, counter: PositionCounter) -> None:
        self._counter = counter
        self._tree = RadixTree(unit=counter.unit)
        self.requests: list[TraceRequest] = []
        """All requests so far, with the answers that later prompts showed."""
        self._unread: set[int] = set()
        """Requests whose answer is not in the log, so that a later prompt may show it."""

    def add(self, line: _Line) -> None:
        """Add the next request in order of arrival."""
        laid, id = self._lay_out(line.request), len(self.requests)
        parent, shared = self._parent(laid)
        reply = b""
        if line.reply is not None and not line.hidden:
            reply = b"".join(map(self._counter.units, render_reply(line.reply)))
        self._tree.add(laid.units + reply, id)
        if not reply and not line.hidden:
            self._unread.add(id)
        self.requests.append(
            TraceRequest(
                id=id,
                t=line.t,
                session=line.session or self._session(parent, shared),
                kind=line.kind,
                parent=parent,
                shared=shared,
                input=len(laid.units) // self._counter.unit,
                output=len(reply) // self._counter.unit if reply else line.counted,
                boundaries=tuple(laid.boundaries),
                media=tuple(laid.media),
            )
        )

    def _lay_out(self, request: JsonFields) -> _Laid:
        laid, parts, at, turn = _Laid(), list[bytes](), 0, 0
        for piece in render_prompt(request):
            parts.append(self._counter.units(piece))
            begin, at = at, at + len(parts[-1]) // self._counter.unit
            if piece.media is not None:
                laid.media.append((begin, at, piece.media))
            if piece.end == "reply":
                laid.replies[turn] = at
            elif piece.end:
                laid.boundaries.append((at, piece.end))
                turn = at
        laid.units = b"".join(parts)
        return laid

    def _parent(self, laid: _Laid) -> tuple[int | None, int]:
        shared, parent = self._tree.match(laid.units)
        if parent is None:
            return None, 0
        before = self.requests[parent]
        reply_end = laid.replies.get(before.input)
        if parent in self._unread and shared == before.input and reply_end is not None:
            self._unread.remove(parent)
            self.requests[parent] = replace(before, output=reply_end - before.input)
            return parent, reply_end
        for begin, end, _ in laid.media:
            if begin < shared < end:
                shared = begin
        return (parent, shared) if shared else (None, 0)

    def _session(self, parent: int | None, shared: int) -> str:
        if parent is not None and shared >= self.requests[parent].input:
            return self.requests[parent].session
        return f"s{len(self.requests)}"
