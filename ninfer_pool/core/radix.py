"""The radix index: which retained sequences share a prompt's beginning, and where they part.

One root a namespace. A `Path` is one long run of tokens; another sequence that parts from it at
position q hangs off it as a *fork* at q, so nothing is ever split: a path of 200,000 tokens with
1,000 branch points is still compared by one pass of memcmp. Checkpoints are *marks*: positions
on a path, not nodes. A path's marks and their positions are replaced, never changed in place, so
a lookup can hand them out without copying.

The walk compares raw int32 bytes and is itself the exact verification (G5): no hash is involved.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, TypeAlias

from ninfer_pool.core.keys import Attribute

if TYPE_CHECKING:
    from ninfer_pool.core.entry import Checkpoint, Entry

CHUNK = 1 << 18
"""Bytes compared at a time; a mismatch is then looked for within one chunk."""


class Path:
    """A run of tokens from ``start``, its marks, and the forks that leave it.

    ``label`` is one growing buffer. Marks lie in ``start < position <= end``; a mark at a fork's
    position belongs to the path, not to the fork. ``entries`` counts the entries whose tip lies
    on this path or below it; ``tip`` is the one whose tip lies on it, if any.
    """

    __slots__ = (
        "attributes",
        "entries",
        "forks",
        "key",
        "label",
        "live",
        "marks",
        "parent",
        "positions",
        "start",
        "tip",
    )

    def __init__(
        self, *, parent: Path | None, start: int, label: bytearray, attributes: list[Attribute]
    ) -> None:
        self.parent = parent
        self.start = start
        self.label = label
        self.attributes = attributes
        self.positions: list[int] = []
        self.marks: list[Checkpoint] = []
        self.forks: dict[int, dict[bytes, Path]] | None = None
        self.live: dict[int, int] = {}
        """Entries below, by the position of the fork that leads to them."""
        self.entries = 0
        self.tip: Entry | None = None
        self.key = first_cell(label, attributes, start)

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + len(self.label) // 4

    def children(self) -> Iterator[Path]:
        """Every fork, in no particular order."""
        if self.forks:
            for group in self.forks.values():
                yield from group.values()

    def subtree(self) -> Iterator[Path]:
        """This path and all below it, parents first. Iterative: depth is not bounded."""
        stack = [self]
        while stack:
            path = stack.pop()
            yield path
            stack.extend(path.children())

    def count_entries(self, change: int) -> None:
        """Add ``change`` to the entries of this path and of all above it. O(depth)."""
        path = self
        path.entries += change
        while path.parent is not None:
            start, path = path.start, path.parent
            path.entries += change
            path.add_live(start, change)

    def add_live(self, position: int, change: int) -> None:
        """Add ``change`` to the entries that hang at a fork's position."""
        count = self.live.get(position, 0) + change
        if count:
            self.live[position] = count
        else:
            self.live.pop(position, None)

    def goes_on(self, position: int) -> bool:
        """Say whether some entry hangs off this path at ``position`` or later. O(fork points)."""
        return any(start >= position for start in self.live)

    def forks_after(self, position: int) -> Iterator[Path]:
        """Every fork that leaves past ``position``."""
        for start, group in (self.forks or {}).items():
            if start > position:
                yield from group.values()


Hop: TypeAlias = tuple[Path, int]
"""A path on the way, and the position that it was matched up to."""

_EMPTY = memoryview(b"")


def first_cell(label: Sequence[int] | bytearray, attributes: Sequence[Attribute], at: int) -> bytes:
    """Return what tells forks at one position apart: the next token and its attributes."""
    payload = attributes[0][1] if attributes and attributes[0][0] == at else b""
    return bytes(label[:4]) + payload


