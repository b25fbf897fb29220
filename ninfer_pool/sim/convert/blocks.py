"""Prefixes of prompts that are given as lists of block ids, found in time linear in the list."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

from ninfer_pool.sim.jsonl import Where, list_of, whole

ROOT: Final = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMatch:
    """What earlier prompts share with one.

    `depth` is how many leading blocks are shared, `newest` the latest request that shares them all,
    `ended` the latest whose blocks are exactly these (None where none is).
    """

    depth: int
    newest: int | None
    ended: int | None


class BlockTrie:
    """A trie over block ids; remembers which request passed through and ended at each node."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, Hashable], int] = {}
        self._newest: dict[int, int] = {}
        self._ended: dict[int, int] = {}

    def match(self, blocks: Sequence[Hashable]) -> BlockMatch:
        """Find the deepest shared prefix of `blocks`; O(depth)."""
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
        """Remember the blocks of `request`, now the newest on its path; O(blocks)."""
        node = ROOT
        for block in blocks:
            node = self._next.setdefault((node, block), len(self._next) + 1)
            self._newest[node] = request
        self._ended[node] = request


def block_ids(value: object, where: Where, *, name: str, tokens: int, size: int) -> list[int]:
    """Check a list of block ids of a prompt of `tokens` tokens: no more than it has blocks."""
    ids = [whole(item, name, where, least=0) for item in list_of(value, name, where)]
    most = -(-tokens // size)
    if len(ids) > most:
        wanted = f"at most {most}, {tokens} tokens in blocks of {size}"
        raise where.error(name, f"{len(ids)} blocks", wanted)
    return ids
