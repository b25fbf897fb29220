"""The radix index: which retained sequences share a prompt's beginning, and where they part.

One root per namespace. A `Node` is one long run of tokens; another sequence that parts from it at
position q is a *child* at q, so no node is ever split for it. A node of 200,000 tokens with 1,000
branch points is still compared by one pass of memcmp. Checkpoints are sorted positions on a node,
not nodes. They are replaced, never changed in place, so a lookup can return them without a copy.

The walk compares raw int32 bytes and is itself the exact verification (G5): no hash is involved.
A `Step` is a node and how far it is followed; a list of them is the path of one sequence.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TypeAlias

from ninfer_pool.core.entry import Checkpoint, Node, first_cell
from ninfer_pool.core.identity import Attribute

CHUNK = 1 << 18
"""Bytes compared at a time; a mismatch is then looked for within one chunk."""


Step: TypeAlias = tuple[Node, int]
"""A node on the path, and the position that it was matched up to."""

_EMPTY = memoryview(b"")


def walk(
    root: Node,
    view: memoryview,
    attributes: Sequence[Attribute] = (),
    *,
    origin: int = 0,
    known: list[Step] | None = None,
) -> list[Step]:
    """Return the nodes that ``view`` (int32 bytes) follows from ``root``, each with how far.

    The last step's position is the longest common prefix with anything retained. ``view`` holds
    the tokens from ``origin`` on; ``known`` are the steps above ``root``, which then is the node
    of ``origin`` (see `path_to`). O(matched bytes) at the speed of memcmp, plus O(1) per step.
    """
    steps = known or []
    node, begin = root, origin
    while True:
        tokens = node.tokens
        skip = 4 * (begin - node.start)
        offset = 4 * (begin - origin)
        piece = view[offset : offset + len(tokens) - skip] if tokens else _EMPTY
        size = len(piece)
        if size > CHUNK:
            size = _common(tokens, piece, skip)
        elif not tokens.startswith(piece, skip):
            size = _parting_of(node, piece, skip, size)
        upto = begin + size // 4
        if attributes or node.attributes:
            upto = _parting(node, attributes, upto)
        steps.append((node, upto))
        children = node.children
        if not children or upto not in children:
            return steps
        cell = view[4 * (upto - origin) : 4 * (upto - origin) + 4].tobytes()
        if attributes:
            at = bisect_left(attributes, (upto,))
            if at < len(attributes) and attributes[at][0] == upto:
                cell += attributes[at][1]
        child = children[upto].get(cell)
        if child is None:
            return steps
        node, begin = child, upto


def path_to(node: Node, position: int) -> tuple[list[Step], Node]:
    """Return the node of ``position`` on the way to ``node``, and the steps above it. O(depth)."""
    while node.start >= position and node.parent is not None:
        node = node.parent
    above: list[Step] = []
    current = node
    while current.parent is not None:
        above.append((current.parent, current.start))
        current = current.parent
    return above[::-1], node


def _parting_of(node: Node, piece: memoryview, skip: int, size: int) -> int:
    """Return the first byte of the first cell of ``piece`` that differs; one does.

    Most prompts part where others did before: the newest child within ``piece`` is tried first.
    """
    tokens, low = node.tokens, 0
    if node.children:
        at = 4 * (next(reversed(node.children)) - node.start) - skip
        if 0 < at < size and tokens.startswith(piece[:at], skip):
            if piece[at : at + 4] != tokens[skip + at : skip + at + 4]:
                return at
            low = at
    return _first_difference(tokens, piece, skip, low, size)


def _common(tokens: bytearray, piece: memoryview, skip: int) -> int:
    """Return how many leading bytes agree, a multiple of 4: chunk by chunk, then by halves."""
    low = 0
    size = len(piece)
    while low < size and tokens.startswith(piece[low : low + CHUNK], skip + low):
        low += CHUNK
    if low >= size:
        return size
    return _first_difference(tokens, piece, skip, low, min(low + CHUNK, size))


def _first_difference(tokens: bytearray, piece: memoryview, skip: int, low: int, high: int) -> int:
    """Return the first byte of the first cell that differs in ``[low, high)``; one does."""
    starts = tokens.startswith
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


def _parting(node: Node, attributes: Sequence[Attribute], upto: int) -> int:
    """Return where attributes part at or before ``upto``, else ``upto``.

    An attribute at ``upto`` itself belongs to the next token and is not compared here.
    """
    mine = attributes[bisect_left(attributes, (node.start,)) : bisect_left(attributes, (upto,))]
    theirs = node.attributes[: bisect_left(node.attributes, (upto,))]
    for (here, payload), (there, other) in zip(mine, theirs, strict=False):
        if (here, payload) != (there, other):
            return min(here, there)
    if len(mine) == len(theirs):
        return upto
    longer = mine if len(mine) > len(theirs) else theirs
    return longer[min(len(mine), len(theirs))][0]


def checkpoints_upto(steps: Sequence[Step], limit: int) -> Iterator[Checkpoint]:
    """Yield the checkpoints on a path at positions up to ``limit``, deepest first."""
    for node, upto in reversed(steps):
        if node.positions:
            last = bisect_right(node.positions, min(upto, limit))
            for index in range(last - 1, -1, -1):
                yield node.checkpoints[index]


def add_checkpoints(node: Node, fresh: Sequence[Checkpoint]) -> None:
    """Add checkpoints (ascending) to a node, after older ones of equal positions. O(both)."""
    merged = sorted(chain(node.checkpoints, fresh), key=_position)
    for checkpoint in fresh:
        checkpoint.node = node
    node.checkpoints = merged
    node.positions = [checkpoint.position for checkpoint in merged]


def _position(checkpoint: Checkpoint) -> int:
    return checkpoint.position


def remove_checkpoint(checkpoint: Checkpoint) -> None:
    """Remove a checkpoint from its node; the tokens stay until `prune`. O(those of the node)."""
    node = checkpoint.anchor
    at = node.checkpoints.index(checkpoint, bisect_left(node.positions, checkpoint.position))
    node.checkpoints = node.checkpoints[:at] + node.checkpoints[at + 1 :]
    node.positions = node.positions[:at] + node.positions[at + 1 :]


def insert(
    steps: list[Step], view: memoryview, attributes: Sequence[Attribute], *, origin: int = 0
) -> list[Step]:
    """Make the index hold ``view``; return its path. ``steps`` is the result of its walk.

    The last node is extended where the view continues at its end; else it gets a child.
    O(bytes added).
    """
    node, upto = steps[-1]
    total = origin + len(view) // 4
    if upto == total:
        return steps
    fresh = list(attributes[bisect_left(attributes, (upto,)) : bisect_left(attributes, (total,))])
    tokens = view[4 * (upto - origin) :]
    if upto == node.end:
        node.tokens += tokens
        node.attributes += fresh
        if node.start == upto:
            node.key = first_cell(node.tokens, node.attributes, upto)
        return [*steps[:-1], (node, total)]
    child = Node(parent=node, start=upto, tokens=bytearray(tokens), attributes=fresh)
    _hang(child)
    return [*steps, (child, total)]


def _hang(child: Node) -> None:
    node = child.parent
    assert node is not None
    if node.children is None:
        node.children = {}
    node.children.setdefault(child.start, {})[child.key] = child


def split_tail(node: Node, at: int) -> Node:
    """Move everything past ``at`` on ``node`` into a child of it; return the child.

    A sequence that continues from ``at`` can then extend the node itself. So a conversation stays
    one node however often its tails are replaced. The tip of ``node``, if any, is past ``at``.
    O(bytes of the tail).
    """
    cut = 4 * (at - node.start)
    border = bisect_left(node.attributes, (at,))
    rest, carried = node.tokens[cut:], node.attributes[border:]
    tail = Node(parent=node, start=at, tokens=rest, attributes=carried)
    del node.tokens[cut:]
    del node.attributes[border:]
    first = bisect_right(node.positions, at)
    tail.checkpoints, node.checkpoints = node.checkpoints[first:], node.checkpoints[:first]
    tail.positions, node.positions = node.positions[first:], node.positions[:first]
    for checkpoint in tail.checkpoints:
        checkpoint.node = tail
    moved = {q: group for q, group in (node.children or {}).items() if q > at}
    for q in moved:
        assert node.children is not None
        del node.children[q]
    tail.children = moved or None
    for child in tail.children_from():
        child.parent = tail
    tail.live = {q: count for q, count in node.live.items() if q > at}
    node.live = {q: count for q, count in node.live.items() if q <= at}
    tail.tip, node.tip = node.tip, None
    tail.entries = sum(tail.live.values()) + (tail.tip is not None)
    node.add_live(at, tail.entries)
    _hang(tail)
    return tail


def prune(node: Node) -> None:
    """Remove the tokens past the last checkpoint or child, empty nodes, and needless steps upwards.

    O(1) where nothing is needless, else O(bytes of the one child that is joined).
    """
    while True:
        needed = max(
            node.positions[-1] if node.positions else node.start,
            max(node.children) if node.children else node.start,
        )
        if needed < node.end:
            del node.tokens[4 * (needed - node.start) :]
            del node.attributes[bisect_left(node.attributes, (needed,)) :]
        parent = node.parent
        if node.tokens or parent is None:
            break
        assert parent.children is not None
        group = parent.children[node.start]
        del group[node.key]
        if not group:
            del parent.children[node.start]
        node = parent
    _join(node)


def _join(node: Node) -> None:
    """Take over the only child at the node's very end, so that a chain becomes one node."""
    group = node.children.get(node.end) if node.children else None
    if group is None or len(group) != 1 or node.children is None:
        return
    (child,) = group.values()
    end = node.end
    del node.children[end]
    node.tokens += child.tokens
    node.attributes += child.attributes
    for checkpoint in child.checkpoints:
        checkpoint.node = node
    node.checkpoints = node.checkpoints + child.checkpoints
    node.positions = node.positions + child.positions
    for grandchild in child.children_from():
        grandchild.parent = node
    node.children.update(child.children or {})
    node.live.pop(end, None)
    node.live.update(child.live)
    if child.tip is not None:
        node.tip = child.tip
    if node.parent is None and node.start == 0:
        node.key = first_cell(node.tokens, node.attributes, 0)


