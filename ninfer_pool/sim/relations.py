"""The prefixes that a trace's sequences share, and when one is next used; no token is made up."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from ninfer_pool.sim.trace import Trace, TraceRequest

NEVER = math.inf


class Relations:
    """The leading tokens that any two full sequences of a trace share. O(requests) to build.

    All tokens that a prompt adds to its parent are new. So two sequences agree up to the least
    ``shared`` on the path from either to their nearest common ancestor. Media spans and salts
    that differ end the agreement earlier.
    """

    def __init__(self, trace: Trace) -> None:
        self._requests = trace.requests
        self._roots: list[int] = []
        for request in trace.requests:
            joined = request.parent is not None and request.shared
            self._roots.append(self._roots[request.parent or 0] if joined else request.id)

    def common(self, one: int, other: int) -> int:
        """Return how many leading tokens the full sequences of two requests share.

        O(generations between them).
        """
        if self._roots[one] != self._roots[other]:
            return 0
        first, second = self._requests[one], self._requests[other]
        if first.salt != second.salt:
            return 0
        shared = self._climb(first, second)
        return min(shared, parting_media(first, second)) if first.media or second.media else shared

    def _climb(self, one: TraceRequest, other: TraceRequest) -> int:
        # An ancestor has a lower id, so the higher of the two takes a step.
        shared = min(one.total, other.total)
        while one is not other:
            if one.id < other.id:
                one, other = other, one
            shared = min(shared, one.shared)
            assert one.parent is not None, "one root, so there is a common ancestor"
            one = self._requests[one.parent]
        return shared


def parting_media(one: TraceRequest, other: TraceRequest) -> int:
    """Return where the first media span begins that differs; past both sequences for none."""
    for mine, theirs in zip_longest(one.media, other.media):
        if mine != theirs:
            return min(span[0] for span in (mine, theirs) if span is not None)
    return max(one.total, other.total)


def owners(requests: Sequence[TraceRequest], shared: Sequence[int]) -> list[int]:
    """Return per request the ancestor that brought the token just below its first new one.

    ``shared`` holds per request the tokens it takes from its parent; -1 where it takes none.
    """
    found: list[int] = []
    for request in requests:
        limit = shared[request.id]
        owner = -1 if request.parent is None or not limit else request.parent
        while owner >= 0 and shared[owner] >= limit:
            owner = found[owner]
        found.append(owner)
    return found


class _Owned(NamedTuple):
    """The requests that continue tokens which one request brought, in order of a tour."""

    first: int
    """Place of the first of them on the tour."""
    parts: list[int]
    """-(position where each child parts from the owner), ascending."""
    ends: list[int]
    """Place on the tour past each child and all that continue it."""


class Future:
    """The next and the last use of any prefix of a request's sequence.

    A tour orders requests so that all with a given prefix are neighbours. Trees of minima over
    the tour hold the ids of coming and of past requests. Time only moves forward.
    O(requests x log requests) to build.
    """

    def __init__(self, trace: Trace) -> None:
        self.relations = Relations(trace)
        self.seen = -1
        """The last request that is past."""
        self._requests = trace.requests
        self.shared = [_resumable(request, trace) for request in trace.requests]
        """Per request, how many tokens of its parent's sequence it can resume."""
        self._owner = owners(trace.requests, self.shared)
        self._owned: list[_Owned] = []
        self._place = [0] * len(trace.requests)
        self._order()
        self._coming = _Minima(len(trace.requests))
        self._past = _Minima(len(trace.requests))
        for id, place in enumerate(self._place):
            self._coming.put(place, id)

    def move_to(self, seen: int) -> None:
        """Mark the requests up to `seen` as past. O(log requests) each."""
        for id in range(self.seen + 1, seen + 1):
            self._coming.put(self._place[id], NEVER)
            self._past.put(self._place[id], -id)
        self.seen = max(self.seen, seen)

    def next_use(self, id: int, position: int) -> float:
        """Return the next request that begins with the first `position` tokens of `id`'s sequence.

        `NEVER` where none is to come. O(log requests), and O(generations) where the position is
        far from the end.
        """
        return self._coming.least(*self._range(self._bringer(id, position), position))

    def last_use(self, id: int, position: int) -> int:
        """Return the last past request that begins with those tokens, else their bringer."""
        owner = self._bringer(id, position)
        last = self._past.least(*self._range(owner, position))
        return owner if last == NEVER else -int(last)

    def extent(self, id: int, later: int) -> int:
        """Return how many tokens of `id`'s sequence the prompt of a later request begins with."""
        return min(self.relations.common(id, later), self._requests[later].input)

    def _bringer(self, id: int, position: int) -> int:
        while self.shared[id] >= position:
            id = self._owner[id]
        return id

    def _range(self, owner: int, position: int) -> tuple[int, int]:
        """Return the places of all that begin with the owner's sequence up to `position`."""
        owned = self._owned[owner]
        count = bisect_right(owned.parts, -position)
        return owned.first, owned.ends[count - 1] if count else owned.first

    def _order(self) -> None:
        """Order the tour: children by falling position where they part, parents first."""
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


def _resumable(request: TraceRequest, trace: Trace) -> int:
    """Return how much of its parent's sequence a prompt can resume: salt and media count too."""
    if request.parent is None:
        return 0
    parent = trace.requests[request.parent]
    if parent.salt != request.salt:
        return 0
    return min(request.shared, parting_media(parent, request))
