"""A submitted request as its owner sees it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf
from queue import Empty, SimpleQueue
from threading import Event
from typing import Any

from ninfer_pool.core.prompt import Prompt
from ninfer_pool.core.results import Refusal
from ninfer_pool.runner.running import Generation, Running


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a request: its `Generation`, and how long it waited for a lane, in seconds.

    ``generation.finish`` is ``refused`` where nothing was running and there was still no room.
    """

    generation: Generation
    queued_seconds: float


def _nothing() -> None:
    """Nobody wants to know."""


@dataclass(slots=True, kw_only=True, eq=False)
class Handle:
    """A request that was submitted; made by `Scheduler.submit`.

    Iterate it for its new tokens as they come, once; `result` waits for the end; `cancel` asks
    for an early one. May be used from another thread than the engine's. An owner that may not
    wait passes ``notify``, which the engine's thread calls when it was admitted, when there are
    new tokens, and at the end; `take` then returns what there is.
    """

    prompt: Prompt
    options: dict[str, Any]
    notify: Callable[[], None] = _nothing
    hint: str | None = None
    running: Running | None = None
    submitted: float = field(default_factory=time.perf_counter)
    admitted: float = inf
    cancelled: bool = False
    refusal: Refusal | None = None
    """Why it was refused, if it was."""
    pending: bool = False
    """It waits for what a sibling is computing, and was not refused."""
    fetching: bool | None = None
    """What it resumes is on its way from disk; None: not asked yet."""
    fetched: bool = False
    """What it resumes lay on disk when it came, and was brought nearer while it waited."""
    _given: int = 0
    _tokens: SimpleQueue[int | None] = field(default_factory=SimpleQueue)
    _ended: Event = field(default_factory=Event)
    _outcome: Outcome | BaseException | None = None

    def __iter__(self) -> Iterator[int]:
        """Yield new tokens as they come.

        Raises:
            Exception: what ended the request, if something did.
        """
        while (token := self._tokens.get()) is not None:
            yield token
        self.result()

    def take(self) -> list[int]:
        """Return the new tokens that are there, without waiting."""
        taken: list[int] = []
        try:
            while (token := self._tokens.get_nowait()) is not None:
                taken.append(token)
            self._tokens.put(None)  # the end stays to be found by `__iter__`
        except Empty:
            pass
        return taken

    def result(self, *, timeout: float | None = None) -> Outcome:
        """Wait for the end.

        Raises:
            TimeoutError: it did not come within ``timeout`` seconds.
            Exception: what ended the request, if something did.
        """
        if not self._ended.wait(timeout):
            raise TimeoutError(f"result: not there after {timeout} seconds")
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome

    @property
    def ended(self) -> bool:
        """Finished, cancelled, refused or failed."""
        return self._ended.is_set()

    def cancel(self) -> None:
        """Ask for the end; the engine heeds it before its next step."""
        self.cancelled = True

    def begin(self, running: Running) -> None:
        """For the engine: it was admitted."""
        self.running = running
        self.admitted = time.perf_counter()
        self.notify()

    def push(self) -> None:
        """For the engine: hand on the tokens made since."""
        assert self.running is not None
        new = self.running.tokens[self._given :]
        for token in new:
            self._tokens.put(token)
        self._given += len(new)
        if new:
            self.notify()

    def end(self, outcome: Generation | BaseException) -> None:
        """For the engine: it is over."""
        if isinstance(outcome, Generation):
            left = min(self.admitted, time.perf_counter())
            self._outcome = Outcome(generation=outcome, queued_seconds=left - self.submitted)
        else:
            self._outcome = outcome
        self._tokens.put(None)
        self._ended.set()
        self.notify()


def unserved(handle: Handle, finish: str) -> Generation:
    """What comes of a request that never had a lane."""
    return Generation(
        tokens=(),
        finish=finish,
        prompt_tokens=len(handle.prompt),
        reused=0,
        reuse="full_reset",
        exact=True,
        reason="no_room",
        key=None,
        drafted=0,
        accepted=0,
        first_token_seconds=0.0,
        seconds=0.0,
    )