def previous_checkpoint(checkpoint: Checkpoint) -> Checkpoint | None:
    """Return the next checkpoint towards the root, or None. O(log checkpoints), O(1) per step."""
    node = checkpoint.anchor
    at = node.checkpoints.index(checkpoint, bisect_left(node.positions, checkpoint.position)) - 1
    while at < 0:
        if node.parent is None:
            return None
        start, node = node.start, node.parent
        at = bisect_right(node.positions, start) - 1
    return node.checkpoints[at]


def token_parts(node: Node, begin: int, end: int) -> list[memoryview]:
    """Return the token bytes ``[begin, end)`` of the sequence through ``node``, in parts.

    O(depth). Release them before the index changes: a buffer with a view on it cannot grow.
    """
    parts: list[memoryview] = []
    current: Node | None = node
    while current is not None and begin < end:
        start = max(begin, current.start)
        if start < end:
            offset = 4 * current.start
            parts.append(memoryview(current.tokens)[4 * start - offset : 4 * end - offset])
            end = start
        current = current.parent
    return parts[::-1]


def tokens_to(node: Node, position: int) -> bytes:
    """Return the token bytes ``[0, position)`` of the sequence through ``node``. O(bytes)."""
    return b"".join(token_parts(node, 0, position))


def attributes_to(node: Node, position: int) -> list[Attribute]:
    """Return the attributes ``[0, position)`` of the sequence through ``node``, ascending."""
    parts: list[list[Attribute]] = []
    upto = position
    current: Node | None = node
    while current is not None:
        parts.append(current.attributes[: bisect_left(current.attributes, (upto,))])
        upto = current.start
        current = current.parent
    return list(chain.from_iterable(reversed(parts)))


def positions_to(node: Node, position: int) -> tuple[int, ...]:
    """Return the positions of all checkpoints up to ``position``, ascending. O(those)."""
    found: list[int] = []
    upto = position
    current: Node | None = node
    while current is not None:
        found = current.positions[: bisect_right(current.positions, upto)] + found
        upto = current.start
        current = current.parent
    return tuple(found)


def covering(steps: Sequence[Step], position: int) -> Iterator[Checkpoint]:
    """Yield checkpoints whose KV covers ``[0, position)`` of a path."""
    if position <= 0:
        return
    node = next(node for node, upto in steps if position <= upto)
    yield from node.checkpoints[bisect_left(node.positions, position) :]
    for child in node.children_from(position):
        for below in child.subtree():
            yield from below.checkpoints


def checkpoints_at(steps: Sequence[Step], position: int) -> list[Checkpoint]:
    """Return the checkpoints of a path at exactly ``position``, the oldest first."""
    for node, upto in steps:
        if position <= upto:
            first = bisect_left(node.positions, position)
            return node.checkpoints[first : bisect_left(node.positions, position + 1)]
    return []
