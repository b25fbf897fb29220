"""What engines without a pool do today: each lane resumes only what it ran last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ninfer_pool.core.results import reuse_of
from ninfer_pool.sim.relations import Relations
from ninfer_pool.sim.trace import Request, Trace


class LaneResult(NamedTuple):
    """What one request reused of the lane that it ran in; positions in tokens."""

    id: int
    reused: int
    reuse_kind: str | None
    """``frontier``, ``turn`` or ``response``: the point resumed at; None for none."""
    matched: int
    """Leading tokens that agree with what the best of the free lanes ran last."""
    lane: int

    @property
    def reuse(self) -> str:
        """The reuse path, named as `Lease.reuse` names it."""
        return reuse_of(self.reuse_kind)


class Point(NamedTuple):
    """A position where a lane can be resumed."""

    position: int
    kind: str


@dataclass(slots=True)
class _Lane:
    index: int
    free_at: float = float("-inf")
    last: int | None = None
    """The request that it ran last; None where that left nothing."""
    points: tuple[Point, ...] = ()


def single_lane(
    trace: Trace, *, lanes: int, prefill_rate: float, decode_rate: float
) -> list[LaneResult]:
    """Serve a trace without a pool; return what each request reused, in order of service.

    A lane keeps its last request's frontier, turn and response points and nothing else. A
    request waits, in order of arrival, for a free lane; of those it takes the one with the most
    reusable tokens, else the least recently used, and overwrites it. It then takes prefilled /
    `prefill_rate` + output / `decode_rate` seconds.

    O(requests x lanes).
    """
    relations = Relations(trace)
    pool = [_Lane(index) for index in range(lanes)]
    results: list[LaneResult] = []
    now = float("-inf")
    for request in trace.requests:
        now = max(now, request.t, min(lane.free_at for lane in pool))
        free = [lane for lane in pool if lane.free_at <= now]
        result = _choose(request, free, relations)
        results.append(result)
        taken = pool[result.lane]
        points = tuple(_points(request, result.reused, taken.points))
        taken.points = points if request.retain else ()
        taken.last = request.id if request.retain else None
        prefilled = request.input - result.reused
        taken.free_at = now + prefilled / prefill_rate + request.output / decode_rate
    return results


def _choose(request: Request, free: Sequence[_Lane], relations: Relations) -> LaneResult:
    """Return the best of the free lanes: most reusable tokens, then least recently used."""
    best = LaneResult(request.id, -1, None, 0, -1)
    matched = 0
    for lane in sorted(free, key=lambda lane: (lane.free_at, lane.index)):
        shared = 0
        if lane.last is not None:
            shared = min(relations.common(lane.last, request.id), request.input)
        matched = max(matched, shared)
        usable = (point for point in lane.points if point.position <= shared)
        position, kind = max(usable, key=lambda point: point.position, default=(0, None))
        if position > best.reused:
            best = LaneResult(request.id, position, kind, 0, lane.index)
    return best._replace(matched=matched)


def _points(request: Request, reused: int, before: tuple[Point, ...]) -> Iterator[Point]:
    """Yield the points that a lane holds after a request, the frontier first.

    A point below what was reused is there only if the lane held it already: the state at it was
    not computed again.
    """
    yield Point(request.input + max(request.output - 1, 0), "frontier")
    declared = {kind: position for position, kind in request.boundaries}
    held = {point.position for point in before}
    for kind in ("turn", "response"):
        position = declared.get(kind, request.input if kind == "turn" else 0)
        if position and (position >= reused or position in held):
            yield Point(position, kind)
