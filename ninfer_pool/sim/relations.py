"""Who shares a prefix with whom in a trace, told from its relations alone: no token is made up."""

from __future__ import annotations

from itertools import zip_longest

from ninfer_pool.sim.trace import Request, Trace


class Relations:
    """How many leading tokens any two full sequences of a trace share. O(requests) to build.

    Everything a prompt adds to its parent is new, so two sequences agree exactly as far as the
    least ``shared`` on the way from either to their nearest common ancestor; and, where they
    have them, as far as their media spans and salts agree.
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

    def _climb(self, one: Request, other: Request) -> int:
        # An ancestor has a lower id, so the higher of the two is the one to take a step.
        shared = min(one.total, other.total)
        while one is not other:
            if one.id < other.id:
                one, other = other, one
            shared = min(shared, one.shared)
            assert one.parent is not None, "one root, so there is a common ancestor"
            one = self._requests[one.parent]
        return shared


def parting_media(one: Request, other: Request) -> int:
    """Return where the first media span begins that not both have alike; past both for none."""
    for mine, theirs in zip_longest(one.media, other.media):
        if mine != theirs:
            return min(span[0] for span in (mine, theirs) if span is not None)
    return max(one.total, other.total)
