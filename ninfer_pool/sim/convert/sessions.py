"""Sessions of kv-cache-tester: JSON files of coding agents, content removed, as ids of blocks.

A file lists the requests of one session with nested sub-agents; ids cover the whole blocks of each
prompt. What is inferred:

* sessions start together at 0 s, each on its own clock; a sub-agent's times count from its start;
* the parent is the earlier request with the longest common list of leading blocks. Ids are compared
  within a file, or between all files where each says ``"hash_id_scope": "global"``;
* a prompt that has all whole blocks of an earlier one goes on from it: the tail of less than a
  block is taken as kept, and so is the answer. The answer is *not* kept (the two part at the
  earlier prompt's end) when it ended the turn and held reasoning, which clients strip then; when
  the later prompt is too short to hold it and anything new; or when another prompt went on from
  the same one before, with other blocks;
* otherwise the two part where their blocks do;
* tools and system prompt, stated in tokens, give the ``system`` boundary. The first request of a
  conversation shares them with an earlier conversation of the same model and the same two counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ninfer_pool.errors import TraceError
from ninfer_pool.sim.convert.blocks import BlockTrie, block_ids
from ninfer_pool.sim.jsonl import (
    Where,
    file_lines,
    list_of,
    object_of,
    seconds,
    text_of,
    whole,
)
from ninfer_pool.sim.trace import Trace, TraceRequest, make_header, trace_name


@dataclass(frozen=True, slots=True, kw_only=True)
class _Conversation:
    """A session's main conversation or one of its sub-agents."""

    session: str
    kind: str
    start: float
    scope: str
    block_tokens: int
    tools: int
    system: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One request of a source file."""

    conversation: _Conversation
    t: float
    model: str
    input: int
    output: int
    blocks: list[int]
    stripped: bool

    @property
    def system_key(self) -> tuple[str, int, int]:
        return self.model, self.conversation.tools, self.conversation.system

    @property
    def boundary(self) -> int:
        """End of tools and system prompt; 0 where it is not known to lie inside the prompt."""
        end = self.conversation.tools + self.conversation.system
        return end if end <= self.input else 0


def convert_sessions(path: Path) -> Trace:
    """Convert one session file, or all ``*.json`` and ``*.json.gz`` of a folder; O(blocks).

    Raises:
        TraceError: a file that does not have the shape of the source; names file and field.
    """
    files = sorted(p for p in path.iterdir() if _is_session(p)) if path.is_dir() else [path]
    if not files:
        raise TraceError(f"{path}: holds no session; must have files NAME.json or NAME.json.gz")
    rows = [row for file in files for row in _read(file)]
    rows.sort(key=lambda row: row.t)
    name = trace_name(path)
    header = make_header(
        name,
        source=f"kv-cache-tester sessions: {path.name}",
        licence="that of the source (Apache-2.0 where it is the published one)",
        notes="converted from kv-cache-tester; prefix relations only; reasoning counted as kept "
        "inside a tool loop and as stripped after the end of a turn",
    )
    return Trace(name=name, header=header, requests=_Linker().link(rows))


# --- reading --------------------------------------------------------------------------------------


def _is_session(path: Path) -> bool:
    return path.is_file() and path.name.endswith((".json", ".json.gz"))


def _read(path: Path) -> list[_Row]:
    where = Where(str(path))
    try:
        content = json.loads(b"".join(file_lines(path)))
    except json.JSONDecodeError as error:
        raise TraceError(f"{path}, line {error.lineno}: not valid JSON ({error.msg})") from error
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}: not UTF-8 JSON; must be a session's JSON file") from error
    record = object_of(content, "the file", where)
    session = text_of(record.get("id", trace_name(path)), "id", where)
    shared = text_of(record.get("hash_id_scope", "local"), "hash_id_scope", where) == "global"
    conversation = _Conversation(
        session=session,
        kind="main",
        start=0.0,
        scope="" if shared else str(path),
        block_tokens=whole(record.get("block_size", 64), "block_size", where, least=1),
        tools=whole(record.get("tool_tokens", 0), "tool_tokens", where, least=0),
        system=whole(record.get("system_tokens", 0), "system_tokens", where, least=0),
    )
    rows = list(_rows(record, conversation, "", where))
    if not rows:
        raise where.error("requests", [], "a list with at least one request")
    return rows


def _rows(
    record: dict[str, object], conversation: _Conversation, at: str, where: Where
) -> Iterator[_Row]:
    items = list_of(_get(record, "requests", at, where), f"{at}requests", where)
    agents = 0
    for number, item in enumerate(items):
        place = f"{at}requests[{number}]."
        entry = object_of(item, place[:-1], where)
        if "requests" in entry or entry.get("type") == "subagent":
            agents += 1
            inner = _agent(entry, conversation, agents, place, where)
            yield from _rows(entry, inner, place, where)
        else:
            yield _row(entry, conversation, place, where)


def _agent(
    entry: dict[str, object], outer: _Conversation, number: int, place: str, where: Where
) -> _Conversation:
    name = text_of(entry.get("agent_id", f"agent_{number:03}"), f"{place}agent_id", where)
    start = seconds(_get(entry, "t", place, where), f"{place}t", where)
    return _Conversation(
        session=f"{outer.session}/{name}",
        kind="subagent",
        start=outer.start + start,
        scope=outer.scope,
        block_tokens=outer.block_tokens,
        tools=whole(entry.get("tool_tokens", 0), f"{place}tool_tokens", where, least=0),
        system=whole(entry.get("system_tokens", 0), f"{place}system_tokens", where, least=0),
    )


def _row(entry: dict[str, object], talk: _Conversation, place: str, where: Where) -> _Row:
    length = whole(_get(entry, "in", place, where), f"{place}in", where, least=1)
    size = talk.block_tokens
    ids = block_ids(
        _get(entry, "hash_ids", place, where),
        where,
        name=f"{place}hash_ids",
        tokens=length,
        size=size,
    )
    held = list_of(entry.get("output_types", []), f"{place}output_types", where)
    return _Row(
        conversation=talk,
        t=round(talk.start + seconds(_get(entry, "t", place, where), f"{place}t", where), 6),
        model=text_of(entry.get("model", ""), f"{place}model", where),
        input=length,
        output=whole(_get(entry, "out", place, where), f"{place}out", where, least=0),
        blocks=ids[: length // size],
        stripped=entry.get("stop") == "end_turn" and "thinking" in held,
    )


def _get(entry: dict[str, object], name: str, place: str, where: Where) -> object:
    if name not in entry:
        raise where.missing(f"{place}{name}")
    return entry[name]


# --- linking --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Linker:
    """Finds each request's parent among the earlier ones."""

    rows: list[_Row] = field(default_factory=list)
    requests: list[TraceRequest] = field(default_factory=list)
    tries: dict[str, BlockTrie] = field(default_factory=dict)
    continued: set[int] = field(default_factory=set)
    started: set[str] = field(default_factory=set)
    systems: dict[tuple[str, int, int], int] = field(default_factory=dict)

    def link(self, rows: list[_Row]) -> tuple[TraceRequest, ...]:
        """Turn rows in order of arrival into requests."""
        for row in rows:
            self._add(row)
        return tuple(self.requests)

    def _add(self, row: _Row) -> None:
        talk, id = row.conversation, len(self.requests)
        parent, shared = self._parent(row)
        self.requests.append(
            TraceRequest(
                id=id,
                t=row.t,
                session=talk.session,
                kind=talk.kind,
                parent=parent,
                shared=shared,
                input=row.input,
                output=row.output,
                boundaries=((row.boundary, "system"),) if row.boundary else (),
            )
        )
        self.rows.append(row)
        self.tries.setdefault(talk.scope, BlockTrie()).add(row.blocks, id)
        self.started.add(talk.session)
        if row.boundary:
            self.systems[row.system_key] = id

    def _parent(self, row: _Row) -> tuple[int | None, int]:
        talk = row.conversation
        match = self.tries.setdefault(talk.scope, BlockTrie()).match(row.blocks)
        if match.ended is not None and self._whole(match.ended):
            return match.ended, self._continued(row, match.ended)
        if match.newest is not None:
            return match.newest, match.depth * talk.block_tokens
        if talk.session in self.started or not row.boundary:
            return None, 0
        parent = self.systems.get(row.system_key)
        return parent, 0 if parent is None else row.boundary

    def _whole(self, id: int) -> bool:
        """Say whether every whole block of the prompt of `id` is known."""
        row = self.rows[id]
        return len(row.blocks) == row.input // row.conversation.block_tokens

    def _continued(self, row: _Row, parent: int) -> int:
        """How far `row`, which has every whole block of `parent`, goes on from it."""
        before, total = self.rows[parent], self.requests[parent].total
        longer = len(row.blocks) > len(before.blocks)
        kept = longer and not before.stripped and parent not in self.continued
        if longer:
            self.continued.add(parent)
        if kept and row.input > total:
            return total
        return min(row.input, before.input)
