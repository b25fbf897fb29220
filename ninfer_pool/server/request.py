"""One request on its way through the server: parsed, rendered, submitted, and reported."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ninfer_pool.core.prompt import Prompt
from ninfer_pool.runner import Rendered, Request, RequestOutput, Tokenizer
from ninfer_pool.runner.tokenizer import TextStream
from ninfer_pool.server.chat_request import ChatRequest, Piece, Reasoning, Report, Start, fields_of
from ninfer_pool.server.errors import ApiError
from ninfer_pool.server.output_parser import OutputParser

LOGGER = logging.getLogger(__name__)
FAULT = "a fault of the server's own"
Event = Start | Piece | Report | ApiError


@dataclass(kw_only=True, eq=False)
class ServedRequest:
    """A request of a client; new tokens become pieces in ``events``, its end a `Report`.

    ``done`` is called once, at the end, whether or not its client is still connected. ``arrived``
    is since the epoch, and by the clock that measures.
    """

    chat: ChatRequest
    rendered: Rendered
    prompt: Prompt
    tokenizer: Tokenizer
    arrived: tuple[float, float]
    number: int = 0
    submitted: Request | None = None
    """The runner's request, once it was submitted."""
    logged: Any = None
    """Its arrival in the request log."""
    done: Callable[[ServedRequest, Report], None] = lambda request, report: None
    loop: asyncio.AbstractEventLoop | None = None
    """The loop of its events."""
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    tokens: list[int] = field(default_factory=list)
    _started: bool = False
    _over: bool = False
    _broken: bool = False
    _thought: int = 0

    def part_at(self, position: int) -> str:
        """Return the part of the request, as its client wrote it, that contains a token."""
        part, origins = self.rendered.part_at(position), self.chat.origins
        if not origins or not part.startswith("messages["):
            return part
        origin = origins[int(part[len("messages[") : -1])]
        return "system" if origin < 0 else f"messages[{origin}]"

    def cancel(self) -> None:
        """Cancel it, unless it is over."""
        if self.submitted is not None and not self._over:
            self.submitted.cancel()

    def notify(self) -> None:
        """Schedule its progress on the event loop; for the scheduler's thread."""
        assert self.loop is not None
        with suppress(RuntimeError):  # the loop was closed, and with it every client
            self.loop.call_soon_threadsafe(self._progress)

    def _progress(self) -> None:
        request = self.submitted
        if request is None or self._over:
            return
        ended = request.ended  # read first: all tokens are there afterwards
        if request.sequence is not None and not self._started:
            self._started = True
            cached = request.sequence.lease.start
            self.events.put_nowait(Start(prompt_tokens=len(self.prompt), cached_tokens=cached))
        if not self._broken:
            self._parse(request, last=ended)
        if ended:
            self._over = True
            self._end(request)

    @cached_property
    def _parser(self) -> OutputParser:
        chat = self.chat
        return OutputParser(
            thinking=self.rendered.thinking,
            tools=chat.tools,
            parse_tools=chat.parse_tools,
            stop=chat.stop,
            raw=chat.text is not None,
        )

    @cached_property
    def _text(self) -> TextStream:
        return self.tokenizer.stream()

    def _parse(self, request: Request, *, last: bool) -> None:
        """Pass the new tokens on as pieces; a bug of ours must not leave a client waiting."""
        try:
            for token in request.take():
                self._take(request, token)
            if last:
                for piece in [*self._parser.push(self._text.finish()), *self._parser.finish()]:
                    self.events.put_nowait(piece)
        except Exception:
            LOGGER.exception("request %d: its text could not be parsed", self.number)
            self._broken = True
            request.cancel()
            self.events.put_nowait(ApiError(500, FAULT))

    def _take(self, request: Request, token: int) -> None:
        self.tokens.append(token)
        if token in request.stop_tokens:
            return
        for piece in self._parser.push(self._text.push(token)):
            if isinstance(piece, Reasoning):
                self._thought = len(self.tokens)
            self.events.put_nowait(piece)

    def _end(self, request: Request) -> None:
        last: Event = ApiError(500, FAULT)
        try:
            report, last = self._outcome(request)
            self.done(self, report)
        except Exception:
            LOGGER.exception("request %d: its end could not be recorded", self.number)
        finally:
            self.events.put_nowait(last)

    def _outcome(self, request: Request) -> tuple[Report, Report | ApiError]:
        """Return its report, and its client's last event."""
        try:
            output = request.result(timeout=0)
        except Exception as error:
            LOGGER.error("request %d failed", self.number, exc_info=error)
            report = self._report(request, request.output("error"), finish="error")
            return report, ApiError(500, "the engine failed; the server's log has the reason")
        finish = "error" if self._broken else output.finish
        report = self._report(request, output, finish=finish)
        return report, _refusal(request) if output.finish == "refused" else report

    def _report(self, request: Request, output: RequestOutput, *, finish: str) -> Report:
        sequence, chat = request.sequence, self.chat
        now, (arrived, begun) = time.perf_counter(), self.arrived
        first = sequence.first if sequence is not None and sequence.first else now
        return Report(
            number=self.number,
            endpoint=chat.endpoint,
            **fields_of(output, "prompt_tokens", "reuse", "reason", "exact", "key", "lane"),
            **fields_of(output, "drafted", "accepted", "tier"),
            cached_tokens=output.reused,
            output_tokens=len(output.tokens),
            reasoning_tokens=self._thought,
            retained_tokens=output.retained,
            finish=finish,
            stop_string=self._parser.stop_string,
            arrived=arrived,
            queued_seconds=0.0 if finish == "error" else output.queued_seconds,
            first_token_seconds=first - begun,
            prefill_seconds=output.first_token_seconds,
            seconds=now - begun,
            stream=chat.stream,
            control=chat.control,
        )


def _refusal(request: Request) -> ApiError:
    why, sizes = request.refusal, ""
    if why is not None:
        sizes = f": {why.bytes_needed:,} bytes needed, at most {why.bytes_freeable:,} can be freed"
    text = f"no room for {len(request.prompt)} prompt tokens and their answer{sizes}"
    return ApiError(503, f"{text}; unpin or remove a retained entry")
