"""Mooncake's public traces: one request per line with the ids of its prompt's 512-token blocks.

Rules of the conversion:

* the parent is the earlier request with the longest common list of leading blocks, the most recent
  one where several have it;
* equal ids are equal content, so a shared last block that is not full in one of the two counts as
  far as both reach. Ids cover prompts only. Where a later turn repeats a prompt and its answer,
  the tail of the prompt's last block and the answer stay unshared;
* the file names no client. A request that repeats all whole blocks of its parent gets the parent's
  session, else a new one. It must repeat two at least: the first is one system prompt for all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ninfer_pool.sim.convert.blocks import BlockTrie, block_ids
from ninfer_pool.sim.jsonl import JsonFields, file_lines, read_objects
from ninfer_pool.sim.trace import Trace, TraceRequest, converted_trace

BLOCK_TOKENS: Final = 512
_Row = tuple[float, int, int, list[int]]


def convert_mooncake(path: Path) -> Trace:
    """Convert a Mooncake trace file; O(blocks).

    Raises:
        TraceError: a line of another shape; the message names file, line and field.
    """
    rows = [_row(fields) for fields in read_objects(file_lines(path), origin=str(path))]
    rows.sort(key=lambda row: row[0])
    trie, requests = BlockTrie(), list[TraceRequest]()
    for row in rows:
        requests.append(_request(row, trie, requests))
        trie.add(row[3], len(requests) - 1)
    return converted_trace(
        path,
        requests,
        source=f"Mooncake trace {path.name}",
        licence="that of the source (Apache-2.0 where it is the published one)",
        notes=f"converted from mooncake; prefixes known to blocks of {BLOCK_TOKENS} tokens",
    )


def _row(fields: JsonFields) -> _Row:
    time = fields.seconds("timestamp") / 1000
    length = fields.whole("input_length", least=1)
    output = fields.whole("output_length")
    return time, length, output, block_ids(fields, tokens=length, size=BLOCK_TOKENS)


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
