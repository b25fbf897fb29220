"""The answer to a request: a stream of events, or one body at the end.

Events are written here and not by a library: sse-starlette ends every stream as soon as the
process is signalled to stop. Here running requests have their share of the time, and a last event.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Protocol
from uuid import uuid4

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from ninfer_pool.server.chat_request import ChatRequest, Piece, Report, Start
from ninfer_pool.server.errors import ApiError
from ninfer_pool.server.request import ServedRequest
from ninfer_pool.server.service import Service

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]
STOPPING = "cancelled: the server is stopping"


class ReplyWriter(Protocol):
    """Writes a request's answer in one dialect."""

    prefix: str
    """The prefix of its answers' ids."""

    def __init__(self, request: ChatRequest, *, id: str, created: int, model: str) -> None: ...

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


class Reply(Response):
    """Runs a request, and cancels it when its client disconnects."""

    def __init__(
        self, service: Service, request: ServedRequest, writers: type[ReplyWriter]
    ) -> None:
        self.background = None
        self._service = service
        self._request = request
        self._writers = writers
        self._begun = False  # whether the head of a stream was sent

    @cached_property
    def _writer(self) -> ReplyWriter:
        chat = self._request.chat
        return self._writers(
            chat,
            id=self._writers.prefix + uuid4().hex,
            created=int(time.time()),
            model=chat.model or self._service.settings.model_ids[0],
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = self._request
        self._service.submit(request)
        watch = asyncio.create_task(_cancel_on_disconnect(receive, request))
        answer = self._stream if request.chat.stream else self._whole
        try:
            await answer(scope, receive, send)
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

    async def _event(self) -> Start | Piece | Report:
        """Wait for the next event.

        Raises:
            ApiError: the request was refused, failed, or was cancelled by the server.
        """
        event = await self._request.events.get()
        if isinstance(event, ApiError):
            raise event
        if isinstance(event, Report) and event.finish == "cancelled":  # its client is connected
            raise ApiError(503, STOPPING)
        return event

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        pieces: list[Piece] = []
        while not isinstance(event := await self._event(), Report):
            pieces += [event] if not isinstance(event, Start) else []
        await JSONResponse(self._writer.body(pieces, event))(scope, receive, send)

    async def _stream(self, _: Scope, __: Receive, send: Send) -> None:
        first = await self._event()  # an error before the head still has a status of its own
        head = {"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS}
        self._begun = True
        await send(head)
        async for part in self._parts(first):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _parts(self, event: Start | Piece | Report) -> AsyncIterator[bytes]:
        writer = self._writer
        try:
            while not isinstance(event, Report):
                if isinstance(event, Start):
                    yield b"".join(writer.start(event))
                elif part := b"".join(writer.piece(event)):
                    yield part
                event = await self._event()
            yield b"".join(writer.end(event))
        except ApiError as error:
            yield b"".join(writer.error(error))


async def _cancel_on_disconnect(receive: Receive, request: ServedRequest) -> None:
    with suppress(asyncio.CancelledError):
        while (await receive())["type"] != "http.disconnect":
            pass
        request.cancel()
