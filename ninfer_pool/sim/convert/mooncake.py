"""Mooncake's public traces: one request a line with the ids of its prompt's 512-token blocks.

What is inferred, and what is not:

* the parent is the earlier request with the longest common list of leading blocks, the most recent
  one where several have it;
* ids cover prompts only. A common id is common content, so a shared last block that is not full in
  one of the two counts as far as both reach. Nothing is claimed beyond common blocks: where a later
  turn repeats a prompt and its answer, up to 511 tokens of the prompt's last block and the answer
  stay unshared, because the file does not show them;
* the file names no client. A request that repeats all whole blocks of its parent (at least two:
  the first is one system prompt for all) is given the parent's session, else a new one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ninfer_pool.sim.convert.blocks import BlockTrie, block_ids
from ninfer_pool.sim.jsonl import (
    Where,
    file_lines,
    needed,
    parse_object,
    seconds,
    text_lines,
    whole,
)
from ninfer_pool.sim.trace import Trace, TraceRequest, make_header, trace_name

BLOCK_TOKENS: Final = 512
_Row = tuple[float, int, int, list[int]]


def convert_mooncake(path: Path) -> Trace:
    """Convert a Mooncake trace file; O(blocks).

    Raises:
        TraceError: a line that does not have the shape of the source; names file, line and field.
    """
    origin = str(path)
    texts = text_lines(file_lines(path), origin=origin)
    rows = [_row(text, Where(origin, number)) for number, text in texts]
    rows.sort(key=lambda row: row[0])
    trie, requests = BlockTrie(), list[TraceRequest]()
    for row in rows:
        requests.append(_request(row, trie, requests))
        trie.add(row[3], len(requests) - 1)
    name = trace_name(path)
    header = make_header(
        name,
        source=f"Mooncake trace {path.name}",
        licence="that of the source (Apache-2.0 where it is the published one)",
        notes=f"converted from mooncake; prefixes known to blocks of {BLOCK_TOKENS} tokens",
    )
    return Trace(name=name, header=header, requests=tuple(requests))


def _row(text: str, where: Where) -> _Row:
    record = parse_object(text, where=where)
    time = seconds(needed(record, "timestamp", where), "timestamp", where) / 1000
    length = whole(needed(record, "input_length", where), "input_length", where, least=1)
    output = whole(needed(record, "output_length", where), "output_length", where, least=0)
    ids = needed(record, "hash_ids", where)
    blocks = block_ids(ids, where, name="hash_ids", tokens=length, size=BLOCK_TOKENS)
    return time, length, output, blocks


def _request(row: _Row, trie: BlockTrie, earlier: list[TraceRequest]) -> TraceRequest:
    time, length, output, blocks = row
    match = trie.match(blocks)
    parent = None if match.newest is None else earlier[match.newest]
    shared, session = 0, f"s{len(earlier)}"
    if parent is not None:
        shared = min(match.depth * BLOCK_TOKENS, length, parent.input)
        if match.depth >= max(2, parent.input // BLOCK_TOKENS):
            session = parent.session
    return TraceRequest(
        id=len(earlier),
        t=time,
        session=session,
        kind="main",
        parent=None if parent is None else parent.id,
        shared=shared,
        input=length,
        output=output,
    )