def walk(
    root: Path,
    view: memoryview,
    attributes: Sequence[Attribute] = (),
    *,
    origin: int = 0,
    known: list[Hop] | None = None,
) -> list[Hop]:
    """Return the paths that ``view`` (int32 bytes) follows from ``root``, each with how far.

    The last hop's ``upto`` is the longest common prefix with anything retained. ``view`` holds
    the tokens from ``origin`` on; ``known`` are the hops above ``root``, which then is the path
    that ``origin`` lies on (see `hops_to`). O(matched bytes) at the speed of memcmp, plus O(1)
    for each hop.
    """
    hops = known or []
    path, begin = root, origin
    while True:
        label = path.label
        skip = 4 * (begin - path.start)
        offset = 4 * (begin - origin)
        piece = view[offset : offset + len(label) - skip] if label else _EMPTY
        size = len(piece)
        if size > CHUNK:
            size = _common(label, piece, skip)
        elif not label.startswith(piece, skip):
            size = _parting_of(path, piece, skip, size)
        upto = begin + size // 4
        if attributes or path.attributes:
            upto = _parting(path, attributes, upto)
        hops.append((path, upto))
        forks = path.forks
        if not forks or upto not in forks:
            return hops
        cell = view[4 * (upto - origin) : 4 * (upto - origin) + 4].tobytes()
        if attributes:
            at = bisect_left(attributes, (upto,))
            if at < len(attributes) and attributes[at][0] == upto:
                cell += attributes[at][1]
        child = forks[upto].get(cell)
        if child is None:
            return hops
        path, begin = child, upto


def hops_to(path: Path, position: int) -> tuple[list[Hop], Path]:
    """Return the hops above the path that ``position`` lies on, and that path. O(depth)."""
    while path.start >= position and path.parent is not None:
        path = path.parent
    above: list[Hop] = []
    current = path
    while current.parent is not None:
        above.append((current.parent, current.start))
        current = current.parent
    return above[::-1], path


def _parting_of(path: Path, piece: memoryview, skip: int, size: int) -> int:
    """Return the first byte of the first cell of ``piece`` that differs; one does.

    Most prompts part where others did before: the deepest fork on ``piece`` is tried first.
    """
    label, low = path.label, 0
    if path.forks:
        at = 4 * (next(reversed(path.forks)) - path.start) - skip
        if 0 < at < size and label.startswith(piece[:at], skip):
            if piece[at : at + 4] != label[skip + at : skip + at + 4]:
                return at
            low = at
    return _first_difference(label, piece, skip, low, size)


def _common(label: bytearray, piece: memoryview, skip: int) -> int:
    """Return how many leading bytes agree, a multiple of 4: chunk by chunk, then by halves."""
    low = 0
    size = len(piece)
    while low < size and label.startswith(piece[low : low + CHUNK], skip + low):
        low += CHUNK
    if low >= size:
        return size
    return _first_difference(label, piece, skip, low, min(low + CHUNK, size))


def _first_difference(label: bytearray, piece: memoryview, skip: int, low: int, high: int) -> int:
    """Return the first byte of the first cell that differs in ``[low, high)``; one does."""
    starts = label.startswith
    step = 64
    while low + step < high and starts(piece[low : low + step], skip + low):
        low += step
        step *= 4
    high = min(high, low + step)
    while high - low > 4:
        middle = (low + high) // 8 * 4
        if starts(piece[low:middle], skip + low):
            low = middle
        else:
            high = middle
    return low


def _parting(path: Path, attributes: Sequence[Attribute], upto: int) -> int:
    """Return where attributes part at or before ``upto``, else ``upto``.

    An attribute at ``upto`` itself belongs to the next token and is not compared here.
    """
    mine = attributes[bisect_left(attributes, (path.start,)) : bisect_left(attributes, (upto,))]
    theirs = path.attributes[: bisect_left(path.attributes, (upto,))]
    for (here, payload), (there, other) in zip(mine, theirs, strict=False):
        if (here, payload) != (there, other):
            return min(here, there)
    if len(mine) == len(theirs):
        return upto
    longer = mine if len(mine) > len(theirs) else theirs
    return longer[min(len(mine), len(theirs))][0]


def marks_upto(hops: Sequence[Hop], limit: int) -> Iterator[Checkpoint]:
    """Yield the marks on ``hops`` at positions up to ``limit``, deepest first."""
    for path, upto in reversed(hops):
        if path.positions:
            last = bisect_right(path.positions, min(upto, limit))
            for index in range(last - 1, -1, -1):
                yield path.marks[index]


def add_marks(path: Path, fresh: Sequence[Checkpoint]) -> None:
    """Add marks (ascending) to a path; later ones come after equal positions. O(marks)."""
    merged = sorted(chain(path.marks, fresh), key=_position)
    for mark in fresh:
        mark.path = path
    path.marks = merged
    path.positions = [mark.position for mark in merged]


def _position(mark: Checkpoint) -> int:
    return mark.position


