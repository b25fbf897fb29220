"""Prefixes of prompts that are given as lists of block ids, found in time linear in the list."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final, NamedTuple

from ninfer_pool.sim.jsonl import JsonFields

ROOT: Final = 0


class BlockMatch(NamedTuple):
    """The longest prefix of blocks that earlier prompts share with one."""

    depth: int
    """Leading blocks that are shared."""
    newest: int | None
    """The latest request that shares them all."""
    ended: int | None
    """The latest request whose blocks are exactly these."""


class BlockTrie:
    """A trie over block ids; each node has the latest request through it and to it."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, Hashable], int] = {}
        self._newest: dict[int, int] = {}
        self._ended: dict[int, int] = {}

    def match(self, blocks: Sequence[Hashable]) -> BlockMatch:
        """Return the deepest shared prefix of `blocks`; O(depth)."""
        node, depth = ROOT, 0
        for block in blocks:
            child = self._next.get((node, block))
            if child is None:
                break
            node, depth = child, depth + 1
        if not depth:
            return BlockMatch(depth=0, newest=None, ended=None)
        return BlockMatch(depth=depth, newest=self._newest[node], ended=self._ended.get(node))

    def add(self, blocks: Sequence[Hashable], request: int) -> None:
        """Add the blocks of `request`, now the newest on its path; O(blocks)."""
        node = ROOT
        for block in blocks:
            node = self._next.setdefault((node, block), len(self._next) + 1)
            self._newest[node] = request
        self._ended[node] = request


def block_ids(fields: JsonFields, *, tokens: int, size: int) -> list[int]:
    """Return the field ``hash_ids``: at most as many ids as `tokens` tokens have blocks."""
    ids = [fields.whole_item("hash_ids", item) for item in fields.items("hash_ids")]
    most = -(-tokens // size)
    if len(ids) > most:
        wanted = f"at most {most}, {tokens} tokens in blocks of {size}"
        raise fields.error("hash_ids", f"{len(ids)} blocks", wanted)
    return ids
