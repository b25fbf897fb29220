"""A submitted request as its owner sees it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event
from typing import Any

from ninfer_pool.prompt import Prompt
from ninfer_pool.runner import Generation, Running


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a request: its `Generation`, and how long it waited for a lane, in seconds."""

    generation: Generation
    queued_seconds: float


@dataclass(slots=True, kw_only=True, eq=False)
class Handle:
    """A request that was submitted; made by `Engine.submit`.

    Iterate it for its new tokens as they come, once; `result` waits for the end; `cancel` asks
    for an early one. May be used from another thread than the engine's.
    """

    prompt: Prompt
    options: dict[str, Any]
    running: Running | None = None
    submitted: float = field(default_factory=time.perf_counter)
    admitted: float = 0.0
    cancelled: bool = False
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
        """Finished, cancelled or failed."""
        return self._ended.is_set()

    def cancel(self) -> None:
        """Ask for the end; the engine heeds it before its next step."""
        self.cancelled = True

    def begin(self, running: Running) -> None:
        """For the engine: it was admitted."""
        self.running = running
        self.admitted = time.perf_counter()

    def push(self) -> None:
        """For the engine: hand on the tokens made since."""
        assert self.running is not None
        for token in self.running.tokens[self._given :]:
            self._tokens.put(token)
        self._given = len(self.running.tokens)

    def end(self, outcome: Generation | BaseException) -> None:
        """For the engine: it is over."""
        if isinstance(outcome, Generation):
            waited = self.admitted - self.submitted
            self._outcome = Outcome(generation=outcome, queued_seconds=waited)
        else:
            self._outcome = outcome
        self._tokens.put(None)
        self._ended.set()
