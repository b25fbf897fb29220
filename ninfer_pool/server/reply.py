"""The answer to a request: a stream of events, or one body at the end.

Events are written here and not by a library: sse-starlette ends every stream as soon as the
process is signalled to stop. Here running requests have their share of the time, and a last event.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any, Protocol
from uuid import uuid4

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from ninfer_pool.server.calls import Call, Piece, Report, Start
from ninfer_pool.server.errors import ApiError
from ninfer_pool.server.request import Asked, Request
from ninfer_pool.server.service import Service

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]
STOPPING = "cancelled: the server is stopping"


class ReplyWriter(Protocol):
    """Writes a request's answer in one dialect."""

    def start(self, start: Start) -> list[bytes]:
        """Return the events of a stream before any token."""

    def piece(self, piece: Piece) -> list[bytes]:
        """Return the events of one piece; none where it is held back."""

    def end(self, report: Report) -> list[bytes]:
        """Return the events that end a stream."""

    def error(self, error: ApiError) -> list[bytes]:
        """Return the events that end a stream after a failure."""

    def body(self, pieces: Sequence[Piece], report: Report) -> dict[str, Any]:
        """Return the whole answer, where no stream was requested."""


class ReplyWriterType(Protocol):
    """A class of writers."""

    prefix: str
    """The prefix of its answers' ids."""

    def __call__(self, call: Call, *, id: str, created: int, model: str) -> ReplyWriter: ...


class Reply(Response):
    """Runs a request, and cancels it when its client disconnects."""

    def __init__(self, service: Service, asked: Asked, writers: ReplyWriterType) -> None:
        self.background = None
        self._service = service
        self._asked = asked
        self._begun = False  # whether the head of a stream was sent
        self._writer = writers(
            asked.call,
            id=writers.prefix + uuid4().hex,
            created=int(time.time()),
            model=asked.call.model or service.settings.model_ids[0],
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = self._service.submit(self._asked)
        watch = asyncio.create_task(_cancel_on_disconnect(receive, request))
        answer = self._stream if self._asked.call.stream else self._whole
        try:
            await answer(request, scope, receive, send)
        except asyncio.CancelledError:  # only a server that stops cancels its tasks
            await self._abort(send)
        finally:
            watch.cancel()
            request.cancel()

    async def _abort(self, send: Send) -> None:
        error = ApiError(503, STOPPING)
        if not self._begun:
            raise error
        last = b"".join(self._writer.error(error))
        await send({"type": "http.response.body", "body": last})

    async def _whole(self, request: Request, scope: Scope, receive: Receive, send: Send) -> None:
        pieces: list[Piece] = []
        async for event in request.events():
            if isinstance(event, Report):
                if event.finish == "cancelled":  # by the server: the client is still connected
                    raise ApiError(503, STOPPING)
                await JSONResponse(self._writer.body(pieces, event))(scope, receive, send)
            elif not isinstance(event, Start):
                pieces.append(event)

    async def _stream(self, request: Request, scope: Scope, receive: Receive, send: Send) -> None:
        events = request.events()
        first = await anext(events)  # an error before the head still has a status of its own
        if isinstance(first, Report):
            raise ApiError(503, STOPPING)
        head = {"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS}
        self._begun = True
        await send(head)
        async for part in self._parts(first, events):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _parts(
        self, first: Start | Piece | Report, rest: AsyncIterator[Start | Piece | Report]
    ) -> AsyncIterator[bytes]:
        writer = self._writer
        try:
            if isinstance(first, Start):
                yield b"".join(writer.start(first))
            async for event in rest:
                if isinstance(event, Report):
                    if event.finish == "cancelled":
                        raise ApiError(503, STOPPING)
                    yield b"".join(writer.end(event))
                elif not isinstance(event, Start):
                    part = b"".join(writer.piece(event))
                    if part:
                        yield part
        except ApiError as error:
            yield b"".join(writer.error(error))


async def _cancel_on_disconnect(receive: Receive, request: Request) -> None:
    with suppress(asyncio.CancelledError):
        while (await receive())["type"] != "http.disconnect":
            pass
        request.cancel()