def remove_mark(mark: Checkpoint) -> None:
    """Take a mark off its path; the path's tokens stay until `prune`. O(marks of the path)."""
    path = mark.where
    at = path.marks.index(mark, bisect_left(path.positions, mark.position))
    path.marks = path.marks[:at] + path.marks[at + 1 :]
    path.positions = path.positions[:at] + path.positions[at + 1 :]


def insert(
    hops: list[Hop], view: memoryview, attributes: Sequence[Attribute], *, origin: int = 0
) -> list[Hop]:
    """Make the index hold ``view``; return its hops. The first ``hops`` are its walk's result.

    Extends the last path where the view goes on where its label ends, else forks off it.
    O(bytes added).
    """
    path, upto = hops[-1]
    total = origin + len(view) // 4
    if upto == total:
        return hops
    fresh = list(attributes[bisect_left(attributes, (upto,)) : bisect_left(attributes, (total,))])
    label = view[4 * (upto - origin) :]
    if upto == path.end:
        path.label += label
        path.attributes += fresh
        if path.start == upto:
            path.key = first_cell(path.label, path.attributes, upto)
        return [*hops[:-1], (path, total)]
    child = Path(parent=path, start=upto, label=bytearray(label), attributes=fresh)
    _hang(child)
    return [*hops, (child, total)]


def _hang(child: Path) -> None:
    path = child.parent
    assert path is not None
    if path.forks is None:
        path.forks = {}
    path.forks.setdefault(child.start, {})[child.key] = child


def split_tail(path: Path, at: int) -> Path:
    """Turn what lies past ``at`` on ``path`` into a fork of it, and return the fork.

    So the sequence that goes on from ``at`` can extend the path itself, and a conversation stays
    one path however often its tails are replaced. The tip of ``path``, if any, lies past ``at``.
    O(bytes of the tail).
    """
    cut = 4 * (at - path.start)
    border = bisect_left(path.attributes, (at,))
    tail = Path(parent=path, start=at, label=path.label[cut:], attributes=path.attributes[border:])
    del path.label[cut:]
    del path.attributes[border:]
    first = bisect_right(path.positions, at)
    tail.marks, path.marks = path.marks[first:], path.marks[:first]
    tail.positions, path.positions = path.positions[first:], path.positions[:first]
    for mark in tail.marks:
        mark.path = tail
    moved = {q: group for q, group in (path.forks or {}).items() if q > at}
    for q in moved:
        assert path.forks is not None
        del path.forks[q]
    tail.forks = moved or None
    for child in tail.children():
        child.parent = tail
    tail.live = {q: count for q, count in path.live.items() if q > at}
    path.live = {q: count for q, count in path.live.items() if q <= at}
    tail.tip, path.tip = path.tip, None
    tail.entries = sum(tail.live.values()) + (tail.tip is not None)
    path.add_live(at, tail.entries)
    _hang(tail)
    return tail


def prune(path: Path) -> None:
    """Drop the tokens past the last mark or fork, empty paths, and needless hops upwards.

    O(1) where nothing is needless, else O(bytes of the one fork that is joined).
    """
    while True:
        needed = max(
            path.positions[-1] if path.positions else path.start,
            max(path.forks) if path.forks else path.start,
        )
        if needed < path.end:
            del path.label[4 * (needed - path.start) :]
            del path.attributes[bisect_left(path.attributes, (needed,)) :]
        parent = path.parent
        if path.label or parent is None:
            break
        assert parent.forks is not None
        group = parent.forks[path.start]
        del group[path.key]
        if not group:
            del parent.forks[path.start]
        path = parent
    _join(path)


def _join(path: Path) -> None:
    """Take over the only fork at the path's very end, so that a chain becomes one path."""
    group = path.forks.get(path.end) if path.forks else None
    if group is None or len(group) != 1 or path.forks is None:
        return
    (child,) = group.values()
    path_end = path.end
    del path.forks[path_end]
    path.label += child.label
    path.attributes += child.attributes
    for mark in child.marks:
        mark.path = path
    path.marks = path.marks + child.marks
    path.positions = path.positions + child.positions
    for grandchild in child.children():
        grandchild.parent = path
    path.forks.update(child.forks or {})
    path.live.pop(path_end, None)
    path.live.update(child.live)
    if child.tip is not None:
        path.tip = child.tip
    if path.parent is None and path.start == 0:
        path.key = first_cell(path.label, path.attributes, 0)
