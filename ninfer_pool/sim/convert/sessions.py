"""Sessions of kv-cache-tester: JSON files of coding agents, content removed, as ids of blocks.

A file lists the requests of one session with nested sub-agents; ids cover the whole blocks of each
prompt. Rules of the conversion:

* sessions start together at 0 s, each on its own clock; a sub-agent's times count from its start;
* the parent is the earlier request with the longest common list of leading blocks. Ids are compared
  within a file, or between all files where each has ``"hash_id_scope": "global"``;
* a prompt that has all whole blocks of an earlier one continues it: the tail of less than a block
  is taken as kept, and so is the answer. The two part at the earlier prompt's end, without the
  answer, in three cases: the answer ended the turn with reasoning, which clients strip then; the
  later prompt has no room for it and anything new; another prompt with other blocks continued the
  same one before;
* other pairs part where their blocks do;
* tools and system prompt, stated in tokens, give the ``system`` boundary. The first request of a
  conversation shares them with an earlier conversation of the same model and the same two counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ninfer_pool.errors import TraceError
from ninfer_pool.sim.convert.blocks import BlockTrie, block_ids
from ninfer_pool.sim.jsonl import JsonFields, file_lines, parse_object
from ninfer_pool.sim.trace import Trace, TraceRequest, converted_trace, trace_name


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
        """End of tools and system prompt; 0 where that is past the prompt's end."""
        end = self.conversation.tools + self.conversation.system
        return end if end <= self.input else 0


def convert_sessions(path: Path) -> Trace:
    """Convert one session file, or all ``*.json`` and ``*.json.gz`` of a folder; O(blocks).

    Raises:
        TraceError: a file of another shape; the message names file and field.
    """
    files = sorted(p for p in path.iterdir() if _is_session(p)) if path.is_dir() else [path]
    if not files:
        raise TraceError(f"{path}: holds no session; must have files NAME.json or NAME.json.gz")
    rows = [row for file in files for row in _read(file)]
    rows.sort(key=lambda row: row.t)
    return converted_trace(
        path,
        _Linker().link(rows),
        source=f"kv-cache-tester sessions: {path.name}",
        licence="that of the source (Apache-2.0 where it is the published one)",
        notes="converted from kv-cache-tester; prefix relations only; reasoning counted as kept "
        "inside a tool loop and as stripped after the end of a turn",
    )


# --- reading --------------------------------------------------------------------------------------


def _is_session(path: Path) -> bool:
    return path.is_file() and path.name.endswith((".json", ".json.gz"))


def _read(path: Path) -> list[_Row]:
    fields = parse_object(b"".join(file_lines(path)), where=str(path))
    session = fields.text("id", trace_name(path))
    shared = fields.text("hash_id_scope", "local") == "global"
    conversation = _Conversation(
        session=session,
        kind="main",
        start=0.0,
        scope="" if shared else str(path),
        block_tokens=fields.whole("block_size", 64, least=1),
        tools=fields.whole("tool_tokens", 0),
        system=fields.whole("system_tokens", 0),
    )
    rows = list(_rows(fields, conversation))
    if not rows:
        raise fields.error("requests", [], "a list with at least one request")
    return rows


def _rows(fields: JsonFields, conversation: _Conversation) -> Iterator[_Row]:
    agents = 0
    for entry in fields.children("requests"):
        if "requests" in entry.values or entry.values.get("type") == "subagent":
            agents += 1
            yield from _rows(entry, _agent(entry, conversation, agents))
        else:
            yield _row(entry, conversation)


def _agent(entry: JsonFields, outer: _Conversation, number: int) -> _Conversation:
    name = entry.text("agent_id", f"agent_{number:03}")
    return _Conversation(
        session=f"{outer.session}/{name}",
        kind="subagent",
        start=outer.start + entry.seconds("t"),
        scope=outer.scope,
        block_tokens=outer.block_tokens,
        tools=entry.whole("tool_tokens", 0),
        system=entry.whole("system_tokens", 0),
    )


def _row(entry: JsonFields, talk: _Conversation) -> _Row:
    length = entry.whole("in", least=1)
    ids = block_ids(entry, tokens=length, size=talk.block_tokens)
    stripped = "thinking" in entry.items("output_types", [])
    return _Row(
        conversation=talk,
        t=round(talk.start + entry.seconds("t"), 6),
        model=entry.text("model", ""),
        input=length,
        output=entry.whole("out"),
        blocks=ids[: length // talk.block_tokens],
        stripped=stripped and entry.values.get("stop") == "end_turn",
    )


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

    def link(self, rows: list[_Row]) -> list[TraceRequest]:
        """Return rows, in order of arrival, as requests."""
        for row in rows:
            self._add(row)
        return self.requests

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
        """Return True if the file has every whole block of the prompt of `id`."""
        row = self.rows[id]
        return len(row.blocks) == row.input // row.conversation.block_tokens

    def _continued(self, row: _Row, parent: int) -> int:
        """Return how much `row`, which has every whole block of `parent`, shares with it."""
        before, total = self.rows[parent], self.requests[parent].total
        longer = len(row.blocks) > len(before.blocks)
        kept = longer and not before.stripped and parent not in self.continued
        if longer:
            self.continued.add(parent)
        if kept and row.input > total:
            return total
        return min(row.input, before.input)
