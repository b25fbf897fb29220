"""Replays a trace through the same `PrefixPool` that serves, and sums up the tokens it reused."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

import numpy as np

from ninfer_pool.core.identity import Namespace
from ninfer_pool.core.lease import Lease, Pending
from ninfer_pool.core.planner import Chunk
from ninfer_pool.core.pool import PrefixPool
from ninfer_pool.core.prompt import Prompt
from ninfer_pool.sim.setup import RunOutcome, RunPlan, Setup, all_pages, pool_config
from ninfer_pool.sim.tally import Tally
from ninfer_pool.sim.tiers import SimulatedTiers
from ninfer_pool.sim.tokens import Tokens, TokenSource
from ninfer_pool.sim.trace import Trace, TraceRequest


@dataclass(slots=True)
class _Job:
    request: TraceRequest
    lease: Lease
    tokens: Tokens
    start: int
    """Prompt tokens that the lease reused."""
    begun: float
    chunks: deque[Chunk]


class Replay:
    """One run of a trace: requests wait in order of arrival for a lane, then hold a lease."""

    def __init__(
        self,
        trace: Trace,
        source: TokenSource,
        setup: Setup,
        plan: RunPlan,
        *,
        until: int | None = None,
    ) -> None:
        self.trace = trace
        self.source = source
        self.setup = setup
        self.pool = PrefixPool(pool_config(trace, setup, plan))
        self.tally = Tally(trace, setup, plan)
        self.now = 0.0
        self.until = len(trace.requests) if until is None else until
        config = self.pool.config
        # Tiers store whole pages of each piece, and for a moment both an entry and its successor.
        everything = 2 * all_pages(trace, config.image_pages, config.page_tokens)
        self._tiers = SimulatedTiers(
            self.pool,
            setup.tiers,
            prefill_rate=setup.prefill_rate,
            everything=everything * config.page_bytes,
        )
        self._namespaces: dict[str | None, Namespace] = {}
        self._ready: dict[int, float] = {}
        self._lookup_seconds: list[float] = []
        self._on_request = plan.on_request
        self._events: list[tuple[float, int, _Job]] = []
        self._serial = count()
        self._waiting: deque[TraceRequest] = deque()
        self._wanted: set[tuple[Lease, int]] = set()

    def run(self, on_step: Callable[[int], None] | None = None) -> None:
        """Serve every request before `until`."""
        for request in self.trace.requests[: self.until]:
            while self._events and self._events[0][0] <= request.t:
                self._step()
            self.now = max(self.now, request.t)
            self._waiting.append(request)
            self._start_waiting()
            if on_step is not None:
                on_step(request.id)
        while self._events:
            self._step()

    def outcome(self) -> RunOutcome:
        """Return the run's JSON object and detail lines."""
        stats = self.pool.stats()
        counters, size = stats.counters, self.pool.config.page_bytes
        run = self.tally.run(
            held_bytes=stats.retained_bytes,
            below=self._tiers.figures(),
            evictions=counters.evictions,
            truncations=counters.truncations,
            superseded=counters.superseded,
            evicted_bytes=counters.evicted_pages * size,
            peak_bytes=counters.peak_retained_pages * size,
            peak_slab_bytes=counters.peak_used_pages * size,
            images_saved=counters.images_saved,
            captures_skipped=counters.captures_skipped,
            lookup_us=self._lookup_us(),
        )
        return RunOutcome(run, self.tally.detail)

    def prompt(self, request: TraceRequest, tokens: Tokens) -> Prompt:
        """Return a request's prompt with its made-up token ids."""
        namespace = self._namespaces.get(request.salt)
        if namespace is None:
            namespace = Namespace(
                weights=self.setup.model, kv_dtype=self.setup.kv, salt=request.salt
            )
            self._namespaces[request.salt] = namespace
        return Prompt(
            tokens, namespace=namespace, boundaries=request.boundaries, media=request.media
        )

    # -- the clock -------------------------------------------------------------------------

    def _step(self) -> None:
        self.now, _, job = heappop(self._events)
        if job.chunks:
            self._prefill(job, job.chunks.popleft())
            self._schedule(job)
        else:
            self._finish(job)
        self._start_waiting()

    def _schedule(self, job: _Job) -> None:
        """Put the job's next step on the clock: its next checkpoint, else its end."""
        request = job.request
        while len(job.chunks) > 1 and job.chunks[0].checkpoint is None:
            self._prefill(job, job.chunks.popleft())
        at = request.input if not job.chunks else job.chunks[0].end
        when = job.begun + (at - job.start) / self.setup.prefill_rate
        if not job.chunks:
            when += request.output / self.setup.decode_rate
        heappush(self._events, (when, next(self._serial), job))

    # -- admission -------------------------------------------------------------------------

    def _start_waiting(self) -> None:
        while self._waiting and self._start(self._waiting[0]):
            self._waiting.popleft()

    def _start(self, request: TraceRequest) -> bool:
        """Try to admit; return True if the request left the queue."""
        self._notify(request)
        if len(self._events) == self.setup.lanes:
            return False
        tokens = self.source.prompt(request.id)
        prompt = self.prompt(request, tokens)
        started = time.perf_counter()
        best = self.pool.lookup(prompt).deepest
        self._lookup_seconds.append(time.perf_counter() - started)
        lease = self._acquire(request, prompt, best)
        if lease is None:
            if self._events:
                return False
            self.tally.add(request)
            return True
        if isinstance(lease, Pending):
            self._wanted.add((lease.lease, lease.position))
            return False
        begun = max(self.now, self._ready.pop(request.id, self.now))
        chunks = deque(lease.chunks())
        job = _Job(request, lease, tokens, start=lease.start, begun=begun, chunks=chunks)
        lease.restore()
        if self.setup.lanes == 1:
            while job.chunks:
                self._prefill(job, job.chunks.popleft())
        self._schedule(job)
        return True

    def _acquire(self, request: TraceRequest, prompt: Prompt, best: int) -> Lease | Pending | None:
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

    def _note_restore(self, request: TraceRequest) -> None:
        """Record the end of the restores for a request, even where it waits meanwhile."""
        seconds = self._tiers.seconds() if self.setup.tiers else 0.0
        if seconds:
            self._ready[request.id] = max(self.now, self._ready.get(request.id, 0.0)) + seconds

    def _worth_waiting(self, pending: Pending, best: int) -> bool:
        """Return True if the other lease reaches the shared position sooner than this one would."""
        rate = self.setup.prefill_rate
        job = next(job for _, _, job in self._events if job.lease is pending.lease)
        left = job.begun + (pending.position - job.start) / rate - self.now
        return left <= (pending.position - best) / rate

    # -- a request that holds a lease --------------------------------------------------------

    def _prefill(self, job: _Job, chunk: Chunk) -> None:
        self._notify(job.request)
        lease = job.lease
        lease.advance(job.tokens[chunk.begin : chunk.end])
        if chunk.checkpoint is not None:
            lease.checkpoint(chunk.checkpoint, position=chunk.end)
            wanted = (lease, chunk.end)
            if self.setup.lanes > 1 and (chunk.checkpoint == "system" or wanted in self._wanted):
                self._wanted.discard(wanted)
                lease.publish()

    def _finish(self, job: _Job) -> None:
        lease, request = job.lease, job.request
        self._notify(request)
        if request.output > 1:
            lease.advance(self.source.output(request.id)[:-1])
        lease.checkpoint("frontier", position=lease.frontier)
        lease.commit()
        self.tally.serve(request, lease)

    def _notify(self, request: TraceRequest) -> None:
        if self._on_request is not None:
            self._on_request(request.id)

    def _lookup_us(self) -> dict[str, float] | None:
        if not self._lookup_seconds:
            return None
        p50, p99 = np.percentile(np.array(self._lookup_seconds) * 1e6, [50, 99]).tolist()
        return {"p50": round(p50, 2), "p99": round(p99, 2)}
