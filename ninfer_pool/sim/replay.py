"""Replays a trace through the same `PrefixPool` that serves, and adds up what it saved."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any, Literal

from ninfer_pool.core.config import PoolConfig
from ninfer_pool.core.lease import Lease
from ninfer_pool.core.namespace import Namespace
from ninfer_pool.core.planner import Chunk
from ninfer_pool.core.policy import POLICIES, Policy
from ninfer_pool.core.pool import PrefixPool
from ninfer_pool.core.prompt import Prompt
from ninfer_pool.core.results import Pending
from ninfer_pool.sim.below import Restores, TierSize, attach
from ninfer_pool.sim.geometry import Geometry
from ninfer_pool.sim.tally import Tally
from ninfer_pool.sim.tokens import TokenSource
from ninfer_pool.sim.trace import Request, Trace

OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The machine and model that a trace is replayed on; rates in tokens a second a lane."""

    geometry: Geometry
    model: str
    kv: str = "int8-g64"
    mtp: bool = True
    lanes: int = 1
    affinity: Literal["prefer", "strict"] = "prefer"
    prefill_rate: float = 1140.0
    decode_rate: float = 40.0
    tiers: tuple[TierSize, ...] = ()
    """The tiers below the device, the fastest first."""


@dataclass(slots=True)
class Outcome:
    """One run: an element of the JSON's ``runs``, and its detail lines."""

    run: dict[str, Any]
    detail: list[dict[str, Any]]


@dataclass(slots=True, kw_only=True)
class Plan:
    """One run to do: a policy under one bound."""

    policy: str
    entries: int | None = None
    budget_bytes: int | None = None
    make: Callable[[], Policy] | None = None
    """The policy's factory; None: by name."""
    now: Callable[[int], None] | None = None
    """Told which request the pool is about to act for: for policies that know the trace."""


@dataclass(slots=True, kw_only=True)
class _Job:
    request: Request
    lease: Lease
    begun: float
    stops: deque[Chunk] = field(default_factory=deque)


