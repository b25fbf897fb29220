"""The catalog of one store: its index, its entries by number and key, and their victim order.

It counts no pages: `ninfer_pool.core.state` joins it with the ledger.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from math import inf

from sortedcontainers import SortedList

from ninfer_pool.core import identity, radix
from ninfer_pool.core.config import PoolConfig
from ninfer_pool.core.entry import Checkpoint, Entry, Node
from ninfer_pool.core.identity import Attribute, Namespace
from ninfer_pool.core.policy.priority import VictimOrder

SLACK = 64
"""Deadlines of removed checkpoints that may be kept until the rest is tidied."""


class Superseded:
    """Superseded checkpoints in the order in which they are evicted. O(log n) each.

    Tails that no entry continues go before points on a live path. Among those on a path, the
    least distance to the checkpoint before goes first, so that the worst gap stays small.
    """

    __slots__ = ("_items", "_order", "_serial")

    def __init__(self) -> None:
        self._order: SortedList[tuple[int, int, int]] = SortedList()
        self._items: dict[Checkpoint, tuple[int, int, int]] = {}
        self._serial: dict[int, Checkpoint] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Checkpoint]:
        """Yield them, the first victim first."""
        for item in self._order:
            yield self._serial[item[-1]]

    def add(self, checkpoint: Checkpoint, *, gap: int, serial: int) -> None:
        """Add a checkpoint ``gap`` tokens past the one before it; a gap of 0 goes first."""
        checkpoint.superseded = True
        self._items[checkpoint] = item = (gap, checkpoint.tick, serial)
        self._serial[serial] = checkpoint
        self._order.add(item)

    def discard(self, checkpoint: Checkpoint) -> None:
        """Take a checkpoint out: it is removed, or of use again."""
        if checkpoint.superseded:
            checkpoint.superseded = False
            item = self._items.pop(checkpoint)
            del self._serial[item[-1]]
            self._order.remove(item)

    def widen(self, checkpoint: Checkpoint, *, gap: int) -> None:
        """Give one of them a new gap: the checkpoint before it was removed."""
        serial = self._items[checkpoint][-1]
        self.discard(checkpoint)
        self.add(checkpoint, gap=gap, serial=serial)


class Catalog:
    """Index roots, entries, keys, superseded checkpoints, deadlines and the victim order."""

    def __init__(self, config: PoolConfig) -> None:
        self.config = config
        self.roots: dict[Namespace, Node] = {}
        self.entries: dict[int, Entry] = {}
        self.keys: dict[str, dict[int, Entry]] = {}
        self.order = VictimOrder(config.make_policy)
        self.superseded = Superseded()
        self.serials = itertools.count()
        self.checkpoints = 0
        self.version = 0
        """Changes of the index so far: an older lookup may find something else now."""
        self.deadlines: list[tuple[float, int, Checkpoint]] = []
        self._deadline_serials = itertools.count()
        self._digests: dict[Namespace, bytes] = {}

    # -- keys and namespaces ---------------------------------------------------------------

    def key(
        self,
        namespace: Namespace,
        tokens: Sequence[identity.Bytes],
        attributes: Sequence[Attribute],
    ) -> str:
        """Return the key of a sequence, given in parts. One hash pass."""
        digest = self._digests.get(namespace)
        if digest is None:
            config = self.config
            digest = namespace.digest(grid=config.grid, min_chunk=config.min_chunk)
            if namespace in self.roots:
                self._digests[namespace] = digest
        return identity.sequence_key(digest, tokens, attributes)

    def key_of(self, namespace: Namespace, checkpoint: Checkpoint) -> str:
        """Return the key of the sequence up to a checkpoint. One hash pass."""
        node, position = checkpoint.anchor, checkpoint.position
        parts = radix.token_parts(node, 0, position)
        return self.key(namespace, parts, radix.attributes_to(node, position))

    def rename(self, entry: Entry, key: str) -> None:
        """Store an entry under another key; the empty one is none."""
        if entry.key:
            named = self.keys[entry.key]
            del named[entry.identity]
            if not named:
                del self.keys[entry.key]
        entry.key = key
        if key:
            self.keys.setdefault(key, {})[entry.identity] = entry

    def root(self, namespace: Namespace) -> Node:
        """Return the root of a namespace, made where there is none."""
        root = self.roots.get(namespace)
        if root is None:
            root = Node(parent=None, start=0, tokens=bytearray(), attributes=[])
            self.roots[namespace] = root
        return root

    def namespace_of(self, node: Node) -> Namespace:
        """Return the namespace of a node. O(depth)."""
        while node.parent is not None:
            node = node.parent
        return next(space for space, root in self.roots.items() if root is node)

    def sweep(self, namespace: Namespace) -> None:
        """Remove a namespace under which nothing is left."""
        root = self.roots.get(namespace)
        if root is not None and not root.tokens and not root.children:
            del self.roots[namespace]
            self._digests.pop(namespace, None)

    # -- the checkpoints of an entry -------------------------------------------------------

    def path_checkpoints(self, entry: Entry) -> Iterator[Checkpoint]:
        """Yield every checkpoint on an entry's path, deepest first; none of a removed entry."""
        checkpoint = entry.tip if entry.identity in self.entries else None
        while checkpoint is not None:
            yield checkpoint
            checkpoint = radix.previous_checkpoint(checkpoint)

    def private_checkpoints(self, entry: Entry, *, base: int | None = None) -> Iterator[Checkpoint]:
        """Yield the checkpoints that only this entry holds, past its `base`, deepest first."""
        base = self.base(entry) if base is None else base
        checkpoint: Checkpoint | None = entry.tip
        while checkpoint is not None and checkpoint.position > base:
            yield checkpoint
            checkpoint = radix.previous_checkpoint(checkpoint)

    def base(self, entry: Entry) -> int:
        """Return the position up to which other entries share its path; 0 for none. O(depth)."""
        node: Node | None = entry.tip.node
        upto = entry.tip.position
        below: Node | None = None
        while node is not None:
            shared = [min(start, upto) for start in node.live]
            if below is not None and node.live[upto] == below.entries:
                shared.remove(upto)
            if below is not None and node.tip is not None:
                shared.append(upto)
            if shared:
                return max(shared)
            below, upto, node = node, node.start, node.parent
        return 0

    def gap(self, checkpoint: Checkpoint) -> int:
        """Return the tokens between a checkpoint and the one before it on its path."""
        before = radix.previous_checkpoint(checkpoint)
        return checkpoint.position - (before.position if before is not None else 0)

    def protects(self, entry: Entry) -> bool:
        """Return whether a pin or a lease protects a checkpoint that only this entry holds."""
        return any(checkpoint.refs for checkpoint in self.private_checkpoints(entry))

    # -- tips ------------------------------------------------------------------------------

    def measure(self, entry: Entry) -> None:
        """Compute the sizes that policies read."""
        base, position = self.base(entry), entry.tip.position
        before = position - self.gap(entry.tip)
        entry.saved, entry.gain = position - base, position - before
        entry.bytes = self._bytes(base, position)
        entry.gain_bytes = self._bytes(before, position)

    def _bytes(self, begin: int, end: int) -> int:
        """Return the bytes of the pages past ``begin`` and of one image at ``end``."""
        config = self.config
        pages = -(-end // config.page_tokens) - begin // config.page_tokens + config.image_pages
        return pages * config.page_bytes

    def set_tip(self, entry: Entry, tip: Checkpoint) -> None:
        """Make an entry end at another checkpoint, which is superseded no more."""
        self.superseded.discard(tip)
        entry.tip = tip
        tip.anchor.tip = entry
        tip.anchor.count_entries(1)
        self.measure(entry)

    def clear_tip(self, entry: Entry) -> None:
        """Take an entry off its tip."""
        node = entry.tip.anchor
        node.tip = None
        node.count_entries(-1)

    def remove_entry(self, entry: Entry) -> None:
        """Remove an entry that has no tip any more."""
        self.order.on_remove(entry)
        del self.entries[entry.identity]
        self.rename(entry, "")

    # -- checkpoints -----------------------------------------------------------------------

    def supersede(self, checkpoint: Checkpoint, *, gap: int) -> None:
        """Make a checkpoint superseded: a first victim."""
        self.superseded.add(checkpoint, gap=gap, serial=next(self.serials))

    def remove(self, checkpoint: Checkpoint) -> None:
        """Remove a checkpoint that is no tip from the index."""
        node = checkpoint.anchor
        self.version += 1
        self.superseded.discard(checkpoint)
        after = bisect_left(node.positions, checkpoint.position + 1)
        follower = node.checkpoints[after] if after < len(node.checkpoints) else None
        radix.remove_checkpoint(checkpoint)
        checkpoint.node = None
        self.checkpoints -= 1
        if follower is not None and follower.superseded:
            self.superseded.widen(follower, gap=self.gap(follower))
        radix.prune(node)

    def remove_all(self, node: Node) -> None:
        """Remove every checkpoint of a node without children at once."""
        self.version += 1
        for checkpoint in node.checkpoints:
            self.superseded.discard(checkpoint)
            checkpoint.node = None
        self.checkpoints -= len(node.checkpoints)
        node.checkpoints, node.positions = [], []
        radix.prune(node)

    def dead_below(self, node: Node, tip: Checkpoint, floor: int) -> list[Checkpoint]:
        """Return the unprotected superseded tails below a tip that is about to be removed.

        No entry continues past ``floor``, the end of the part shared with others or deeper.
        """
        dead = [each for each in node.checkpoints if each.position > tip.position]
        above: Node | None = node
        while above is not None:
            for child in above.children_from(floor + 1):
                dead += [each for below in child.subtree() for each in below.checkpoints]
            above = above.parent if above.start > floor else None
        return [each for each in dict.fromkeys(dead) if each is not tip and not each.refs]

    # -- deadlines -------------------------------------------------------------------------

    def set_deadline(self, checkpoint: Checkpoint, until: float) -> None:
        """Make a checkpoint expire at ``until``; infinity: never."""
        checkpoint.expires = until
        if until < inf:
            heappush(self.deadlines, (until, next(self._deadline_serials), checkpoint))
        if len(self.deadlines) > 2 * self.checkpoints + SLACK:  # most are of removed ones
            self.deadlines = [each for each in self.deadlines if _is_current(each)]
            heapify(self.deadlines)

    def expired(self, now: float) -> Iterator[Checkpoint]:
        """Yield the checkpoints whose time is over; one with references is kept for later."""
        busy = []
        while self.deadlines and self.deadlines[0][0] <= now:
            item = heappop(self.deadlines)
            if _is_current(item):
                if item[2].refs:
                    busy.append(item)
                else:
                    yield item[2]
        for item in busy:
            heappush(self.deadlines, item)


def _is_current(deadline: tuple[float, int, Checkpoint]) -> bool:
    return deadline[2].node is not None and deadline[2].expires == deadline[0]
