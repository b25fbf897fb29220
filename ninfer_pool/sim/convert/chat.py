"""Logs of chat requests in OpenAI's format, one a line, as a trace.

A line is a request with ``messages`` and optional ``tools``, or holds one under ``body`` or
``request``. Beside it the line may say when (``t``, ``timestamp``, ``created``; numbers or ISO
8601; in order; without any, requests come one a second), who (``session_id``, ``user``,
``prompt_cache_key``), what was answered (``response``: a text, a message, or the API's answer) and
how long that was (``usage.completion_tokens``, else ``max_tokens``).

What is inferred:

* the parent is the earlier request whose full sequence shares the longest prefix, compared
  position by position, the most recent one where several do;
* an answer that is not logged is read from the first later prompt that repeats the whole prompt and
  goes on with an assistant's message, unless the log says that it held hidden reasoning. Until
  then its length is what the log counts, in the log's tokens whatever positions are;
* a request without a hint of its session has that of the prompt it goes on from, or a new one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final

from ninfer_pool.sim.convert.chatml import MEDIA_POSITIONS, render_prompt, render_reply
from ninfer_pool.sim.convert.counting import ByteCounter, Counter, TokenCounter
from ninfer_pool.sim.convert.radix import RadixTree
from ninfer_pool.sim.jsonl import (
    Where,
    file_lines,
    list_of,
    object_of,
    parse_object,
    seconds,
    text_lines,
    text_of,
    whole,
)
from ninfer_pool.sim.trace import Trace, TraceRequest, make_header, trace_name

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
    counter: Counter = ByteCounter() if tokenizer is None else TokenCounter(tokenizer)
    linker = _Linker(counter)
    for line in _lines(path):
        linker.add(line)
    name = trace_name(path)
    header = make_header(
        name,
        source=f"log of chat requests {path.name}",
        licence="that of the log",
        notes=f"converted from openai-jsonl; positions are {counter.label} of the prompts in "
        f"ChatML; media count {MEDIA_POSITIONS} positions each",
    )
    return Trace(name=name, header=header, requests=linker.requests())


# --- reading a line -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """One line of the log: the chat request and what is logged beside it."""

    where: Where
    t: float
    request: dict[str, object]
    session: str | None
    kind: str
    reply: dict[str, object] | None
    counted: int
    """Length of the answer as logged, in tokens; 0 where the log does not say."""
    hidden: bool
    """The answer held reasoning that the log does not show."""


def _lines(path: Path) -> Iterator[_Line]:
    clock = _Clock()
    for number, text in text_lines(file_lines(path), origin=str(path)):
        where = Where(str(path), number)
        record = parse_object(text, where=where)
        request = _request(record, where)
        records = (record,) if request is record else (record, request)
        answer = _answer(record, where)
        reply = _reply(answer, where)
        counted, reasoning = _counted([*records, answer], where)
        shown = reply is not None and any(reply.get(f) for f in ("reasoning_content", "reasoning"))
        yield _Line(
            where=where,
            t=clock.read(record, where),
            request=request,
            session=_session(records, where),
            kind=text_of(record.get("kind", "main"), "kind", where),
            reply=reply,
            counted=counted,
            hidden=reasoning > 0 and not shown,
        )


def _request(record: dict[str, object], where: Where) -> dict[str, object]:
    for name in ("body", "request"):
        if "messages" not in record and record.get(name) is not None:
            return object_of(record[name], name, where)
    return record


def _session(records: tuple[dict[str, object], ...], where: Where) -> str | None:
    for record in records:
        for name in _SESSION_FIELDS:
            value = record.get(name)
            if value is not None:
                return str(value) if type(value) is int else text_of(value, name, where)
    return None


def _answer(record: dict[str, object], where: Where) -> dict[str, object]:
    """What the line holds of the answer: an API answer, a message, or nothing."""
    response = record.get("response")
    if response is None:
        return {"choices": record["choices"]} if record.get("choices") is not None else {}
    if isinstance(response, str):
        return {"role": "assistant", "content": response}
    answer = object_of(response, "response", where)
    inner = answer.get("body")
    return answer if inner is None else object_of(inner, "response.body", where)


def _reply(answer: dict[str, object], where: Where) -> dict[str, object] | None:
    choices = answer.get("choices")
    if choices is None:
        return answer if "content" in answer or "tool_calls" in answer else None
    items = list_of(choices, "response.choices", where)
    if not items:
        return None
    message = object_of(items[0], "response.choices[0]", where).get("message")
    name = "response.choices[0].message"
    return None if message is None else object_of(message, name, where)


def _counted(records: list[dict[str, object]], where: Where) -> tuple[int, int]:
    """Tokens of the answer and of its reasoning, as the log counts them."""
    for record in records:
        if record.get("usage") is None:
            continue
        usage = object_of(record["usage"], "usage", where)
        if usage.get("completion_tokens") is None:
            continue
        name = "usage.completion_tokens"
        details = usage.get("completion_tokens_details")
        held = object_of(details, f"{name}_details", where) if details is not None else {}
        reasoning = held.get("reasoning_tokens") or 0
        return (
            whole(usage["completion_tokens"], name, where, least=0),
            whole(reasoning, f"{name}_details.reasoning_tokens", where, least=0),
        )
    for record in records:
        for name in ("max_completion_tokens", "max_tokens"):
            if record.get(name) is not None:
                return whole(record[name], name, where, least=0), 0
    return 0, 0


@dataclass(slots=True)
class _Clock:
    """Turns the times of a log into seconds since its first request."""

    field: str | None = None
    first: float = 0.0
    last: float = -1.0

    def read(self, record: dict[str, object], where: Where) -> float:
        """Time of the next request; without any in the log, one second after the one before."""
        found = next((name for name in _TIME_FIELDS if record.get(name) is not None), None)
        if self.last < 0:
            self.field = found
        if found != self.field:
            if self.field is None:
                wanted = "left out, as on the first line, or given on every line"
                raise where.error(str(found), record[str(found)], wanted)
            raise where.missing(self.field)
        if found is None:
            self.last = self.last + 1.0 if self.last >= 0 else 0.0
            return self.last
        now = _time(record[found], found, where)
        if self.last < 0:
            self.first = now
        elif now < self.first + self.last:
            wanted = "no earlier than on the line before; sort the lines by it"
            raise where.error(found, record[found], wanted)
        # Not below the one before by a rounding error.
        self.last = max(self.last, round(now - self.first, 6))
        return self.last


def _time(value: object, name: str, where: Where) -> float:
    if isinstance(value, str):
        try:
            return datetime.fromisoformat(value.strip().replace("Z", "+00:00")).timestamp()
        except (ValueError, OverflowError, OSError) as error:
            wanted = "a number of seconds or a time in ISO 8601"
            raise where.error(name, value, wanted) from error
    time = seconds(value, name, where)
    return time / 1000 if time >= _MILLISECONDS_FROM else time


# --- linking --------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Draft:
    """A request whose answer a later prompt may still tell."""

    t: float
    session: str
    kind: str
    parent: int | None
    shared: int
    input: int
    output: int
    untold: bool
    """The answer is not in the log and may be read from a later prompt."""
    boundaries: list[tuple[int, str]]
    media: list[tuple[int, int, str]]


@dataclass(slots=True)
class _Laid:
    """A prompt laid out in positions: `replies` maps a turn point to the end of its reply."""

    units: bytes = b""
    boundaries: list[tuple[int, str]] = field(default_factory=list)
    media: list[tuple[int, int, str]] = field(default_factory=list)
    replies: dict[int, int] = field(default_factory=dict)


class _Linker:
    """Finds each prompt's parent among all earlier full sequences."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._tree = RadixTree(unit=counter.unit)
        self._drafts: list[_Draft] = []

    def add(self, line: _Line) -> None:
        """Take the next request in order of arrival."""
        laid = self._lay(line)
        length = len(laid.units) // self._counter.unit
        parent, shared = self._parent(laid)
        told = b"" if line.reply is None or line.hidden else self._reply(line.reply, line.where)
        output = len(told) // self._counter.unit if told else line.counted
        id = len(self._drafts)
        self._tree.add(laid.units + told, id)
        self._drafts.append(
            _Draft(
                t=line.t,
                session=line.session or self._session(parent, shared),
                kind=line.kind,
                parent=parent,
                shared=shared,
                input=length,
                output=output,
                untold=not told and not line.hidden,
                boundaries=laid.boundaries,
                media=laid.media,
            )
        )

    def requests(self) -> tuple[TraceRequest, ...]:
        """All requests, with what later prompts told of earlier answers."""
        return tuple(
            TraceRequest(
                id=id,
                t=draft.t,
                session=draft.session,
                kind=draft.kind,
                parent=draft.parent,
                shared=draft.shared,
                input=draft.input,
                output=draft.output,
                boundaries=tuple(draft.boundaries),
                media=tuple(draft.media),
            )
            for id, draft in enumerate(self._drafts)
        )

    def _lay(self, line: _Line) -> _Laid:
        laid, parts, at, turn = _Laid(), list[bytes](), 0, 0
        for segment in render_prompt(line.request, line.where):
            parts.append(self._counter.units(segment))
            begin, at = at, at + len(parts[-1]) // self._counter.unit
            if segment.media is not None:
                laid.media.append((begin, at, segment.media))
            if segment.mark == "reply":
                laid.replies[turn] = at
            elif segment.mark:
                laid.boundaries.append((at, segment.mark))
                turn = at
        laid.units = b"".join(parts)
        return laid

    def _reply(self, message: dict[str, object], where: Where) -> bytes:
        return b"".join(map(self._counter.units, render_reply(message, "response", where)))

    def _parent(self, laid: _Laid) -> tuple[int | None, int]:
        shared, parent = self._tree.match(laid.units)
        if parent is None:
            return None, 0
        before = self._drafts[parent]
        reply_end = laid.replies.get(before.input)
        if before.untold and shared == before.input and reply_end is not None:
            before.untold = False
            before.output = reply_end - before.input
            return parent, reply_end
        for begin, end, _ in laid.media:
            if begin < shared < end:
                shared = begin
        return (parent, shared) if shared else (None, 0)

    def _session(self, parent: int | None, shared: int) -> str:
        if parent is not None and shared >= self._drafts[parent].input:
            return self._drafts[parent].session
        return f"s{len(self._drafts)}"
