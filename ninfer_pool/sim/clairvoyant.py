"""The policy that has the whole trace: an upper bound to compare real policies with."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal, NamedTuple

import numpy as np

from ninfer_pool.core.entry import Entry, Node
from ninfer_pool.core.policy.base import Policy
from ninfer_pool.core.radix import previous_checkpoint
from ninfer_pool.sim.relations import NEVER, Future
from ninfer_pool.sim.trace import Trace

Mode = Literal["belady", "density", "worth", "plan"]
MODES: Final[tuple[Mode, ...]] = ("belady", "density", "worth", "plan")
_SLOTS: Final = 64
_EMPTY: Final = -1.0
_UNKNOWN: Final = 0.0
_KEPT: Final = 1e9
_Rooms = np.ndarray[tuple[int], np.dtype[np.int64]]
_TRADES: Final = (1.0, 0.5, 0.0)


class Clairvoyant(Policy):
    """Belady by checkpoint: entries without a next use are the first victims.

    It has for each entry the next request that resumes what eviction would take, the tokens
    that this spares, and the room that eviction frees. Entries with a next use are victims by
    mode:

    * ``belady``: the farthest next use;
    * ``density``: the least (tokens / room) / requests until the next use;
    * ``worth``: the least tokens / room;
    * ``plan``: what `served_returns` gave up, and within that as ``density``.

    With a bound on `entries`, victims are entries, each of one place. Else they are tips, whose
    room is the `pages` that they free. The replay calls `now` before each of a request's calls
    of the pool. One instance serves one run.

    O(1) per notice; O(entries) in numpy and O(log requests) per changed entry for victims.
    """

    def __init__(
        self,
        trace: Trace,
        *,
        mode: Mode,
        entries: int | None,
        pages: int,
        image_pages: int,
        page_tokens: int = 64,
    ) -> None:
        self._future = Future(trace)
        self._mode = mode
        self._whole = entries is not None
        self._image_pages = image_pages
        self._page_tokens = page_tokens
        self._planned: frozenset[int] = frozenset()
        if mode == "plan":
            room = self._places if self._whole else self._pages
            self._planned = served_returns(trace, room=room, capacity=entries or pages)
        self._current = 0
        self._owner: dict[int, int] = {}
        """A request whose full sequence begins with the entry's, by the entry's identity."""
        self._slot: dict[int, int] = {}
        self._free: list[int] = []
        self._entries: list[Entry | None] = []
        # By slot: the next use (or _EMPTY, or _UNKNOWN until it is measured) and the tokens
        # spared then per unit of room.
        self._next = np.empty(0)
        self._worth = np.empty(0)
        self._firm = np.empty(0)
        """By slot: _KEPT where the plan serves the next use, else 0."""

    def now(self, request: int) -> None:
        """Set the request that the pool serves next; all requests before it are past."""
        self._current = request
        self._future.move_to(request - 1)

    def on_insert(self, entry: Entry, tick: int) -> None:
        """Record an entry whose sequence the current request begins."""
        if not self._free:
            self._grow()
        slot = self._slot[entry.identity] = self._free.pop()
        self._entries[slot] = entry
        self.on_hit(entry, tick)

    def on_hit(self, entry: Entry, tick: int) -> None:
        """Measure it again: the current request's sequence continues the entry's."""
        self._future.move_to(self._current)
        self._owner[entry.identity] = self._current
        self._next[self._slot[entry.identity]] = _UNKNOWN

    def on_truncate(self, entry: Entry, tick: int) -> None:
        """Measure it again, for the earlier tip."""
        self._next[self._slot[entry.identity]] = _UNKNOWN

    def on_remove(self, entry: Entry) -> None:
        """Free an entry's slot."""
        slot = self._slot.pop(entry.identity)
        del self._owner[entry.identity]
        self._entries[slot] = None
        self._next[slot] = _EMPTY
        self._free.append(slot)

    def victims(self, tick: int) -> Iterator[Entry]:
        """Yield entries, the least worth keeping first."""
        if not self._slot:
            return
        stale = (self._next != _EMPTY) & (self._next <= max(self._future.seen, _UNKNOWN))
        for slot in np.flatnonzero(stale).tolist():
            self._measure(self._entry(slot))
        first = self._settle()
        yield self._entry(first)
        for slot in np.argsort(self._scores(), kind="stable").tolist():
            entry = self._entries[slot]
            if slot != first and entry is not None:
                yield entry

    def _settle(self) -> int:
        """Return the slot with the least score, by figures of this moment.

        Losses of other entries only raise an entry's score, so it is enough to measure the
        least one until it stays the least.
        """
        fresh: set[int] = set()
        while True:
            slot = int(self._scores().argmin())
            if slot in fresh:
                return slot
            fresh.add(slot)
            self._measure(self._entry(slot))

    def _scores(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        distance = self._next - self._future.seen
        if self._mode == "belady":
            scores = 1 / distance
        elif self._mode == "worth":
            # Without a next use the worth is 0.
            scores = self._worth.copy()
        else:
            scores = self._worth / distance + self._firm
        scores[self._next == _EMPTY] = np.inf
        return scores

    def _entry(self, slot: int) -> Entry:
        entry = self._entries[slot]
        assert entry is not None, "an empty slot was ranked"
        return entry

    def _grow(self) -> None:
        size = len(self._entries)
        more = max(size, _SLOTS)
        self._entries += [None] * more
        self._next = np.concatenate((self._next, np.full(more, _EMPTY)))
        self._worth = np.concatenate((self._worth, np.zeros(more)))
        self._firm = np.concatenate((self._firm, np.zeros(more)))
        self._free = list(range(size + more - 1, size - 1, -1))

    # -- measuring an entry ------------------------------------------------------------------

    def _measure(self, entry: Entry) -> None:
        slot, owner = self._slot[entry.identity], self._owner[entry.identity]
        base = shared_upto(entry)
        floor, least = self._loss(entry, base)
        use = self._future.next_use(owner, least)
        self._next[slot] = use
        self._worth[slot] = 0.0
        self._firm[slot] = _KEPT if use in self._planned else 0.0
        if use != NEVER:
            extent = min(self._future.extent(owner, int(use)), entry.tip.position)
            spared = max(self._resumable(entry, extent) - floor, 0)
            self._worth[slot] = spared / self._room(entry, max(base, floor))

    def _loss(self, entry: Entry, base: int) -> tuple[int, int]:
        """Return where requests can still resume without it, and the least position lost."""
        tip = entry.tip
        if self._whole:
            kept = deepest_mark(tip.node, base)
        else:
            before = previous_checkpoint(tip)
            kept = before.position if before is not None else 0
        if not self._image_pages:
            floor = max(base, kept) if not self._whole else base
            return floor, floor + 1
        return kept, first_mark(entry, base) if self._whole else tip.position

    def _resumable(self, entry: Entry, extent: int) -> int:
        """Return where a prompt that agrees with the entry up to `extent` resumes."""
        return extent if not self._image_pages else deepest_mark(entry.tip.node, extent)

    def _room(self, entry: Entry, floor: int) -> int:
        if self._whole:
            return 1
        return max(1, self._pages(entry.tip.position) - floor // self._page_tokens)

    def _pages(self, tokens: int) -> int:
        """Return the pages of a checkpoint, its image among them."""
        return -(-tokens // self._page_tokens) + self._image_pages

    @staticmethod
    def _places(tokens: int) -> int:
        """Return the room of an entry where entries are counted: one place."""
        return 1


def shared_upto(entry: Entry) -> int:
    """Return the position up to which other entries share this one's tokens; 0 for none."""
    node: Node | None = entry.tip.node
    upto = entry.tip.position
    below: Node | None = None
    while node is not None:
        children = (node.children or {}).items()
        shared = max(
            (
                at
                for at, group in children
                if at <= upto and any(c.entries and c is not below for c in group.values())
            ),
            default=0,
        )
        if shared:
            return shared
        below, upto, node = node, node.start, node.parent
    return 0


def deepest_mark(node: Node | None, position: int) -> int:
    """Return the deepest checkpoint at or before `position` above `node`; 0 for none."""
    while node is not None:
        count = bisect_right(node.positions, position)
        if count:
            return node.positions[count - 1]
        position = min(position, node.start)
        node = node.parent
    return 0


def first_mark(entry: Entry, base: int) -> int:
    """Return the first checkpoint past `base` at or above an entry's tip."""
    node: Node | None = entry.tip.node
    first = upto = entry.tip.position
    while node is not None:
        count = bisect_right(node.positions, base)
        if count < len(node.positions) and node.positions[count] <= upto:
            first = node.positions[count]
        if node.start <= base:
            break
        upto, node = node.start, node.parent
    return first


# -- the plan of the mode `plan` ------------------------------------------------------------------


class Stay(NamedTuple):
    """A prefix that must stay from one request's commit until another request's start."""

    begin: int
    end: int
    room: int
    tokens: int


def served_returns(trace: Trace, *, room: Callable[[int], int], capacity: int) -> frozenset[int]:
    """Return the requests whose prefix is worth its room until they come.

    Each stay takes the `room` of its tokens during every request between its ends, next to the
    room of that request's own sequence. Stays are packed greedily by
    tokens / (room x duration ** trade), for a few trades; the plan that spares most tokens wins.
    Berger, Beckmann and Harchol-Balter 2018 pack so with trade 1. Prefixes that two stays share
    count twice, so the plan is never too large. O(requests x mean duration of a stay) in numpy.
    """
    left = [room(request.total) if request.retain else 0 for request in trace.requests]
    floor = np.array(left, dtype=np.int64)
    stays = list(_stays(trace, room))
    best: tuple[int, frozenset[int]] = (-1, frozenset())
    for trade in _TRADES:
        best = max(best, _pack(stays, floor, capacity, trade), key=lambda plan: plan[0])
    return best[1]


def _stays(trace: Trace, room: Callable[[int], int]) -> Iterator[Stay]:
    """Yield the stay that would serve each request that shares a prefix."""
    future = Future(trace)
    for request in trace.requests:
        future.move_to(request.id - 1)
        tokens = future.shared[request.id]
        if tokens:
            holder = future.last_use(request.id, tokens)
            yield Stay(holder, request.id, room(tokens), tokens)


def _pack(
    stays: Sequence[Stay], floor: _Rooms, capacity: int, trade: float
) -> tuple[int, frozenset[int]]:
    """Take stays while they fit; return the tokens spared and the requests served."""

    def merit(stay: Stay) -> tuple[float, int]:
        return -stay.tokens / (stay.room * (stay.end - stay.begin) ** trade), stay.end

    used = floor.copy()
    spared = 0
    served: set[int] = set()
    for stay in sorted(stays, key=merit):
        between = used[stay.begin + 1 : stay.end]
        if not len(between) or int(between.max()) + stay.room <= capacity:
            between += stay.room
            spared += stay.tokens
            served.add(stay.end)
    return spared, frozenset(served)
