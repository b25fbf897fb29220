"""From a `Call` to the engine and back: what is shared by every dialect."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import count
from typing import Any, TypeVar

import numpy as np

from ninfer_pool.core.results import Explanation
from ninfer_pool.errors import PoolError, PromptError
from ninfer_pool.runner import Chat, Rendered, Runner, Scheduler
from ninfer_pool.runner.request import ContextError
from ninfer_pool.server.calls import Call, Report
from ninfer_pool.server.errors import ApiError, context_exceeded
from ninfer_pool.server.metrics import Metrics
from ninfer_pool.server.recent import Past, Recent
from ninfer_pool.server.request import Asked, Request
from ninfer_pool.server.request_log import RequestLog, console_line
from ninfer_pool.server.settings import Settings
from ninfer_pool.server.shutdown import SPARE_SHARE, Deadline, last_line

Result = TypeVar("Result")
LARGE = 16 << 10
"""Bytes of a body that is worth a thread of its own, lest it hold the others up."""
LONG = LARGE // 4
"""The same in tokens of a prompt."""
MOST_SHOWN = 100
"""Characters of what a client sent that an error repeats."""


class Service:
    """One engine, its metrics, its log, and what is remembered of the last requests.

    Everything but the engine's own thread runs on one event loop.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        settings: Settings,
        log: RequestLog | None = None,
        print_line: Callable[[str], None] = print,
    ) -> None:
        self.runner = runner
        self.settings = settings
        self.engine = Scheduler(runner)
        self.chat = Chat(runner.tokenizer) if runner.tokenizer.chat_template is not None else None
        self.metrics = Metrics(
            runner.pool,
            running=lambda: self.engine.running,
            queued=lambda: self.engine.queued,
        )
        self.begun = time.time()
        self.recent = Recent()
        self.live: dict[int, Request] = {}
        self._log = log
        self._loop: asyncio.AbstractEventLoop | None = None
        self._print = print_line
        self._deadline: Deadline | None = None
        self._forced = self._last_printed = False
        self._numbers = count(1)

    # -- asking ----------------------------------------------------------------------------

    async def ask(self, make: Callable[[], Call], *, size: int) -> Asked:
        """Check a body of ``size`` bytes and turn it into a prompt.

        Raises:
            ApiError: what cannot be served, and why.
        """
        arrived = time.time(), time.perf_counter()
        if size > LARGE:
            return await asyncio.to_thread(self._ask, make, arrived)
        return self._ask(make, arrived)

    def _ask(self, make: Callable[[], Call], arrived: tuple[float, float]) -> Asked:
        call = make()
        self.check_model(call.model)
        try:
            ask = self._render(call)
            prompt = self.runner.prompt(
                ask.tokens, salt=call.control.salt, boundaries=ask.boundaries
            )
        except PoolError as error:
            raise ApiError.of(error) from None
        return Asked(call=call, ask=ask, prompt=prompt, arrived=arrived)

    def check_model(self, name: str | None) -> None:
        """Say no to a model that is not served.

        Raises:
            ApiError: 404.
        """
        names = self.settings.model_ids
        if name is not None and name not in names:
            known, shown = ", ".join(names), name[:MOST_SHOWN]
            raise ApiError(
                404,
                f"The model `{shown}` does not exist; this server has {known}",
                param="model",
                code="model_not_found",
            )

    def _render(self, call: Call) -> Rendered:
        if call.text is None:
            if self.chat is None:
                raise PromptError("messages: the model has no chat template; use /v1/completions")
            return self.chat.render(
                call.messages,
                tools=call.tools,
                breakpoints=call.breakpoints,
                **{**self.settings.template, **call.template},
            )
        text = call.text
        tokens = self.runner.tokenizer.encode(text) if isinstance(text, str) else text
        if not tokens:
            raise PromptError("prompt: empty; needs at least one token")
        return Rendered.raw(tokens)

    def explain(self, asked: Asked) -> Explanation:
        """Say why a request would hit as deep as it would."""
        read = asked.call.control.read and self.settings.read
        return self.runner.pool.explain(asked.prompt, read=read)

    async def between_steps(self, work: Callable[[], Result]) -> Result:
        """Do what reaches the device's pages: on the engine's thread, between two steps."""
        self._check_open()
        return await asyncio.wrap_future(self.engine.call(work))

    # -- running ---------------------------------------------------------------------------

    def submit(self, asked: Asked) -> Request:
        """Queue a request.

        Raises:
            ApiError: it can never fit, or too many wait.
        """
        self._check_open()
        if self.engine.queued >= self.settings.max_queue:
            raise ApiError(503, f"{self.engine.queued} requests wait already; try later")
        request = Request(
            asked, number=next(self._numbers), tokenizer=self.runner.tokenizer, done=self._done
        )
        try:
            request.handle = self.engine.submit(
                asked.prompt, notify=request.notify, hint=_hint(asked), **self._wishes(asked)
            )
        except ContextError as error:
            raise context_exceeded(
                prompt_tokens=error.prompt_tokens,
                max_tokens=error.max_tokens,
                context=error.context,
                param="messages" if asked.call.text is None else "prompt",
            ) from None
        except PoolError as error:
            raise ApiError.of(error) from None
        self.live[request.number] = request
        if self._log is not None:
            control = asked.call.control
            request.logged = self._log.arrive(
                request.number,
                asked.prompt.tokens,
                salt=control.salt,
                hint=control.hint,
                endpoint=asked.call.endpoint,
            )
        return request

    def _check_open(self) -> None:
        if self.engine.stopping:
            failed = self.engine.failure is not None
            raise ApiError(503, "the engine has failed" if failed else "the server is stopping")

    def _wishes(self, asked: Asked) -> dict[str, Any]:
        call, settings = asked.call, self.settings
        control = call.control
        return {
            "sampling": call.sampling,
            "max_tokens": self._max_tokens(asked),
            "stop_strings": call.stop,
            "read": control.read and settings.read,
            "retain": settings.single_lane or (control.retain and settings.retain),
            "priority": control.priority,
            "ttl_seconds": control.ttl_seconds,
        }

    def _max_tokens(self, asked: Asked) -> int:
        """What the request says, else the default as far as context and slab allow."""
        if asked.call.max_tokens is not None:
            return asked.call.max_tokens
        used = len(asked.prompt) + self.runner.executor.draft_tokens
        slab = self.runner.pool.config.num_pages * self.runner.pool.config.page_tokens
        room = min(self.runner.max_context - len(asked.prompt), slab - used)
        return max(1, min(self.settings.default_max_tokens, room))

    def _done(self, request: Request, report: Report) -> None:
        """A request has ended, however it did: count it, log it, say it."""
        self.live.pop(request.number, None)
        handle = request.handle
        parted = None
        if handle is not None and handle.sequence is not None:
            parted = handle.sequence.lease.explanation.diverged_at
        # Rendering again can wait until the client has its answer; whoever asks comes later still.
        asyncio.get_running_loop().call_soon(self._remember, request, report, parted)
        self.metrics.note(report)
        if self._log is not None and request.logged is not None:
            self._log.finish(
                request.logged,
                report,
                output=np.asarray(request.tokens, dtype=np.int32),
                boundaries=request.asked.ask.boundaries,
            )
        self._print(console_line(report))

    def _remember(self, request: Request, report: Report, parted: int | None) -> None:
        """Note the request for the page; to tell where it parted may render it once more."""

        def note(where: str | None) -> None:
            self.recent.note(Past(report=report, parted_at=parted, parted_in=where))

        asked = request.asked
        if parted is None:
            note(None)
        elif report.prompt_tokens <= LONG:
            note(asked.part_at(parted))
        else:
            told = asyncio.get_running_loop().run_in_executor(None, asked.part_at, parted)
            told.add_done_callback(lambda done: note(None if done.exception() else done.result()))

    # -- ending ----------------------------------------------------------------------------

    def start(self) -> None:
        """Start the engine's thread."""
        self._loop = asyncio.get_running_loop()
        self.engine.start()

    def drain(self, deadline: Deadline) -> None:
        """End within a time, of which what runs has its share; for a signal's handler."""
        self._deadline, seconds = deadline, deadline.for_requests
        deadline.watch()
        if self._loop is None or not self.live:
            return
        self._print(
            f"stopping: {len(self.live)} requests have {seconds:g} seconds; "
            "a second signal cancels them"
        )
        self._loop.call_soon_threadsafe(self._loop.call_later, seconds, self.cancel)

    def force_stop(self, deadline: Deadline, *, code: int) -> None:
        """Leave at once: nothing more is written; for a signal's handler."""
        self._forced = True
        if self._deadline is not None:
            self._deadline.stop()
        self._deadline = deadline
        deadline.watch(code=code)
        self.cancel()

    def cancel(self) -> None:
        """Cancel whatever runs or waits; their clients are told."""
        for request in list(self.live.values()):
            request.cancel()

    def print_last(self, lost: int | None = None) -> None:
        """Say what the disk tier keeps and what it does not, once, where there is one."""
        line = None if self._last_printed else last_line(self.runner, lost)
        self._last_printed = True
        if line is not None:
            self._print(line)

    async def stop(self) -> None:
        """Cancel what runs, write what the disk tier is to keep, and give its folder back."""
        seconds = self.settings.shutdown_seconds * (1 - SPARE_SHARE)
        if self._deadline is not None:
            seconds = 0.0 if self._forced else self._deadline.for_flush
        lost = await asyncio.to_thread(self.engine.stop, drain=False, flush_seconds=seconds)
        self.print_last(lost)
        await asyncio.to_thread(self.runner.close)
        if self._deadline is not None:
            self._deadline.stop()
        if self._log is not None:
            self._log.close()


def _hint(asked: Asked) -> str | None:
    control = asked.call.control
    return None if control.hint is None else f"{control.salt or ''}\0{control.hint}"
