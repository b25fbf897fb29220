"""A bounded memory of removed checkpoints: to explain misses and to learn from regret."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import xxhash

from ninfer_pool.core import identity
from ninfer_pool.core.identity import Attribute, Namespace

TAIL = 16
"""Tokens before a position that find a ghost; the hash of all before it confirms."""


class Ghost(NamedTuple):
    """A checkpoint that was removed."""

    position: int
    cause: str
    """``evicted``, ``quarantined`` or ``expired``."""
    tick: int
    """The commit at which it was removed."""
    used: int
    """The commit that used it last."""
    digest: bytes


_Name = tuple[Namespace, int, bytes]


class Digest:
    """The running hash of one sequence: what confirms the ghosts along it, in one pass."""

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, parts: Iterable[identity.Bytes]) -> None:
        """Continue with these token bytes."""
        for part in parts:
            self._state.update(part)

    def digest(self, attributes: Sequence[Attribute], position: int) -> bytes:
        """Return the digest of all tokens so far, ``position`` of them, and their attributes."""
        carried = [item for item in attributes if item[0] < position]
        tokens = self._state.digest()
        return (
            tokens + bytes.fromhex(identity.sequence_key(b"", [], carried)) if carried else tokens
        )


class Ghosts:
    """Removed checkpoints, oldest forgotten first.

    A ghost never makes a hit; it only explains a miss, so a hash may confirm it.
    """

    __slots__ = ("_capacity", "_counts", "found")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.found: OrderedDict[_Name, Ghost] = OrderedDict()
        self._counts: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.found)

    def add(self, namespace: Namespace, tail: bytes, ghost: Ghost) -> None:
        """Remember a removed checkpoint; ``tail``: the bytes of its last `TAIL` tokens."""
        position = ghost.position
        name = (namespace, position, tail)
        if self.found.pop(name, None) is None:
            self._counts[position] = self._counts.get(position, 0) + 1
        self.found[name] = ghost
        if len(self.found) > self._capacity:
            self._forget(self.found.popitem(last=False)[0])

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
        """Return the deepest ghost in ``(above, limit]`` on the path of ``view``, or None.

        O(distinct positions remembered), and one hash pass for the one found.
        """
        inside = [position for position in self._counts if above < position <= limit]
        for position in sorted(inside, reverse=True):
            tail = view[4 * max(0, position - TAIL) : 4 * position].tobytes()
            ghost = self.found.get((namespace, position, tail))
            if ghost is not None:
                state = Digest()
                state.update([view[: 4 * position]])
                if ghost.digest == state.digest(attributes, position):
                    return ghost
        return None

    def clear(self) -> None:
        """Forget everything."""
        self.found.clear()
        self._counts.clear()
