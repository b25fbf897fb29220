"""Which returns of a trace can be served together: a plan for a clairvoyant policy to follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from ninfer_pool.sim.future import Future
from ninfer_pool.sim.trace import Trace

_Rooms = np.ndarray[tuple[int], np.dtype[np.int64]]
_TRADES: Final = (1.0, 0.5, 0.0)


class Stay(NamedTuple):
    """A prefix that must stay from one request's commit until another asks for it."""

    begin: int
    end: int
    room: int
    tokens: int


def served_returns(trace: Trace, *, room: Callable[[int], int], capacity: int) -> frozenset[int]:
    """Return the requests whose prefix a pool does well to keep until they come.

    Each stay takes the `room` of its tokens in every request between its ends, beside what the
    request of that moment leaves itself. Packed greedily by tokens / (room x duration ** trade),
    for each of a few trades (Berger, Beckmann and Harchol-Balter 2018 do so with 1); the plan that
    spares most counts. Prefixes that two stays share count twice, so the plan errs on the safe
    side. O(requests x mean duration of a stay) in numpy.
    """
    left = [room(request.total) if request.retain else 0 for request in trace.requests]
    floor = np.array(left, dtype=np.int64)
    stays = list(_stays(trace, room))
    best: tuple[int, frozenset[int]] = (-1, frozenset())
    for trade in _TRADES:
        best = max(best, _pack(stays, floor, capacity, trade), key=lambda plan: plan[0])
    return best[1]


def _stays(trace: Trace, room: Callable[[int], int]) -> Iterator[Stay]:
    """Yield for each request that shares something the stay that would serve it."""
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
