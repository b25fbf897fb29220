"""What is retained: checkpoints, and the entries that group them."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ninfer_pool.core.ledger import Pages, Units
from ninfer_pool.core.namespace import Namespace

if TYPE_CHECKING:
    from ninfer_pool.core.radix import Path


Known: TypeAlias = tuple[int, tuple[Any, ...]]
"""A position, and the pieces (see `ninfer_pool.tiers`) as which all before it is stored."""


class Table:
    """Page ids of one sequence, in order; shared by the checkpoints along it.

    A growing entry gives it the longer row: the whole pages below a checkpoint stay the same.
    """

    __slots__ = ("ids", "known")

    def __init__(self, ids: Pages, *, known: Known = (0, ())) -> None:
        self.ids = ids
        self.known = known

    def again(self) -> Table:
        """Return another table of the same pages."""
        return Table(self.ids, known=self.known)

    def grow(self, longer: Table, *, at: int) -> None:
        """Take over a longer row that has the same pages up to position ``at``.

        What was stored of content past there is of another computation.
        """
        upto, pieces = self.known
        upto = min(upto, at)
        self.known = longer.known if longer.known[0] >= upto else (upto, pieces)
        self.ids = longer.ids


class Checkpoint:
    """A position with everything needed to continue there: KV pages below it and an image.

    ``table`` tells its whole KV pages; ``tail`` is the partly filled last page (a fork goes on in
    a copy), -1 at a page's edge. ``image`` is the unit of its image
    pages (-1: none, plain attention). ``cuts`` are the off-grid cuts of the prefill that made it,
    None where some of it was not made by the canonical plan; such a checkpoint is never exact.
    ``guards`` counts pins and running leases: while there is one it is never evicted (G4).
    """

    __slots__ = (
        "cuts",
        "expires",
        "guards",
        "image",
        "kind",
        "lane",
        "path",
        "position",
        "spare",
        "stored",
        "table",
        "tail",
        "tick",
        "uses",
    )

    path: Path | None

    def __init__(
        self,
        *,
        position: int,
        kind: str,
        cuts: tuple[int, ...] | None,
        table: Table,
        tail: int,
        image: int,
        lane: int,
        tick: int,
    ) -> None:
        self.position = position
        self.kind = kind
        self.cuts = cuts
        self.table = table
        self.tail = tail
        self.image = image
        self.lane = lane
        self.tick = tick
        """When it was last consumed or made, in commits."""
        self.uses = 0
        self.guards = 0
        self.spare = False
        """Superseded: kept while there is room, the first to go."""
        self.expires: float | None = None
        self.stored: Any = None
        """What it is made of in tiers below (see `ninfer_pool.tiers`); None: never stored."""
        self.path = None
        """Where it is indexed; None before and after."""

    @property
    def where(self) -> Path:
        """Where it is indexed, while it is."""
        assert self.path is not None
        return self.path

    def __repr__(self) -> str:
        return f"Checkpoint({self.kind} at {self.position})"

    def exact_for(self, cuts: tuple[int, ...], grid: int, position: int) -> bool:
        """Say whether a cold run that cuts at ``cuts`` and the grid computes the same bits.

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
    """One retained sequence that is no prefix of another: its tip, and what policies look at.

    ``tip`` is its deepest checkpoint; the others lie on the path above it and may be shared.
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
        self.namespace = namespace
        self.tip = tip
        self.key = ""
        self.lane = lane
        """Its home lane: where it was computed last."""
        self.prompt_tokens = 0
        """Where the generated tail begins that nobody has consumed yet."""
        self.created = tick
        self.used = tick
        """When it was last committed to or consumed, in commits."""
        self.hits = 0
        """How often a commit consumed it."""
        self.gap = 0
        """Commits between its last two uses; 0 before the first."""
        self.saved = 0
        """Tokens of its tip that no other entry holds: what losing it costs."""
        self.bytes = 0
        """Bytes that losing it would free, about, as last computed."""
        self.gain = 0
        """Tokens that its tip spares beyond the checkpoint before it."""
        self.gain_bytes = 0
        """Bytes that losing its tip would free, about."""
        self.priority = 0
        self.released = False
        self.pinned: list[Checkpoint] | None = None
        """What its pin protects; None: not pinned."""
        self.inherited: Checkpoint | None = None
        """The tip among them that was pinned only because the entry grew to it."""

    def __repr__(self) -> str:
        return f"Entry(#{self.identity}, {self.tip.position} tokens, {self.hits} hits)"

    @property
    def tokens(self) -> int:
        """The position of its deepest checkpoint."""
        return self.tip.position

    def consume(self, tick: int) -> None:
        """Note that the commit at ``tick`` used it; once a commit."""
        if self.used != tick:
            self.gap = tick - self.used
            self.used = tick
            self.hits += 1
