"""From a `ChatRequest` to the scheduler and back, the same for every dialect."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from typing import Any, TypeVar

import numpy as np

from ninfer_pool.core.prompt import Prompt
from ninfer_pool.errors import PoolError, PromptError
from ninfer_pool.runner import Chat, Rendered, Runner, Scheduler
from ninfer_pool.runner.request import ContextError
from ninfer_pool.server.chat_request import ChatRequest, Report
from ninfer_pool.server.errors import ApiError, context_exceeded
from ninfer_pool.server.metrics import Metrics, Past, Recent
from ninfer_pool.server.request import ServedRequest
from ninfer_pool.server.request_log import RequestLog, console_line
from ninfer_pool.server.settings import Settings
from ninfer_pool.server.shutdown import SPARE_SHARE, Deadline, last_line

Result = TypeVar("Result")
Parse = Callable[[bytes, Mapping[str, str]], ChatRequest]
LARGE = 16 << 10
"""Bytes of a body that is parsed in a thread of its own: it would delay the others."""
LONG = LARGE // 4
"""The same in tokens of a prompt."""
MOST_SHOWN = 100
"""Characters of a client's own text in an error."""


class Service:
    """One scheduler, its metrics, its log, and the last requests.

    All but the scheduler's own thread runs on one event loop.
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
        self._tokenizer = runner.tokenizer
        self.chat = Chat(runner.tokenizer) if runner.tokenizer.chat_template is not None else None
        self.metrics = Metrics(
            runner.pool,
            running=lambda: self.engine.running,
            queued=lambda: self.engine.queued,
        )
        self.begun = time.time()
        self.recent = Recent()
        self.live: dict[int, ServedRequest] = {}
        self._log = log
        self._loop: asyncio.AbstractEventLoop | None = None
        self._print = print_line
        self._deadline: Deadline | None = None
        self._forced = self._last_printed = False
        self._numbers = count(1)

    # -- preparing -------------------------------------------------------------------------

    async def prepare(self, parse: Parse, body: bytes, headers: Mapping[str, str]) -> ServedRequest:
        """Parse a body and render its prompt.

        Raises:
            ApiError: it cannot be served, with the reason.
        """
        work = partial(self._prepare, parse, body, headers, (time.time(), time.perf_counter()))
        return await asyncio.to_thread(work) if len(body) > LARGE else work()

    def _prepare(
        self, parse: Parse, body: bytes, headers: Mapping[str, str], arrived: tuple[float, float]
    ) -> ServedRequest:
        chat = parse(body, headers)
        self.check_model(chat.model)
        try:
            rendered = self._render(chat)
            prompt = self.runner.prompt(
                rendered.tokens, salt=chat.control.salt, boundaries=rendered.boundaries
            )
        except PoolError as error:
            raise ApiError.of(error) from None
        return ServedRequest(
            chat=chat,
            rendered=rendered,
            prompt=prompt,
            tokenizer=self._tokenizer,
            arrived=arrived,
        )

    def check_model(self, name: str | None) -> None:
        """Reject a model that is not served.

        Raises:
            ApiError: 404.
        """
        names = self.settings.model_ids
        if name is not None and name not in names:
            known, shown = ", ".join(names), name[:MOST_SHOWN]
            text = f"The model `{shown}` does not exist; this server has {known}"
            raise ApiError(404, text, param="model", code="model_not_found")

    def _render(self, chat: ChatRequest) -> Rendered:
        if chat.text is None:
            if self.chat is None:
                raise PromptError("messages: the model has no chat template; use /v1/completions")
            return self.chat.render(
                chat.messages,
                tools=chat.tools,
                breakpoints=chat.breakpoints,
                **{**self.settings.template, **chat.template},
            )
        text = chat.text
        tokens = self._tokenizer.encode(text) if isinstance(text, str) else text
        if not tokens:
            raise PromptError("prompt: empty; needs at least one token")
        return Rendered.raw(tokens)

    async def between_steps(self, work: Callable[[], Result]) -> Result:
        """Run a function that reaches the device's pages: on the scheduler's thread."""
        self._check_open()
        return await asyncio.wrap_future(self.engine.call(work))

    # -- running ---------------------------------------------------------------------------

    def submit(self, request: ServedRequest) -> None:
        """Queue a request.

        Raises:
            ApiError: it can never fit, or too many wait.
        """
        options = self._options(request)
        self._check_open()
        if self.engine.queued >= self.settings.max_queue:
            raise ApiError(503, f"{self.engine.queued} requests wait already; try later")
        request.number, request.done = next(self._numbers), self._done
        request.loop = asyncio.get_running_loop()
        try:
            request.submitted = self.engine.submit(request.prompt, notify=request.notify, **options)
        except ContextError as error:
            raise context_exceeded(
                prompt_tokens=error.prompt_tokens,
                max_tokens=error.max_tokens,
                context=error.context,
                param="messages" if request.chat.text is None else "prompt",
            ) from None
        except PoolError as error:
            raise ApiError.of(error) from None
        self.live[request.number] = request
        if self._log is not None:
            control = request.chat.control
            request.logged = self._log.arrive(
                request.number,
                request.prompt.tokens,
                salt=control.salt,
                hint=control.hint,
                endpoint=request.chat.endpoint,
            )

    def _check_open(self) -> None:
        if self.engine.stopping:
            failed = self.engine.failure is not None
            raise ApiError(503, "the engine has failed" if failed else "the server is stopping")

    def _options(self, request: ServedRequest) -> dict[str, Any]:
        chat, settings = request.chat, self.settings
        control, hint = chat.control, chat.control.hint
        tokens = chat.max_tokens
        return {
            "sampling": chat.sampling,
            "max_tokens": self._default_max_tokens(request.prompt) if tokens is None else tokens,
            "stop_strings": chat.stop,
            "read": control.read and settings.read,
            "retain": settings.single_lane or (control.retain and settings.retain),
            "priority": control.priority,
            "ttl_seconds": control.ttl_seconds,
            "hint": None if hint is None else f"{control.salt or ''}\0{hint}",
        }

    def _default_max_tokens(self, prompt: Prompt) -> int:
        """Return the default, as far as context and slab allow."""
        used = len(prompt) + self.runner.executor.draft_tokens
        slab = self.runner.pool.config.num_pages * self.runner.pool.config.page_tokens
        room = min(self.runner.max_context - len(prompt), slab - used)
        return max(1, min(self.settings.default_max_tokens, room))

    def _done(self, request: ServedRequest, report: Report) -> None:
        """Count, log and print a request that has ended, however it did."""
        self.live.pop(request.number, None)
        sequence = request.submitted.sequence if request.submitted is not None else None
        parted = None if sequence is None else sequence.lease.explanation.diverged_at
        # Rendering again can wait until the client has its answer.
        asyncio.get_running_loop().call_soon(self._remember, request, report, parted)
        self.metrics.note(report)
        if self._log is not None and request.logged is not None:
            self._log.finish(
                request.logged,
                report,
                output=np.asarray(request.tokens, dtype=np.int32),
                boundaries=request.rendered.boundaries,
            )
        self._print(console_line(report))

    def _remember(self, request: ServedRequest, report: Report, parted: int | None) -> None:
        """Record the request for the page; the part where it diverged may need a rendering."""

        def note(where: str | None) -> None:
            self.recent.note(Past(report=report, parted_at=parted, parted_in=where))

        if parted is None:
            note(None)
        elif report.prompt_tokens <= LONG:
            note(request.part_at(parted))
        else:
            part = asyncio.get_running_loop().run_in_executor(None, request.part_at, parted)
            part.add_done_callback(lambda done: note(None if done.exception() else done.result()))

    # -- ending ----------------------------------------------------------------------------

    def start(self) -> None:
        """Start the scheduler's thread."""
        self._loop = asyncio.get_running_loop()
        self.engine.start()

    def drain(self, deadline: Deadline) -> None:
        """End within a time, with a share for running requests; for a signal's handler."""
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
        """End at once: nothing more is written; for a signal's handler."""
        self._forced = True
        if self._deadline is not None:
            self._deadline.stop()
        self._deadline = deadline
        deadline.watch(code=code)
        self.cancel()

    def cancel(self) -> None:
        """Cancel all requests; their clients get an error."""
        for request in list(self.live.values()):
            request.cancel()

    def print_last(self, lost: int | None = None) -> None:
        """Print what the disk tier keeps, once, where there is one."""
        line = None if self._last_printed else last_line(self.runner, lost)
        self._last_printed = True
        if line is not None:
            self._print(line)

    async def stop(self) -> None:
        """Cancel all requests, write entries to the disk tier, and release its folder."""
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
