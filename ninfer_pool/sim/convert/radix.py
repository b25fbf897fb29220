"""The earlier sequence with the longest shared prefix; unique content is stored once."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class _Node:
    """One edge and its children; `newest` is the latest sequence through it."""

    edge: bytes = b""
    newest: int = -1
    children: dict[bytes, _Node] = field(default_factory=dict)


class RadixTree:
    """Sequences of fixed-size units, as bytes; a walk is one comparison for each edge.

    >>> tree = RadixTree(unit=1)
    >>> tree.add(b"system one", 0)
    >>> tree.add(b"system two", 1)
    >>> tree.match(b"system three"), tree.match(b"other")
    ((8, 1), (0, None))
    >>> tree.units
    13
    """

    def __init__(self, *, unit: int) -> None:
        self._unit = unit
        self._root = _Node()
        self.units = 0
        """Units held; a shared prefix counts once."""

    def match(self, data: bytes) -> tuple[int, int | None]:
        """Return the longest known prefix of `data`, in units, and the latest sequence with it."""
        node, at = self._root, 0
        while True:
            child = node.children.get(data[at : at + self._unit])
            if child is None:
                break
            node = child
            if data.startswith(node.edge, at):
                at += len(node.edge)
                continue
            at += self._common(node.edge, data, at)
            break
        return at // self._unit, node.newest if at else None

    def add(self, data: bytes, sequence: int, *, keep: int = 0) -> None:
        """Add `data` as `sequence`, now the latest one on its path.

        Its first `keep` units stay with the sequence that has them.
        """
        node, at = self._root, 0
        while at < len(data):
            first = data[at : at + self._unit]
            child = node.children.get(first)
            if child is None:
                node.children[first] = _Node(edge=data[at:], newest=sequence)
                self.units += (len(data) - at) // self._unit
                return
            if not data.startswith(child.edge, at):
                child = self._split(node, first, self._common(child.edge, data, at))
            node, at = child, at + len(child.edge)
            if at > keep * self._unit:
                node.newest = sequence

    def _split(self, parent: _Node, first: bytes, at: int) -> _Node:
        lower = parent.children[first]
        upper = _Node(edge=lower.edge[:at], newest=lower.newest)
        lower.edge = lower.edge[at:]
        upper.children[lower.edge[: self._unit]] = lower
        parent.children[first] = upper
        return upper

    def _common(self, edge: bytes, data: bytes, at: int) -> int:
        """Return the bytes, in whole units, that `edge` and `data` from `at` on share."""
        length = min(len(edge), len(data) - at)
        left = np.frombuffer(edge, dtype=np.uint8, count=length)
        right = np.frombuffer(data, dtype=np.uint8, count=length, offset=at)
        apart = np.flatnonzero(left != right)
        common = int(apart[0]) if apart.size else length
        return common - common % self._unit
