"""Which returns of a trace can be served together: a plan for a clairvoyant policy to follow."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np

from ninfer_pool.sim.trace import Request, Trace

_TRADES: Final = (1.0, 0.5, 0.0)


class Stay(NamedTuple):
    """A prefix that must stay from one request's commit until another asks for it."""

    begin: int
    end: int
    room: int
    tokens: int


def served_returns(
    trace: Trace, *, room: Callable[[int], int], capacity: int
) -> frozenset[int]:
    """Return the requests whose prefix a pool does well to keep until they come.

    Each stay takes the `room` of its tokens in every request between its ends, beside what the
    request of that moment leaves itself. Packed greedily by tokens / (room x duration ** trade),
    for each of a few trades (Berger, Beckmann and Harchol-Balter 2018 do so with 1); the plan that
    spares most counts. Prefixes that two stays share count twice, so the plan errs on the safe
    side. O(requests ** 2) in numpy, with small constants.
    """
    requests = trace.requests
    floor = np.array([room(request.total) if request.retain else 0 for request in requests])
    stays = _stays(requests, room)
    best: tuple[int, frozenset[int]] = (-1, frozenset())
    for trade in _TRADES:
        best = max(best, _pack(stays, floor, capacity, trade), key=lambda plan: plan[0])
    return best[1]


def _stays(requests: Sequence[Request], room: Callable[[int], int]) -> list[Stay]:
    """Return for each request that shares something the stay that would serve it."""
    last = _Holders(requests)
    stays: list[Stay] = []
    for request in requests:
        holder = last.of(request)
        if holder is not None:
            tokens = request.shared
            stays.append(Stay(holder, request.id, max(1, room(tokens)), tokens))
        last.add(request)
    return stays


class _Holders:
    """The last request so far whose full sequence covers a prefix of another's."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests
        self._covers: list[tuple[list[int], list[int]]] = []

    def of(self, request: Request) -> int | None:
        """Return who last held the prefix that `request` shares with its parent."""
        if request.parent is None or not request.shared:
            return None
        depths, ids = self._covers[request.parent]
        at = bisect_right(depths, -request.shared)
        return max(ids[:at], default=request.parent)

    def add(self, request: Request) -> None:
        """Note a request: it holds what it shares with every ancestor, too."""
        self._covers.append(([-request.total], [request.id]))
        parent, shared = request.parent, request.shared
        while parent is not None and shared:
            depths, ids = self._covers[parent]
            at = bisect_right(depths, -shared)
            # Whoever held less, or as much but earlier, is not the last any more.
            kept = [(d, i) for d, i in zip(depths[:at], ids[:at], strict=True) if d < -shared]
            self._covers[parent] = (
                [*(d for d, _ in kept), -shared],
                [*(i for _, i in kept), request.id],
            )
            ancestor = self._requests[parent]
            parent, shared = ancestor.parent, min(shared, ancestor.shared)


def _pack(
    stays: Sequence[Stay], floor: np.ndarray, capacity: int, trade: float
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
