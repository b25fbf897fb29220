"""One request from its prompt to its report, on the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ninfer_pool.core.prompt import Prompt
from ninfer_pool.runner import Rendered, RequestOutput, Tokenizer
from ninfer_pool.runner import Request as Submitted
from ninfer_pool.server.calls import Call, Piece, Reasoning, Report, Start
from ninfer_pool.server.errors import ApiError
from ninfer_pool.server.output_parser import OutputParser

LOGGER = logging.getLogger(__name__)
FAULT = "a fault of the server's own"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A call with its prompt; ``arrived`` since the epoch, and by the clock that measures."""

    call: Call
    ask: Rendered
    prompt: Prompt
    arrived: tuple[float, float]

    def part_at(self, position: int) -> str:
        """Say in which part of the request, as its client wrote it, a token lies."""
        part, origins = self.ask.part_at(position), self.call.origins
        if not origins or not part.startswith("messages["):
            return part
        origin = origins[int(part[len("messages[") : -1])]
        return "system" if origin < 0 else f"messages[{origin}]"


class Request:
    """A request that was submitted: what the engine makes becomes pieces, then a report.

    ``done`` is called once, at the end, whether anybody still listens or not.
    """

    def __init__(
        self,
        asked: Asked,
        *,
        number: int,
        tokenizer: Tokenizer,
        done: Callable[[Request, Report], None],
    ) -> None:
        self.asked = asked
        self.number = number
        self.handle: Submitted | None = None
        self.logged: Any = None
        """What the request log knows it by."""
        self.tokens: list[int] = []
        call = asked.call
        self._text = tokenizer.stream()
        self._parser = OutputParser(
            thinking=asked.ask.thinking,
            tools=call.tools,
            parse_tools=call.parse_tools,
            stop=call.stop,
            raw=call.text is not None,
        )
        self._done = done
        self._loop = asyncio.get_running_loop()
        self._out: asyncio.Queue[Start | Piece | Report | ApiError] = asyncio.Queue()
        self._started = False
        self._over = False
        self._broken = False
        self._thought = 0

    async def events(self) -> AsyncIterator[Start | Piece | Report]:
        """Yield `Start`, then pieces, then the `Report`.

        Raises:
            ApiError: it was refused, or failed.
        """
        while True:
            item = await self._out.get()
            if isinstance(item, ApiError):
                raise item
            yield item
            if isinstance(item, Report):
                return

    def cancel(self) -> None:
        """Nobody listens any more."""
        if self.handle is not None and not self._over:
            self.handle.cancel()

    def notify(self) -> None:
        """For the engine's thread: something has happened."""
        with suppress(RuntimeError):  # the loop has been closed: nobody is left to be told
            self._loop.call_soon_threadsafe(self._progress)

    def _progress(self) -> None:
        handle = self.handle
        if handle is None or self._over:
            return
        ended = handle.ended  # asked first: what is there afterwards is all
        if handle.sequence is not None and not self._started:
            self._started = True
            running = handle.sequence
            cached = running.lease.start
            self._out.put_nowait(Start(prompt_tokens=len(handle.prompt), cached_tokens=cached))
        if not self._broken:
            self._speak(handle, last=ended)
        if ended:
            self._over = True
            self._end(handle)

    def _speak(self, handle: Submitted, *, last: bool) -> None:
        """Pass the new tokens on as pieces; a fault of ours must not leave anybody waiting."""
        try:
            for token in handle.take():
                self._take(handle, token)
            if last:
                for piece in [*self._parser.push(self._text.finish()), *self._parser.finish()]:
                    self._out.put_nowait(piece)
        except Exception:
            LOGGER.exception("request %d: its text could not be told", self.number)
            self._broken = True
            handle.cancel()
            self._out.put_nowait(ApiError(500, FAULT))

    def _take(self, handle: Submitted, token: int) -> None:
        self.tokens.append(token)
        if handle.sequence is not None and token in handle.sequence.stop_tokens:
            return
        for piece in self._parser.push(self._text.push(token)):
            if isinstance(piece, Reasoning):
                self._thought = len(self.tokens)
            self._out.put_nowait(piece)

    def _end(self, handle: Submitted) -> None:
        last: Report | ApiError = ApiError(500, FAULT)
        try:
            report, last = self._outcome(handle)
            self._done(self, report)
        except Exception:
            LOGGER.exception("request %d: its end could not be noted", self.number)
        finally:
            self._out.put_nowait(last)

    def _outcome(self, handle: Submitted) -> tuple[Report, Report | ApiError]:
        """What came of it, and what its client is told."""
        try:
            output = handle.result(timeout=0)
        except Exception as error:
            report = self._report(handle, handle.output("error"), queued=0.0, finish="error")
            LOGGER.error("request %d failed", self.number, exc_info=error)
            return report, ApiError(500, "the engine failed; the server's log says why")
        finish = "error" if self._broken else None
        report = self._report(handle, output, queued=output.queued_seconds, finish=finish)
        return report, self._refusal(report) if output.finish == "refused" else report

    def _refusal(self, report: Report) -> ApiError:
        why = self.handle.refusal if self.handle is not None else None
        sizes = "" if why is None else f": {why.bytes_needed:,} bytes needed, at most "
        sizes += "" if why is None else f"{why.bytes_freeable:,} can be freed"
        told = f"no room for {report.prompt_tokens} prompt tokens and what they ask for{sizes}"
        return ApiError(503, f"{told}; unpin or remove something that is retained")

    def _report(
        self, handle: Submitted, made: RequestOutput, *, queued: float, finish: str | None = None
    ) -> Report:
        sequence, call = handle.sequence, self.asked.call
        now, (arrived, begun) = time.perf_counter(), self.asked.arrived
        first = sequence.first if sequence is not None and sequence.first else now
        return Report(
            number=self.number,
            endpoint=call.endpoint,
            prompt_tokens=made.prompt_tokens,
            cached_tokens=made.reused,
            output_tokens=len(made.tokens),
            reasoning_tokens=self._thought,
            retained_tokens=made.retained,
            reuse=made.reuse,
            reason=made.reason,
            exact=made.exact,
            finish=finish or made.finish,
            stop_string=self._parser.stop_string,
            key=made.key,
            lane=made.lane,
            drafted=made.drafted,
            accepted=made.accepted,
            arrived=arrived,
            queued_seconds=queued,
            first_token_seconds=first - begun,
            prefill_seconds=made.first_token_seconds,
            seconds=now - begun,
            stream=call.stream,
            control=call.control,
            tier=made.tier,
        )
