"""Which request of a trace next asks for a prefix: what a clairvoyant policy knows."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import NamedTuple

from ninfer_pool.sim.relations import Relations, parting_media
from ninfer_pool.sim.trace import Request, Trace

NEVER = math.inf


class _Owned(NamedTuple):
    """The requests that go on from tokens which one request brought, in order of a tour."""

    first: int
    """Place on the tour of the first of them."""
    parts: list[int]
    """-(position where each child parts from the owner), ascending."""
    ends: list[int]
    """Place on the tour past each child and all that go on from it."""


class Future:
    """Answers who asks next, and who asked last, for a prefix of a request's sequence.

    Requests are laid out on a tour in which all that begin with a given prefix are neighbours;
    trees of minima over the tour hold the ids of those to come and of those gone by.
    O(requests x log requests) to build; time only moves forward.
    """

    def __init__(self, trace: Trace) -> None:
        self.relations = Relations(trace)
        self.seen = -1
        """The last request that is no longer to come."""
        self._requests = trace.requests
        self.shared = [_shared(request, trace) for request in trace.requests]
        """For each request, how many tokens of its parent's sequence it can resume."""
        self._owner = self._owners()
        self._owned: list[_Owned] = []
        self._place = [0] * len(trace.requests)
        self._lay_out()
        self._coming = _Minima(len(trace.requests))
        self._gone = _Minima(len(trace.requests))
        for id, place in enumerate(self._place):
            self._coming.put(place, id)

    def move_to(self, seen: int) -> None:
        """Note that the requests up to `seen` are no longer to come. O(log requests) each."""
        for id in range(self.seen + 1, seen + 1):
            self._coming.put(self._place[id], NEVER)
            self._gone.put(self._place[id], -id)
        self.seen = max(self.seen, seen)

    def next_use(self, id: int, position: int) -> float:
        """Return the next request that begins with the first `position` tokens of `id`'s sequence.

        `NEVER` where none is to come. O(log requests), and O(generations) where the position is
        far from the end.
        """
        return self._coming.least(*self._range(self._bringer(id, position), position))

    def last_use(self, id: int, position: int) -> int:
        """Return the last request gone by whose sequence begins with those tokens, as above.

        The request that brought them, where no other does.
        """
        owner = self._bringer(id, position)
        last = self._gone.least(*self._range(owner, position))
        return owner if last == NEVER else -int(last)

    def _bringer(self, id: int, position: int) -> int:
        while self.shared[id] >= position:
            id = self._owner[id]
        return id

    def _range(self, owner: int, position: int) -> tuple[int, int]:
        """Return the places of all that begin with the owner's sequence up to `position`."""
        owned = self._owned[owner]
        count = bisect_right(owned.parts, -position)
        return owned.first, owned.ends[count - 1] if count else owned.first

    def extent(self, id: int, later: int) -> int:
        """Return how many tokens of `id`'s sequence the prompt of a later request begins with."""
        return min(self.relations.common(id, later), self._requests[later].input)

    # -- building --------------------------------------------------------------------------

    def _owners(self) -> list[int]:
        """For each request, the one that brought the token just below its own first one."""
        owners: list[int] = []
        for request in self._requests:
            shared = self.shared[request.id]
            owner = -1 if request.parent is None or not shared else request.parent
            while owner >= 0 and self.shared[owner] >= shared:
                owner = owners[owner]
            owners.append(owner)
        return owners

    def _lay_out(self) -> None:
        """Lay out the tour: children by falling position where they part, parents first."""
        count = len(self._requests)
        children: list[list[int]] = [[] for _ in range(count)]
        size = [1] * count
        for id in range(count - 1, -1, -1):
            if self._owner[id] >= 0:
                size[self._owner[id]] += size[id]
        for id in range(count):
            if self._owner[id] >= 0:
                children[self._owner[id]].append(id)
        place = 0
        for id in range(count):
            if self._owner[id] < 0:
                self._place[id] = place
                place += size[id]
            ordered = sorted(children[id], key=lambda child: -self.shared[child])
            owned = _Owned(self._place[id] + 1, [-self.shared[child] for child in ordered], [])
            end = owned.first
            for child in ordered:
                self._place[child] = end
                end += size[child]
                owned.ends.append(end)
            self._owned.append(owned)


class _Minima:
    """Numbers at places, and the least of any range of places: a segment tree. O(log places)."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._tree = [NEVER] * (2 * count)

    def put(self, place: int, value: float) -> None:
        """Replace the number at a place."""
        tree, node = self._tree, self._count + place
        tree[node] = value
        while node > 1:
            node //= 2
            tree[node] = min(tree[2 * node], tree[2 * node + 1])

    def least(self, begin: int, end: int) -> float:
        """Return the least number at the places ``[begin, end)``; `NEVER` for none."""
        tree, low, high, least = self._tree, begin + self._count, end + self._count, NEVER
        while low < high:
            if low & 1:
                least = min(least, tree[low])
                low += 1
            if high & 1:
                high -= 1
                least = min(least, tree[high])
            low //= 2
            high //= 2
        return least


def _shared(request: Request, trace: Trace) -> int:
    """Return how much of its parent's sequence a prompt can resume: salt and media count too."""
    if request.parent is None:
        return 0
    parent = trace.requests[request.parent]
    if parent.salt != request.salt:
        return 0
    return min(request.shared, parting_media(parent, request))
