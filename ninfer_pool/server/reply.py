"""An answer on its way: a stream of events, or one body at the end."""

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
    """A dialect's way to tell what comes of a request."""

    def start(self, start: Start) -> list[bytes]:
        """Events of a stream before any token."""

    def piece(self, piece: Piece) -> list[bytes]:
        """Events of one piece, none where it is held back."""

    def end(self, report: Report) -> list[bytes]:
        """Events that end a stream."""

    def error(self, error: ApiError) -> list[bytes]:
        """Events that end a stream which failed."""

    def body(self, pieces: Sequence[Piece], report: Report) -> dict[str, Any]:
        """The whole answer to who wants no stream."""


class ReplyWriterType(Protocol):
    """Makes a writer."""

    prefix: str
    """What the ids of its answers begin with."""

    def __call__(self, call: Call, *, id: str, created: int, model: str) -> ReplyWriter: ...


class Reply(Response):
    """Runs a request while its client listens; one that leaves cancels it."""

    def __init__(self, service: Service, asked: Asked, writers: ReplyWriterType) -> None:
        self.background = None
        self._service = service
        self._asked = asked
        self._begun = False
        """The head of a stream was sent."""
        self._writer = writers(
            asked.call,
            id=writers.prefix + uuid4().hex,
            created=int(time.time()),
            model=asked.call.model or service.settings.model_ids[0],
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = self._service.submit(self._asked)
        watch = asyncio.create_task(_cancel_when_gone(receive, request))
        answer = self._stream if self._asked.call.stream else self._whole
        try:
            await answer(request, scope, receive, send)
        except asyncio.CancelledError:  # only a server that is told to stop gives its tasks up
            await self._give_up(send)
        finally:
            watch.cancel()
            request.cancel()

    async def _give_up(self, send: Send) -> None:
        error = ApiError(503, STOPPING)
        if not self._begun:
            raise error
        last = b"".join(self._writer.error(error))
        await send({"type": "http.response.body", "body": last})

    async def _whole(self, request: Request, scope: Scope, receive: Receive, send: Send) -> None:
        pieces: list[Piece] = []
        async for event in request.events():
            if isinstance(event, Report):
                if event.finish == "cancelled":  # whoever still listens is told
                    raise ApiError(503, STOPPING)
                await JSONResponse(self._writer.body(pieces, event))(scope, receive, send)
            elif not isinstance(event, Start):
                pieces.append(event)

    async def _stream(self, request: Request, scope: Scope, receive: Receive, send: Send) -> None:
        events = request.events()
        first = await anext(events)  # a refusal still has a status of its own
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


async def _cancel_when_gone(receive: Receive, request: Request) -> None:
    with suppress(asyncio.CancelledError):
        while (await receive())["type"] != "http.disconnect":
            pass
        request.cancel()