def pool_config(trace: Trace, setup: Setup, plan: Plan) -> PoolConfig:
    """Return the pool that a plan asks for: the slab is the budget plus lanes x longest request.

    Without a budget the slab holds all that the trace could ever leave.
    """
    sizes = setup.geometry.sizes(kv=setup.kv, mtp=setup.mtp)
    images = -(-sizes.image_bytes // sizes.page_bytes)
    longest = max(_pages(r, images, sizes.page_tokens, r.input + r.output) for r in trace.requests)
    everything = _everything(trace, images, sizes.page_tokens)
    room = everything if plan.budget_bytes is None else plan.budget_bytes // sizes.page_bytes
    room = max(1 + images, min(room, everything))
    return PoolConfig(
        num_pages=room + setup.lanes * longest,
        page_bytes=sizes.page_bytes,
        image_bytes=sizes.image_bytes,
        page_tokens=sizes.page_tokens,
        lanes=setup.lanes,
        retained_bytes=room * sizes.page_bytes,
        max_entries=plan.entries,
        policy=plan.make or POLICIES[plan.policy],
        affinity=setup.affinity,
        events=0,
    )


def _everything(trace: Trace, images: int, page_tokens: int) -> int:
    """Return the pages of all that a trace could ever leave."""
    return sum(
        _pages(r, images, page_tokens, r.input + r.output - r.shared) for r in trace.requests
    )


def _pages(request: Request, images: int, page_tokens: int, tokens: int) -> int:
    captures = 5 + len(request.boundaries)
    return -(-tokens // page_tokens) + 2 + captures * images


class Replay:
    """One run of a trace: requests wait in order of arrival for a lane, then hold a lease."""

    def __init__(
        self,
        trace: Trace,
        source: TokenSource,
        setup: Setup,
        plan: Plan,
        *,
        until: int | None = None,
    ) -> None:
        self.trace = trace
        self.source = source
        self.setup = setup
        self.pool = PrefixPool(pool_config(trace, setup, plan))
        config = self.pool.config
        # Tiers hold whole pages of each piece, and for a moment both an entry and its successor.
        everything = 2 * _everything(trace, config.image_pages, config.page_tokens)
        tiers = attach(
            self.pool,
            setup.tiers,
            prefill_rate=setup.prefill_rate,
            everything=everything * config.page_bytes,
        )
        self._restores = Restores(tiers, setup.tiers)
        self._ready: dict[int, float] = {}
        self.tally = Tally(trace, setup, plan, self.pool, self._restores)
        self.now = 0.0
        self._tell = plan.now
        self.until = len(trace.requests) if until is None else until
        self._events: list[tuple[float, int, _Job]] = []
        self._serial = count()
        self._waiting: deque[Request] = deque()
        self._wanted: set[tuple[Lease, int]] = set()

    def run(self, on_step: Callable[[int], None] | None = None) -> None:
        """Serve every request before `until`."""
        for request in self.trace.requests[: self.until]:
            while self._events and (self._waiting or self._events[0][0] <= request.t):
                if self._events[0][0] > request.t:
                    break
                self._step()
            self.now = max(self.now, request.t)
            self._waiting.append(request)
            self._start_waiting()
            if on_step is not None:
                on_step(request.id)
        while self._events:
            self._step()

    def _step(self) -> None:
        self.now, _, job = heappop(self._events)
        if job.stops:
            chunk = job.stops.popleft()
            self._prefill(job, chunk)
            self._schedule(job)
        else:
            self._finish(job)
        self._start_waiting()

    def _start_waiting(self) -> None:
        while self._waiting and self._start(self._waiting[0]):
            self._waiting.popleft()

    def prompt(self, request: Request) -> Prompt:
        """Return a request's prompt with made-up token ids."""
        space = Namespace(weights=self.setup.model, kv_dtype=self.setup.kv, salt=request.salt)
        return Prompt(
            self.source.prompt(request.id),
            namespace=space,
            boundaries=request.boundaries,
            media=request.media,
        )

    def _start(self, request: Request) -> bool:
        """Try to admit; say whether the request left the queue."""
        self._about(request)
        if self.pool.running == self.setup.lanes:
            return False
        prompt = self.prompt(request)
        started = time.perf_counter()
        best = self.pool.lookup(prompt).deepest
        self.tally.lookup_seconds.append(time.perf_counter() - started)
        lease = self._acquire(request, prompt, best)
        if lease is None:
            if self.pool.running:
                return False
            self.tally.refuse(request)
            return True
        if isinstance(lease, Pending):
            self._wanted.add((lease.lease, lease.position))
            return False
        begun = max(self.now, self._ready.pop(request.id, self.now))
        job = _Job(request=request, lease=lease, begun=begun, stops=deque(lease.chunks()))
        lease.restore()
        if self.setup.lanes == 1:
            while job.stops:
                self._prefill(job, job.stops.popleft())
        self._schedule(job)
        return True

    def _acquire(self, request: Request, prompt: Prompt, best: int) -> Lease | Pending | None:
        several = self.setup.lanes > 1
        answer = self.pool.acquire(
            prompt,
            reserve_tokens=request.output,
            retain=request.retain,
            wait_for_shared=several,
        )
        self._note_restore(request)
        if not isinstance(answer, Pending) or self._worth_waiting(answer, best):
            return answer
        answer = self.pool.acquire(prompt, reserve_tokens=request.output, retain=request.retain)
        self._note_restore(request)
        return answer

    def _note_restore(self, request: Request) -> None:
        """What was brought back for a request is there later, whether it waits meanwhile or not."""
        seconds = self._restores.seconds()
        if seconds:
            self._ready[request.id] = max(self.now, self._ready.get(request.id, 0.0)) + seconds

    def _worth_waiting(self, pending: Pending, best: int) -> bool:
        """Waiting costs what the other lease still prefills, going on what this one would."""
        rate = self.setup.prefill_rate
        job = next(job for _, _, job in self._events if job.lease is pending.lease)
        left = job.begun + (pending.position - job.lease.start) / rate - self.now
        return left <= (pending.position - best) / rate

    def _schedule(self, job: _Job) -> None:
        """Put the job's next step on the clock: its next checkpoint, else its end."""
        lease, request = job.lease, job.request
        while len(job.stops) > 1 and job.stops[0].checkpoint is None:
            self._prefill(job, job.stops.popleft())
        at = len(lease.prompt) if not job.stops else job.stops[0].end
        when = job.begun + (at - lease.start) / self.setup.prefill_rate
        if not job.stops:
            when += request.output / self.setup.decode_rate
        heappush(self._events, (when, next(self._serial), job))

    def _about(self, request: Request) -> None:
        if self._tell is not None:
            self._tell(request.id)

    def _prefill(self, job: _Job, chunk: Chunk) -> None:
        self._about(job.request)
        lease = job.lease
        lease.advance(lease.prompt.tokens[chunk.begin : chunk.end])
        if chunk.checkpoint is not None:
            lease.checkpoint(chunk.checkpoint, position=chunk.end)
            wanted = (lease, chunk.end)
            if self.setup.lanes > 1 and (chunk.checkpoint == "system" or wanted in self._wanted):
                self._wanted.discard(wanted)
                lease.publish()

    def _finish(self, job: _Job) -> None:
        lease, request = job.lease, job.request
        self._about(request)
        if request.output > 1:
            lease.advance(self.source.output(request.id)[:-1])
        lease.checkpoint("frontier", position=lease.frontier)
        lease.commit()
        self.tally.serve(request, lease)


def run_plan(
    trace: Trace,
    source: TokenSource,
    setup: Setup,
    plan: Plan,
    on_progress: OnProgress | None = None,
) -> Outcome:
    """Replay the whole trace under one plan."""
    replay = Replay(trace, source, setup, plan)
    total = len(trace.requests)

    def on_step(done: int) -> None:
        if on_progress is not None and done % 32 == 0:
            on_progress(plan.policy, done, total)

    replay.run(on_step)
    return Outcome(replay.tally.run(), replay.tally.detail)


def plans(
    policies: Sequence[str], entries: Sequence[int], budgets: Sequence[int]
) -> Iterator[Plan]:
    """Yield the online runs: policies x entries, then policies x budgets; never crossed."""
    for policy in policies:
        for most in entries:
            yield Plan(policy=policy, entries=most)
    for policy in policies:
        for budget in budgets:
            yield Plan(policy=policy, budget_bytes=budget)


def sweep(
    trace: Trace,
    setup: Setup,
    *,
    policies: Sequence[str],
    entries: Sequence[int],
    budgets: Sequence[int],
    on_progress: OnProgress | None = None,
) -> Iterator[Outcome]:
    """Yield every run of a trace, online policies first, then the bounds.

    ``single_lane`` and ``endless`` run once, ``clairvoyant`` for each K and each budget.
    """
    from ninfer_pool.sim.bounds import bounds

    source = TokenSource(trace)
    online: list[Outcome] = []
    for plan in plans(policies, entries, budgets):
        outcome = run_plan(trace, source, setup, plan, on_progress)
        online.append(outcome)
        yield outcome
    yield from bounds(trace, source, setup, online, entries, budgets, on_progress)


def explain_request(
    trace: Trace,
    setup: Setup,
    *,
    policy: str,
    entries: int | None,
    budget_bytes: int | None,
    request: int,
) -> str:
    """Return for one request what matched, what was lost, why, and what would have helped."""
    plan = Plan(policy=policy, entries=entries, budget_bytes=budget_bytes)
    replay = Replay(trace, TokenSource(trace), setup, plan, until=request)
    replay.run()
    prompt = replay.prompt(trace.requests[request])
    told = replay.pool.explain(prompt)
    places = [f"{m.position} ({m.kind})" for m in replay.pool.lookup(prompt)[-8:]]
    line = f"request {request} of {trace.name} under {policy}: {told}"
    return "\n".join([line, f"  deepest resumable positions: {', '.join(places) or 'none'}"])
