"""The step loop: admits requests to lanes, prefills between decode rounds, ends requests."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any, TypeVar

from ninfer_pool.core.lease import Pending
from ninfer_pool.core.prompt import Prompt
from ninfer_pool.errors import PromptError
from ninfer_pool.runner.backfill import delays
from ninfer_pool.runner.request import Request, RequestOutput, Sequence
from ninfer_pool.runner.runner import Runner

Result = TypeVar("Result")
IDLE_SECONDS = 0.05
LOOKAHEAD = 8
"""Waiting requests that are considered, each time, for overtaking the first."""
STORED_BYTES, IDLE_BYTES = 1 << 20, 8 << 20
"""About how much a step stores ahead of time in the tiers: while sequences run, and while idle."""
HINTS = 4096
"""Hints that are remembered, each with its last lane."""


class Scheduler:
    """Serves many requests on one `Runner`, in order of arrival.

    A step admits requests that fit, runs one chunk of the oldest unfinished prompt, and one decode
    round over all lanes that are ready. So a long prompt delays the others by a chunk at a time.
    A request that does not fit waits; a later one overtakes it only if that provably cannot delay
    it (see `backfill`). Pages are reserved for the whole request at admission, so a running one
    never lacks room.

    Use it as a context manager to run the loop in a thread of its own, or call `step` yourself.
    """

    def __init__(self, runner: Runner, *, wait_for_shared: bool = True) -> None:
        self.runner = runner
        self._wait_for_shared = wait_for_shared
        self._arrived: deque[Request] = deque()
        self._waiting: list[Request] = []
        self._running: list[Sequence] = []
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._lane_of_hint: OrderedDict[str, int] = OrderedDict()
        self._stuck: object = None
        """The first waiting request and the pool's room at its refusal; it is not tried again
        before the room has changed."""
        self.failure: Exception | None = None
        """The error that ended the loop, a bug of ours; nothing is served since."""

    # -- for users -------------------------------------------------------------------------

    def submit(
        self, prompt: Prompt, *, notify: Callable[[], None] | None = None, **options: Any
    ) -> Request:
        """Check a request and queue it.

        Args:
            notify: see `Request`.
            options: as `Runner.request` takes them. Requests of one ``hint`` prefer one lane,
                where no lane is home to their prefix.

        Raises:
            PromptError: it could never run, or the scheduler is stopping; nothing was queued.
        """
        request = self.runner.request(prompt, **options)
        if notify is not None:
            request.notify = notify
        with self._wake:
            self._check_open()
            self._arrived.append(request)
            self._wake.notify()
        return request

    def call(self, work: Callable[[], Result]) -> Future[Result]:
        """Run a function between two steps, on the loop's thread: one that reaches pool pages.

        Raises:
            PromptError: the scheduler is stopping; nothing is done.
        """
        future: Future[Result] = Future()
        with self._wake:
            self._check_open()
            self._calls.append((work, future))
            self._wake.notify()
        return future

    def _check_open(self) -> None:
        if self._stopping:
            raise PromptError("engine: it is stopping; needs a running one")

    def generate(self, prompt: Prompt, **options: Any) -> RequestOutput:
        """Run one request to its end, next to all others."""
        request = self.submit(prompt, **options)
        while self._thread is None and not request.ended:
            self.step()
        return request.result()

    def stream(self, prompt: Prompt, **options: Any) -> Generator[int]:
        """Yield one request's tokens as they are made; closing the iterator cancels it."""
        request = self.submit(prompt, **options)
        try:
            while self._thread is None and not request.ended:
                self.step()
                yield from request.take()
            yield from request
        finally:
            request.cancel()

    @property
    def stopping(self) -> bool:
        """True where no further requests are accepted: it was stopped, or has failed."""
        return self._stopping

    @property
    def queued(self) -> int:
        """Requests that wait for a lane or for room."""
        return len(self._arrived) + len(self._waiting)

    @property
    def running(self) -> int:
        """Requests that hold a lane."""
        return len(self._running)

    # -- the loop --------------------------------------------------------------------------

    def __enter__(self) -> Scheduler:
        self.start()
        return self

    def start(self) -> None:
        """Run the loop in a thread of its own."""
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="ninfer-engine", daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self, *, drain: bool = True, flush_seconds: float | None = None) -> int:
        """End the loop: after all submitted requests, or at once with all of them cancelled.

        Then retained entries are written to the disk tier, if there is one, for up to
        ``flush_seconds`` (None: without limit). Returns how many entries were left out.
        """
        with self._wake:
            self._stopping = True
            if not drain:
                for request in self._all():
                    request.cancel()
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self.runner.tiers.flush(seconds=flush_seconds)

    def _all(self) -> list[Request]:
        running = [sequence.request for sequence in self._running]
        return [*self._arrived, *self._waiting, *running]

    def _loop(self) -> None:
        try:
            while self._turn():
                pass
        except Exception as error:  # a bug of ours: no owner may wait forever
            self.failure = error
            with self._wake:
                self._stopping = True
                for request in self._all():
                    request.end(error)
                for _, future in self._calls:
                    future.set_exception(error)
            raise

    def _turn(self) -> bool:
        """Work or wait for work; False once it is to stop and nothing is left."""
        if self.step():
            return True
        with self._wake:
            busy = self._arrived or self._waiting or self._running or self._calls
            if self._stopping and not busy:
                return False
            if not (self._arrived or self._calls):
                self._wake.wait(IDLE_SECONDS)
        return True

    def step(self) -> bool:
        """Do one round of work; False where there was none."""
        with self._wake:
            self._waiting += self._arrived
            self._arrived.clear()
        self._run_calls()
        self._drop_cancelled()
        self._admit_waiting()
        stored = self.runner.tiers.step(max_bytes=STORED_BYTES if self._running else IDLE_BYTES)
        if not self._running:
            return stored
        self._prefill()
        self._decode()
        for sequence in [each for each in self._running if each.finish is not None]:
            self._end(sequence)
        return True

    def _run_calls(self) -> None:
        while self._calls:
            work, future = self._calls.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except Exception as error:
                    future.set_exception(error)

    def _drop_cancelled(self) -> None:
        for request in [each for each in self._waiting if each.cancelled]:
            self._waiting.remove(request)
            request.end("cancelled")
        for sequence in [each for each in self._running if each.request.cancelled]:
            self.runner.cancel(sequence)
            self._running.remove(sequence)
            sequence.request.end("cancelled")

    # -- admission -------------------------------------------------------------------------

    def _admit_waiting(self) -> None:
        """Admit in order; past one that waits, only requests that cannot delay it."""
        pool = self.runner.pool
        if self._waiting and pool.free_lanes:
            for sequence in self._running:  # waiting requests may resume what it has crossed
                sequence.lease.publish()
        blocked: Request | None = None
        for request in self._waiting[: LOOKAHEAD + 1]:
            if not pool.free_lanes:
                return
            if blocked is not None:
                if not self._could_delay(blocked, request):
                    self._admit(request)
            elif self._fetching(request):
                request.pending = request.fetched = True
                blocked = request
            elif self._stuck == (request, now := self._room()) or not self._admit(request):
                if not self._running:
                    self._refuse(request)
                    continue
                blocked = request
                self._stuck = None if request.pending else (request, now)

    def _fetching(self, request: Request) -> bool:
        """Return whether a request's prefix is being read from disk; requests that once."""
        tiers = self.runner.tiers
        if tiers.shelves and request.fetching is not False:
            request.fetching = tiers.prefetch(request.prompt, notify=self._nudge)
        return bool(request.fetching)

    def _nudge(self) -> None:
        """Wake the loop: a prefix may have been read."""
        with self._wake:
            self._wake.notify()

    def _room(self) -> object:
        """Return what must change before a refused request has a chance."""
        pool = self.runner.pool
        return pool.running, pool.freeable_bytes, pool.state.catalog.version

    def _refuse(self, request: Request) -> None:
        """End a request that nothing delays and that has no room: waiting would not help (G4)."""
        self._waiting.remove(request)
        request.refusal = self.runner.pool.last_refusal
        request.end("refused")

    def _admit(self, request: Request) -> bool:
        """Admit a request, or end it with its error; False where it must wait."""
        hint = request.hint
        near = None if hint is None else self._lane_of_hint.get(hint)
        try:
            found = self.runner.admit(request, wait_for_shared=self._wait_for_shared, near=near)
        except Exception as error:  # a restore that failed for good: this request's alone
            self._waiting.remove(request)
            request.end(error)
            return True
        request.pending = isinstance(found, Pending)
        if not isinstance(found, Sequence):
            return False
        self._running.append(found)  # first: `stop` must find it in one of the two
        self._waiting.remove(request)
        if hint is not None:
            self._note_lane(hint, found.lane)
        request.begin(found)
        return True

    def _note_lane(self, hint: str, lane: int) -> None:
        self._lane_of_hint[hint] = lane
        self._lane_of_hint.move_to_end(hint)
        if len(self._lane_of_hint) > HINTS:
            self._lane_of_hint.popitem(last=False)

    def _could_delay(self, blocked: Request, candidate: Request) -> bool:
        pool = self.runner.pool
        if blocked.pending and pool.free_lanes == 1:  # it needs a lane before any request ends
            return True
        return delays(
            waiting=blocked.needed_pages,
            candidate=candidate.most_pages,
            free=pool.freeable_bytes // pool.config.page_bytes,
            running=[sequence.lease.releasable() for sequence in self._running],
        )

    # -- work ------------------------------------------------------------------------------

    def _prefill(self) -> None:
        """Run a chunk of the oldest prompt that is not ready."""
        sequence = next((each for each in self._running if not each.ready), None)
        if sequence is None:
            return
        try:
            self.runner.prefill(sequence)
        except Exception as error:
            self._fail(sequence, error)
        else:
            sequence.request.push()

    def _decode(self) -> None:
        ready = [sequence for sequence in self._running if sequence.ready]
        try:
            self.runner.decode(ready)
        except Exception as error:
            for sequence in ready:
                self._fail(sequence, error)
        else:
            for sequence in ready:
                sequence.request.push()

    def _end(self, sequence: Sequence) -> None:
        try:
            self.runner.finish(sequence)
        except Exception as error:
            self._fail(sequence, error)
        else:
            self._running.remove(sequence)
            sequence.request.end("cancelled")

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        """End a request that failed, whatever else fails on the way."""
        try:
            self.runner.cancel(sequence)
        finally:
            self._running.remove(sequence)
            sequence.request.end(error)
