"""A bounded memory of what was removed: to say ``evicted``, and to learn from regret."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from ninfer_pool import keys
from ninfer_pool.keys import Attribute
from ninfer_pool.namespace import Namespace

TAIL = 64
"""Bytes before a position that find a ghost; the hash of all before it confirms."""


class Ghost(NamedTuple):
    """A checkpoint that is gone."""

    position: int
    cause: str
    """``evicted``, ``quarantined`` or ``expired``."""
    tick: int
    """When it went, in commits."""
    used: int
    """When it was last used."""
    digest: str


_Name = tuple[Namespace, int, bytes]


def _digest(raw: keys.Bytes, attributes: Sequence[Attribute]) -> str:
    count = memoryview(raw).nbytes // 4
    return keys.sequence_key(b"", [raw], [item for item in attributes if item[0] < count])


class Ghosts:
    """Removed checkpoints, oldest forgotten first.

    A ghost never makes a hit; it only explains a miss, so a hash may confirm it.
    """

    __slots__ = ("_capacity", "_counts", "_found")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._found: OrderedDict[_Name, Ghost] = OrderedDict()
        self._counts: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._found)

    def add(
        self,
        namespace: Namespace,
        raw: bytes,
        attributes: Sequence[Attribute],
        *,
        cause: str,
        tick: int,
        used: int,
    ) -> None:
        """Remember that the checkpoint after the token bytes ``raw`` is gone. One hash pass."""
        if not self._capacity:
            return
        position = len(raw) // 4
        name = (namespace, position, raw[-TAIL:])
        if self._found.pop(name, None) is None:
            self._counts[position] = self._counts.get(position, 0) + 1
        self._found[name] = Ghost(position, cause, tick, used, _digest(raw, attributes))
        if len(self._found) > self._capacity:
            self._forget(self._found.popitem(last=False)[0])

    def _forget(self, name: _Name) -> None:
        position = name[1]
        self._counts[position] -= 1
        if not self._counts[position]:
            del self._counts[position]

    def deepest(
        self,
        namespace: Namespace,
        view: memoryview,
        attributes: Sequence[Attribute],
        *,
        above: int,
        limit: int,
    ) -> Ghost | None:
        """Return the deepest ghost in ``(above, limit]`` on the way of ``view``, or None.

        O(distinct positions remembered), and one hash pass for what is found.
        """
        inside = [position for position in self._counts if above < position <= limit]
        for position in sorted(inside, reverse=True):
            tail = view[max(0, 4 * position - TAIL) : 4 * position].tobytes()
            ghost = self._found.get((namespace, position, tail))
            if ghost is not None and ghost.digest == _digest(view[: 4 * position], attributes):
                return ghost
        return None

    def clear(self) -> None:
        """Forget everything."""
        self._found.clear()
        self._counts.clear()
