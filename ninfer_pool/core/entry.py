"""Retained things: entries, their checkpoints, and the nodes of the index that hold them.

The three refer to each other, so they are defined together. Algorithms on nodes are in
`ninfer_pool.core.radix`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from ninfer_pool.core.identity import Attribute, Namespace
from ninfer_pool.core.ledger import Pages, Units

Known: TypeAlias = tuple[int, tuple[Any, ...]]
"""A position, and the pieces (see `ninfer_pool.tiers`) that all KV before it is stored as."""


class PageTable:
    """Page ids of one sequence, in order; shared by the checkpoints along it.

    A growing entry replaces it with the longer row: whole pages below a checkpoint stay the same.
    """

    __slots__ = ("ids", "known")

    def __init__(self, ids: Pages, *, known: Known = (0, ())) -> None:
        self.ids = ids
        self.known = known

    def copy(self) -> PageTable:
        """Return another table of the same pages."""
        return PageTable(self.ids, known=self.known)

    def grow(self, longer: PageTable, *, at: int) -> None:
        """Take over a longer row that has the same pages up to position ``at``.

        Stored content past that position is of another computation.
        """
        upto, pieces = self.known
        upto = min(upto, at)
        self.known = longer.known if longer.known[0] >= upto else (upto, pieces)
        self.ids = longer.ids


class Checkpoint:
    """A position with everything needed to continue there: KV pages below it and an image.

    ``table`` holds its whole KV pages. ``tail`` is the partly filled last page, -1 at a page's
    edge; a fork continues in a copy of it. ``image`` is the unit of its image pages, -1 for plain
    attention. ``cuts`` are the off-grid cuts of the prefill that made it; None where the canonical
    plan did not make all of it: such a checkpoint is never exact. ``refs`` counts pins and running
    leases: while there is one it is never evicted (G4).
    """

    __slots__ = (
        "cuts",
        "expires",
        "image",
        "kind",
        "lane",
        "node",
        "position",
        "refs",
        "stored",
        "superseded",
        "table",
        "tail",
        "tick",
        "uses",
    )

    def __init__(
        self,
        *,
        position: int,
        kind: str,
        cuts: tuple[int, ...] | None,
        table: PageTable,
        tail: int,
        image: int,
        lane: int,
        tick: int = 0,
    ) -> None:
        self.position = position
        self.kind = kind
        self.cuts = cuts
        self.table = table
        self.tail = tail
        self.image = image
        self.lane = lane
        self.tick = tick
        """The commit that made it or consumed it last."""
        self.uses = 0
        self.refs = 0
        self.superseded = False
        """Kept while there is room, the first victim."""
        self.expires: float | None = None
        self.stored: Any = None
        """Its parts in tiers below (see `ninfer_pool.tiers`); None: never stored."""
        self.node: Node | None = None
        """Where it is indexed; None before and after."""

    @property
    def anchor(self) -> Node:
        """The node that it is indexed on, while it is."""
        assert self.node is not None
        return self.node

    def __repr__(self) -> str:
        return f"Checkpoint({self.kind} at {self.position})"

    def exact_for(self, cuts: tuple[int, ...], grid: int, position: int) -> bool:
        """Return whether a cold run that cuts at ``cuts`` and the grid computes the same bits.

        True where the cuts up to ``position`` are the same and it is itself one of them.
        """
        if self.cuts is None:
            return False
        mine = self.cuts[: bisect_right(self.cuts, position)]
        theirs = cuts[: bisect_right(cuts, position)]
        return mine == theirs and (position % grid == 0 or theirs[-1:] == (position,))

    def kv_pages(self, page_tokens: int) -> Pages:
        """Return the ids of the pages that hold positions ``[0, position)``, in order."""
        whole = self.table.ids[: self.position // page_tokens]
        return whole if self.tail < 0 else np.append(whole, np.int32(self.tail))

    def units(self, page_tokens: int) -> Units:
        """Return all that it holds: the ids of its KV pages, then its image's. O(pages)."""
        whole = self.table.ids[: self.position // page_tokens]
        rest = [unit for unit in (self.tail, self.image) if unit >= 0]
        return np.concatenate((whole, np.array(rest, dtype=np.int32))) if rest else whole


class Entry:
    """One retained sequence that is no prefix of another, as every policy hook receives it.

    ``tip`` is its deepest checkpoint. The others are on the path above it and may be shared. A
    policy reads the fields and changes none.
    """

    __slots__ = (
        "bytes",
        "created",
        "gain",
        "gain_bytes",
        "gap",
        "hits",
        "identity",
        "inherited",
        "key",
        "lane",
        "namespace",
        "pinned",
        "priority",
        "prompt_tokens",
        "released",
        "saved",
        "tip",
        "used",
    )

    def __init__(
        self, *, identity: int, namespace: Namespace, tip: Checkpoint, tick: int, lane: int
    ) -> None:
        self.identity = identity
        """Its number in the pool: the same while it grows, and never another entry's."""
        self.namespace = namespace
        self.tip = tip
        self.key = ""
        self.lane = lane
        """Its home lane: the last that computed it."""
        self.prompt_tokens = 0
        """Where the generated tail begins that no request has consumed yet."""
        self.created = tick
        self.used = tick
        """The last commit that wrote or consumed it."""
        self.hits = 0
        """How many commits consumed it."""
        self.gap = 0
        """Commits between its last two uses; 0 before the first."""
        self.saved = 0
        """Tokens of its tip that no other entry holds: the cost of losing it."""
        self.bytes = 0
        """Bytes that losing it would free, about, as last computed."""
        self.gain = 0
        """Tokens that its tip spares beyond the checkpoint before it."""
        self.gain_bytes = 0
        """Bytes that losing its tip would free, about."""
        self.priority = 0
        self.released = False
        """The conversation is over: it goes before others of its priority."""
        self.pinned: list[Checkpoint] | None = None
        """The checkpoints that its pin protects; None: not pinned."""
        self.inherited: Checkpoint | None = None
        """The tip among them that was pinned only because the entry grew to it."""

    def __repr__(self) -> str:
        return f"Entry(#{self.identity}, {self.tip.position} tokens, {self.hits} hits)"

    @property
    def tokens(self) -> int:
        """The position of its deepest checkpoint."""
        return self.tip.position

    def consume(self, tick: int) -> None:
        """Record that the commit at ``tick`` used it; once per commit."""
        if self.used != tick:
            self.gap = tick - self.used
            self.used = tick
            self.hits += 1


class Node:
    """A run of tokens from ``start``, the checkpoints on it, and the children that leave it.

    ``tokens`` is one growing buffer of int32. Checkpoints have ``start < position <= end``; one
    at a child's position belongs to the parent. ``entries`` counts the entries whose tip is on
    this node or below it; ``tip`` is the entry whose tip is on it, if any.
    """

    __slots__ = (
        "attributes",
        "checkpoints",
        "children",
        "entries",
        "key",
        "live",
        "parent",
        "positions",
        "start",
        "tip",
        "tokens",
    )

    def __init__(
        self, *, parent: Node | None, start: int, tokens: bytearray, attributes: list[Attribute]
    ) -> None:
        self.parent = parent
        self.start = start
        self.tokens = tokens
        self.attributes = attributes
        self.positions: list[int] = []
        self.checkpoints: list[Checkpoint] = []
        self.children: dict[int, dict[bytes, Node]] | None = None
        """By the position where they leave, then by their first cell."""
        self.live: dict[int, int] = {}
        """Entries below, by the position of the child that leads to them."""
        self.entries = 0
        self.tip: Entry | None = None
        self.key = first_cell(tokens, attributes, start)

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + len(self.tokens) // 4

    def children_from(self, position: int = 0) -> Iterator[Node]:
        """Yield every child that leaves at ``position`` or later."""
        for start, group in (self.children or {}).items():
            if start >= position:
                yield from group.values()

    def subtree(self) -> Iterator[Node]:
        """Yield this node and all below it, parents first. Iterative: depth is not bounded."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children_from())

    def count_entries(self, change: int) -> None:
        """Add ``change`` to the entries of this node and of all above it. O(depth)."""
        node = self
        node.entries += change
        while node.parent is not None:
            start, node = node.start, node.parent
            node.entries += change
            node.add_live(start, change)

    def add_live(self, position: int, change: int) -> None:
        """Add ``change`` to the entries below a child's position."""
        count = self.live.get(position, 0) + change
        if count:
            self.live[position] = count
        else:
            self.live.pop(position, None)

    def continues(self, position: int) -> bool:
        """Return whether some entry leaves this node at ``position`` or later. O(fork points)."""
        return any(start >= position for start in self.live)


def first_cell(
    tokens: Sequence[int] | bytearray, attributes: Sequence[Attribute], at: int
) -> bytes:
    """Return the key of a child at its position: its first token and that one's attributes."""
    payload = attributes[0][1] if attributes and attributes[0][0] == at else b""
    return bytes(tokens[:4]) + payload
