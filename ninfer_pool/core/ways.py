"""The way from a path to its root: what the index holds of one sequence, read upwards."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import chain
from typing import TYPE_CHECKING

from ninfer_pool.core.keys import Attribute
from ninfer_pool.core.radix import Path

if TYPE_CHECKING:
    from ninfer_pool.core.entry import Checkpoint


def previous_mark(mark: Checkpoint) -> Checkpoint | None:
    """Return the next mark towards the root, or None. O(log marks) and O(1) a hop."""
    path = mark.where
    at = path.marks.index(mark, bisect_left(path.positions, mark.position)) - 1
    while at < 0:
        if path.parent is None:
            return None
        start, path = path.start, path.parent
        at = bisect_right(path.positions, start) - 1
    return path.marks[at]


def pieces(path: Path, begin: int, end: int) -> list[memoryview]:
    """Return the token bytes ``[begin, end)`` of the sequence through ``path``, in parts.

    O(depth). Let go of them before the index changes: a label that is looked at cannot grow.
    """
    parts: list[memoryview] = []
    current: Path | None = path
    while current is not None and begin < end:
        start = max(begin, current.start)
        if start < end:
            offset = 4 * current.start
            parts.append(memoryview(current.label)[4 * start - offset : 4 * end - offset])
            end = start
        current = current.parent
    return parts[::-1]


def sequence(path: Path, position: int) -> bytes:
    """Return the token bytes ``[0, position)`` of the sequence through ``path``. O(bytes)."""
    return b"".join(pieces(path, 0, position))


def attributes(path: Path, position: int) -> list[Attribute]:
    """Return the attributes ``[0, position)`` of the sequence through ``path``, ascending."""
    parts: list[list[Attribute]] = []
    upto = position
    current: Path | None = path
    while current is not None:
        parts.append(current.attributes[: bisect_left(current.attributes, (upto,))])
        upto = current.start
        current = current.parent
    return list(chain.from_iterable(reversed(parts)))


def positions_to(path: Path, position: int) -> tuple[int, ...]:
    """Return the positions of all marks on the way to ``position``, ascending. O(marks)."""
    found: list[int] = []
    upto = position
    current: Path | None = path
    while current is not None:
        found = current.positions[: bisect_right(current.positions, upto)] + found
        upto = current.start
        current = current.parent
    return tuple(found)
