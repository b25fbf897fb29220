"""The bound of engines without a pool: each lane resumes only its last request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ninfer_pool.core.results import reuse_of
from ninfer_pool.sim.relations import Relations
from ninfer_pool.sim.setup import RunOutcome, RunPlan, Setup
from ninfer_pool.sim.tally import Tally
from ninfer_pool.sim.trace import Trace, TraceRequest


class LaneResult(NamedTuple):
    """The reuse of one request from the lane that served it; positions in tokens."""

    id: int
    reused: int
    reuse_kind: str | None
    """Kind of the point resumed at, ``frontier``, ``turn`` or ``response``; None for none."""
    matched: int
    """Leading tokens that agree with the last request of the best of the free lanes."""
    lane: int

    @property
    def reuse(self) -> str:
        """The reuse path, named as `Lease.reuse` names it."""
        return reuse_of(self.reuse_kind)


class ResumePoint(NamedTuple):
    """A position where a lane can be resumed."""

    position: int
    kind: str


@dataclass(slots=True)
class _Lane:
    index: int
    free_at: float = float("-inf")
    last: int | None = None
    """Its last request; None where that one retained nothing."""
    points: tuple[ResumePoint, ...] = ()


def run_single_lane(trace: Trace, setup: Setup) -> RunOutcome:
    """Return the run in which each lane keeps its last request alone."""
    tally = Tally(trace, setup, RunPlan(policy="single_lane"))
    served = single_lane(
        trace,
        lanes=setup.lanes,
        prefill_rate=setup.prefill_rate,
        decode_rate=setup.decode_rate,
    )
    for result in served:
        lost = max(0, result.matched - result.reused)
        reason = "no_checkpoint_before" if lost else "hit" if result.reused else "no_entry"
        tally.add(
            trace.requests[result.id],
            reused=result.reused,
            exact=not result.reused,
            tier="device" if result.reused else None,
            reuse=result.reuse,
            reason=reason,
            lost=lost,
        )
    return RunOutcome(tally.run(), tally.detail)


def single_lane(
    trace: Trace, *, lanes: int, prefill_rate: float, decode_rate: float
) -> list[LaneResult]:
    """Serve a trace without a pool; return each request's reuse, in order of service.

    A lane keeps only the frontier, turn and response points of its last request. A request waits
    in order of arrival for a free lane. It overwrites the one with the most reusable tokens, else
    the least recently used. It then takes prefilled / `prefill_rate` + output / `decode_rate`
    seconds. O(requests x lanes).
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


def _choose(request: TraceRequest, free: Sequence[_Lane], relations: Relations) -> LaneResult:
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


def _points(
    request: TraceRequest, reused: int, before: tuple[ResumePoint, ...]
) -> Iterator[ResumePoint]:
    """Yield the points that a lane holds after a request, the frontier first.

    The lane has a point below the reused tokens only if it held it already: the state at it was
    not computed again.
    """
    yield ResumePoint(request.input + max(request.output - 1, 0), "frontier")
    declared = {kind: position for position, kind in request.boundaries}
    held = {point.position for point in before}
    for kind in ("turn", "response"):
        position = declared.get(kind, request.input if kind == "turn" else 0)
        if position and (position >= reused or position in held):
            yield ResumePoint(position, kind)
