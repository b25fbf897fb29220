"""The step loop: admits requests to lanes, prefills between decode rounds, ends what is done."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any, TypeVar

from ninfer_pool.core.lifecycle import releasable
from ninfer_pool.core.prompt import Prompt
from ninfer_pool.core.results import Pending
from ninfer_pool.errors import PromptError
from ninfer_pool.runner.backfill import delays
from ninfer_pool.runner.handle import Handle, Outcome, unserved
from ninfer_pool.runner.requests import check_request, most_pages, needed_pages
from ninfer_pool.runner.runner import Runner
from ninfer_pool.runner.running import Running

Result = TypeVar("Result")
IDLE_SECONDS = 0.05
LOOKAHEAD = 8
"""How many may be asked, each time, whether they can overtake the one that waits."""
STORED_BYTES, IDLE_BYTES = 1 << 20, 8 << 20
"""What a step stores ahead of time in tiers below, about: beside what runs, and with nothing to
do."""
HINTS = 4096
"""How many hints are remembered with the lane that they ran in last."""


class Scheduler:
    """Serves many requests on one `Runner`, in the order in which they came.

    A step admits what fits, runs one chunk of the oldest prompt that is not prefilled yet, and one
    decode round over all lanes that are, so that a long prompt holds the others up by a chunk at
    a time. A request that does not fit waits; a later one overtakes it only if that provably
    cannot delay it (see `backfill`). Pages are reserved for the whole request at admission, so
    what runs never runs out of room.

    Use it as a context manager to run the loop in a thread of its own, or call `step` yourself.
    """

    def __init__(self, runner: Runner, *, wait_for_shared: bool = True) -> None:
        self.runner = runner
        self._wait_for_shared = wait_for_shared
        self._arrived: deque[Handle] = deque()
        self._waiting: list[Handle] = []
        self._running: list[Handle] = []
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._lane_of_hint: OrderedDict[str, int] = OrderedDict()
        self._stuck: object = None
        """What the pool was like when the first that waits was refused; it is not asked again
        before something has changed."""
        self.failure: Exception | None = None
        """What ended the loop, if something did: a fault of ours, and nothing is served since."""

    # -- what a user calls -----------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        *,
        notify: Callable[[], None] | None = None,
        hint: str | None = None,
        **options: Any,
    ) -> Handle:
        """Queue a request.

        Args:
            notify: see `Handle`.
            hint: requests of one hint prefer one lane, where no lane is home to their prefix.
            options: as `Runner.start` takes them.

        Raises:
            PromptError: it could never run, or the engine is stopping; nothing was queued.
        """
        check_request(self.runner, prompt, **options)
        handle = Handle(prompt=prompt, options=options, hint=hint)
        if notify is not None:
            handle.notify = notify
        with self._wake:
            if self._stopping:
                raise PromptError("engine: it is stopping; needs a running one")
            self._arrived.append(handle)
            self._wake.notify()
        return handle

    def call(self, work: Callable[[], Result]) -> Future[Result]:
        """Do something between two steps, on the engine's thread: what reaches the pool's pages.

        Raises:
            PromptError: the engine is stopping; nothing is done.
        """
        future: Future[Result] = Future()
        with self._wake:
            if self._stopping:
                raise PromptError("engine: it is stopping; needs a running one")
            self._calls.append((work, future))
            self._wake.notify()
        return future

    def generate(self, prompt: Prompt, **options: Any) -> Outcome:
        """Run one request to its end, beside whatever else is running."""
        handle = self.submit(prompt, **options)
        while self._thread is None and not handle.ended:
            self.step()
        return handle.result()

    def stream(self, prompt: Prompt, **options: Any) -> Generator[int]:
        """Yield one request's tokens as they come; closing the iterator cancels it."""
        handle = self.submit(prompt, **options)
        try:
            while self._thread is None and not handle.ended:
                self.step()
                yield from handle.take()
            yield from handle
        finally:
            handle.cancel()

    @property
    def stopping(self) -> bool:
        """It takes no further requests: it was told to stop, or has failed."""
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
        """End the loop: after what has been submitted, or at once with everything cancelled.

        Then what is retained is written to the disk tier, if there is one, for up to
        ``flush_seconds`` (None: as long as it takes). Returns how many entries were left out.
        """
        with self._wake:
            self._stopping = True
            if not drain:
                for handle in [*self._arrived, *self._waiting, *self._running]:
                    handle.cancel()
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self.runner.tiers.flush(seconds=flush_seconds)

    def _loop(self) -> None:
        try:
            while self._turn():
                pass
        except Exception as error:  # a fault of ours: nobody may wait for ever
            self.failure = error
            with self._wake:
                self._stopping = True
                for handle in [*self._arrived, *self._waiting, *self._running]:
                    handle.end(error)
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
        self._do_calls()
        self._drop_cancelled()
        self._admit()
        stored = self.runner.tiers.step(max_bytes=STORED_BYTES if self._running else IDLE_BYTES)
        if not self._running:
            return stored
        self._prefill()
        self._decode()
        for handle in list(self._running):
            running = handle.running
            if running is not None and running.finish is not None:
                self._end(handle, running)
        return True

    def _do_calls(self) -> None:
        while self._calls:
            work, future = self._calls.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except Exception as error:
                    future.set_exception(error)

    def _drop_cancelled(self) -> None:
        for handle in [each for each in self._waiting if each.cancelled]:
            self._waiting.remove(handle)
            handle.end(unserved(handle, "cancelled"))
        for handle in [each for each in self._running if each.cancelled]:
            assert handle.running is not None
            self.runner.cancel(handle.running)
            self._running.remove(handle)
            handle.end(handle.running.result())

    # -- admission -------------------------------------------------------------------------

    def _admit(self) -> None:
        """Admit in order; past one that waits only what cannot delay it."""
        pool = self.runner.pool
        if self._waiting and pool.free_lanes:
            for running in self._held():  # what they have crossed is whom others may wait for
                running.lease.publish()
        blocked: Handle | None = None
        for handle in self._waiting[: LOOKAHEAD + 1]:
            if not pool.free_lanes:
                return
            if blocked is not None:
                if not self._could_delay(blocked, handle):
                    self._start(handle)
            elif self._fetching(handle):
                handle.pending = handle.fetched = True
                blocked = handle
            elif self._stuck == (handle, now := self._room()) or not self._start(handle):
                if not self._running:
                    self._refuse(handle)
                    continue
                blocked = handle
                self._stuck = None if handle.pending else (handle, now)

    def _fetching(self, handle: Handle) -> bool:
        """Say whether what a request resumes is on its way from disk; asked of once, then until
        it is there."""
        if handle.fetching is not False:
            tiers = self.runner.tiers
            handle.fetching = tiers.prefetch(handle.prompt, notify=self._nudge)
        return bool(handle.fetching)

    def _nudge(self) -> None:
        """What the loop waits for may have happened."""
        with self._wake:
            self._wake.notify()

    def _room(self) -> object:
        """What must change before a request that was refused has a chance."""
        pool = self.runner.pool
        return pool.running, pool.freeable_bytes, pool.retained.version

    def _refuse(self, handle: Handle) -> None:
        """Nothing runs and there is still no room: waiting would not help (G4)."""
        self._waiting.remove(handle)
        handle.refusal = self.runner.pool.last_refusal
        handle.end(unserved(handle, "refused"))

    def _start(self, handle: Handle) -> bool:
        """Admit a request, or end it with what it failed with; False where it must wait."""
        hint = handle.hint
        try:
            found = self.runner.admit(
                handle.prompt,
                wait_for_shared=self._wait_for_shared,
                near=None if hint is None else self._lane_of_hint.get(hint),
                **handle.options,
            )
        except Exception as error:  # a restore that cannot be made up for: this request's fault
            self._waiting.remove(handle)
            handle.end(error)
            return True
        handle.pending = isinstance(found, Pending)
        if not isinstance(found, Running):
            return False
        self._running.append(handle)  # first: `stop` must find it in one of the two
        self._waiting.remove(handle)
        if hint is not None:
            self._note_lane(hint, found.lane)
        handle.begin(found)
        return True

    def _note_lane(self, hint: str, lane: int) -> None:
        self._lane_of_hint[hint] = lane
        self._lane_of_hint.move_to_end(hint)
        if len(self._lane_of_hint) > HINTS:
            self._lane_of_hint.popitem(last=False)

    def _could_delay(self, blocked: Handle, candidate: Handle) -> bool:
        pool = self.runner.pool
        leases = [each.lease for each in self._held()]
        if blocked.pending and pool.free_lanes == 1:  # it needs a lane before any request ends
            return True
        return delays(
            waiting=needed_pages(self.runner, blocked.prompt, **blocked.options),
            candidate=most_pages(self.runner, candidate.prompt, **candidate.options),
            free=pool.freeable_bytes // pool.config.page_bytes,
            running=[releasable(pool, lease) for lease in leases],
        )

    def _held(self) -> list[Running]:
        return [each.running for each in self._running if each.running is not None]

    # -- work ------------------------------------------------------------------------------

    def _prefill(self) -> None:
        """Run a chunk of the oldest prompt that is not ready."""
        for handle in list(self._running):
            running = handle.running
            if running is None or running.ready:
                continue
            try:
                self.runner.prefill(running)
            except Exception as error:
                self._fail(handle, error)
            else:
                handle.push()
            return

    def _decode(self) -> None:
        ready = [each for each in self._running if each.running is not None and each.running.ready]
        try:
            self.runner.decode(self._held())
        except Exception as error:
            for handle in ready:
                self._fail(handle, error)
        else:
            for handle in ready:
                handle.push()

    def _end(self, handle: Handle, running: Running) -> None:
        try:
            self.runner.finish(running)
        except Exception as error:
            self._fail(handle, error)
        else:
            self._running.remove(handle)
            handle.end(running.result())

    def _fail(self, handle: Handle, error: Exception) -> None:
        """End a request that failed; whatever else goes wrong on the way, its owner is told."""
        assert handle.running is not None
        try:
            self.runner.cancel(handle.running)
        finally:
            self._running.remove(handle)
            handle.end(error)
