"""The routes: dialects of chat, the pool's own verbs, metrics, and the page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Match, Route
from starlette.status import HTTP_405_METHOD_NOT_ALLOWED

from ninfer_pool.core.identity import MAX_SALT
from ninfer_pool.server import anthropic, files, openai, status
from ninfer_pool.server.access import AccessGuard, body_parts
from ninfer_pool.server.anthropic_replies import MessagesWriter
from ninfer_pool.server.errors import ApiError, error_response
from ninfer_pool.server.metrics import wants_prometheus
from ninfer_pool.server.openai_replies import ChatWriter, CompletionWriter
from ninfer_pool.server.reply import Reply, ReplyWriter
from ninfer_pool.server.request import ServedRequest
from ninfer_pool.server.service import LONG, MOST_SHOWN, Parse, Service
from ninfer_pool.server.settings import Settings

PAGE = Path(__file__).parent / "page"
PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
DIALECTS: tuple[tuple[str, Parse, type[ReplyWriter]], ...] = (
    (openai.CHAT, openai.parse_chat, ChatWriter),
    (openai.COMPLETIONS, openai.parse_completion, CompletionWriter),
    (anthropic.MESSAGES, anthropic.parse_messages, MessagesWriter),
)
"""Each endpoint of the model, its parser and its writers."""


def create_app(service: Service) -> Starlette:
    """Return the ASGI application; the engine runs while its lifespan does."""
    settings = service.settings

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        service.start()
        yield
        await service.stop()

    return Starlette(
        routes=_routes(Routes(service)),
        lifespan=lifespan,
        middleware=_middleware(settings),
        exception_handlers={
            ApiError: _api_error,
            HTTPException: _http_error,
            ClientDisconnect: _disconnected,
            Exception: _fault,
        },
    )


def _middleware(settings: Settings) -> list[Middleware]:
    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(settings.cors),
        allow_methods=["*"],
        allow_headers=["*"],
    )
    guard = Middleware(AccessGuard, api_key=settings.api_key, origins=settings.cors)
    return [cors, guard] if settings.cors else [guard]


def _routes(routes: Routes) -> list[BaseRoute]:
    get, post, delete = ["GET"], ["POST"], ["DELETE"]
    return [
        *(
            Route(path, partial(routes.serve, parse, writers), methods=post)
            for path, parse, writers in DIALECTS
        ),
        Route("/v1/messages/count_tokens", routes.count_tokens, methods=post),
        Route("/v1/models", routes.models, methods=get),
        Route("/v1/models/{name:path}", routes.model, methods=get),
        Route("/health", routes.health, methods=get),
        Route("/metrics", routes.metrics, methods=get),
        Route("/pool", routes.pool, methods=get),
        Route("/pool/explain", routes.explain, methods=post),
        Route("/pool/entries", routes.clear, methods=delete),
        Route("/pool/entries/file", routes.upload, methods=post),
        Route("/pool/entries/{key}", routes.entry, methods=get),
        Route("/pool/entries/{key}", routes.remove, methods=delete),
        Route("/pool/entries/{key}/file", routes.download, methods=get),
        Route("/pool/entries/{key}/pin", routes.pin, methods=[*post, *delete]),
        *_page(),
    ]


def _page() -> list[BaseRoute]:
    """The page's index at the root, its other files below ``/page``."""
    files = {f"/page/{path.name}": path for path in PAGE.iterdir() if path.is_file()}
    files["/"] = files.pop("/page/index.html")
    return [Route(name, partial(_file, path), methods=["GET"]) for name, path in files.items()]


async def _file(path: Path, _: HttpRequest) -> Response:
    return FileResponse(path, headers=PAGE_HEADERS)


class Routes:
    """The endpoints, by name."""

    def __init__(self, service: Service) -> None:
        self._service = service

    # -- requests to the model -------------------------------------------------------------

    async def serve(
        self, parse: Parse, writers: type[ReplyWriter], request: HttpRequest
    ) -> Response:
        """POST to an endpoint of the model."""
        return Reply(self._service, await self._prepared(request, parse), writers)

    async def _prepared(self, request: HttpRequest, parse: Parse) -> ServedRequest:
        body = await self._body(request)
        headers = {name: _utf8(value) for name, value in request.headers.items()}
        return await self._service.prepare(parse, body, headers)

    async def _body(self, request: HttpRequest) -> bytes:
        most = self._service.settings.max_request_bytes
        text = f"the body has more than {most >> 20} MiB; send less, or raise --max-request-mib"
        return b"".join([part async for part in body_parts(request, most, too_large=text)])

    async def count_tokens(self, request: HttpRequest) -> Response:
        """POST /v1/messages/count_tokens."""
        prepared = await self._prepared(request, anthropic.parse_count)
        return JSONResponse({"input_tokens": len(prepared.prompt)})

    # -- models, health and metrics --------------------------------------------------------

    async def models(self, _: HttpRequest) -> Response:
        """GET /v1/models: the fields of OpenAI's and Anthropic's clients, in one."""
        names = self._service.settings.model_ids
        pages = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        data = [self._model(name) for name in names]
        return JSONResponse({"object": "list", "data": data, **pages})

    async def model(self, request: HttpRequest) -> Response:
        """GET /v1/models/{name}."""
        self._service.check_model(request.path_params["name"])
        return JSONResponse(self._model(request.path_params["name"]))

    def _model(self, name: str) -> dict[str, Any]:
        begun = int(self._service.begun)
        return {
            "id": name,
            "object": "model",
            "type": "model",
            "display_name": name,
            "created": begun,
            "created_at": datetime.fromtimestamp(begun, timezone.utc).isoformat(),
            "owned_by": "ninfer-pool",
            "max_model_len": self._service.runner.max_context,
        }

    async def health(self, _: HttpRequest) -> Response:
        """GET /health: for a supervisor of the process; needs no key."""
        failed = self._service.engine.failure is not None
        return JSONResponse({"status": "failed" if failed else "ok"}, 503 if failed else 200)

    async def metrics(self, request: HttpRequest) -> Response:
        """GET /metrics: Prometheus text for scrapers, JSON for all others."""
        accept = request.headers.get("accept", "")
        metrics = self._service.metrics
        if not wants_prometheus(accept):
            salt = _salt(request)
            return JSONResponse(await self._aside(lambda: metrics.json(salt=salt)))
        text, content_type = await self._aside(lambda: metrics.prometheus(accept=accept))
        return Response(text, headers={"content-type": content_type})

    # -- the pool --------------------------------------------------------------------------

    async def pool(self, request: HttpRequest) -> Response:
        """GET /pool."""
        salt = _salt(request)
        return JSONResponse(await self._aside(lambda: status.pool(self._service, salt=salt)))

    async def explain(self, request: HttpRequest) -> Response:
        """POST /pool/explain: an explanation of the hit of a request of any dialect."""
        anthropic_shaped = "anthropic-version" in request.headers
        prepared = await self._prepared(
            request, anthropic.parse_count if anthropic_shaped else openai.parse_explain
        )
        aside = asyncio.to_thread if len(prepared.prompt) > LONG else self._aside
        return JSONResponse(await aside(lambda: status.explanation(self._service, prepared)))

    async def clear(self, request: HttpRequest) -> Response:
        """DELETE /pool/entries: one tenant's, or all without a salt."""
        salt = _salt(request)
        return JSONResponse(await self._aside(lambda: status.clear(self._service, salt=salt)))

    async def entry(self, request: HttpRequest) -> Response:
        """GET /pool/entries/{key}."""
        key, salt = await self._key(request), _salt(request)
        return JSONResponse(await self._aside(lambda: status.entry(self._service, key, salt=salt)))

    async def remove(self, request: HttpRequest) -> Response:
        """DELETE /pool/entries/{key}."""
        key = await self._key(request)
        if not await self._aside(lambda: self._service.runner.pool.evict(key)):
            raise _conflict(key, "it is pinned or being resumed from; unpin it or wait")
        return JSONResponse({"removed": 1})

    async def pin(self, request: HttpRequest) -> Response:
        """POST /pool/entries/{key}/pin; DELETE, or ``{"pinned": false}``, takes the pin off."""
        key = await self._key(request)
        wanted = request.method == "POST" and openai.parse_pin(await self._body(request))
        pool = self._service.runner.pool
        if not await self._aside(lambda: (pool.pin if wanted else pool.unpin)(key)) and wanted:
            raise _conflict(key, "it names more than one entry")
        return JSONResponse({"key": key, "pinned": wanted})

    async def download(self, request: HttpRequest) -> Response:
        """GET /pool/entries/{key}/file: ``?tokens=false`` leaves the token ids out."""
        key, tokens = await self._key(request), request.query_params.get("tokens", "true")
        if tokens not in ("true", "false"):
            text = f"tokens: {tokens[:20]!r}; needs true or false"
            raise ApiError(400, text, param="tokens")
        return await files.download(self._service, key, tokens=tokens == "true")

    async def upload(self, request: HttpRequest) -> Response:
        """POST /pool/entries/file: the body is a download's."""
        return JSONResponse(await files.upload(self._service, request, salt=_salt(request)))

    async def _aside(self, work: Callable[[], Any]) -> Any:
        """Run a function that takes the pool's lock; in a thread where a tier may hold it."""
        if self._service.runner.tiers.shelves:
            return await asyncio.to_thread(work)
        return work()

    async def _key(self, request: HttpRequest) -> str:
        """Return the key of the path, if the caller's tenant has an entry of that key."""
        key: str = request.path_params["key"]
        found = await self._aside(lambda: self._service.runner.pool.find(key))
        if not any(info.namespace.salt == _salt(request) for info in found):
            raise ApiError(404, f"no entry has the key {key[:MOST_SHOWN]!r}", param="key")
        return key


def _salt(request: HttpRequest) -> str | None:
    """Return the salt of the caller's tenant.

    Raises:
        ApiError: 400; no valid salt, which must not be taken for none.
    """
    salt = request.headers.get("x-cache-salt")
    salt = request.query_params.get("cache_salt") if salt is None else _utf8(salt)
    if salt is not None and (not 0 < len(salt) <= MAX_SALT or "\0" in salt):
        text = f"cache_salt: {salt[:20]!r}; needs 1 to {MAX_SALT} characters, none of them NUL"
        raise ApiError(400, text, param="cache_salt")
    return salt


def _utf8(value: str) -> str:
    """Return a header's text, read as UTF-8, else as Latin-1."""
    try:
        return value.encode("latin-1").decode("utf-8")
    except UnicodeError:
        return value


def _conflict(key: str, why: str) -> ApiError:
    return ApiError(409, f"entry {key}: {why}", param="key")


async def _api_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error, request.url.path)


async def _http_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path[:MOST_SHOWN]}: {error.detail}"
    answer = error_response(ApiError(error.status_code, text), request.url.path)
    if error.status_code == HTTP_405_METHOD_NOT_ALLOWED:
        answer.headers["allow"] = ", ".join(_allowed(request))
    return answer


def _allowed(request: HttpRequest) -> list[str]:
    """Return the methods of a path, which several routes may share."""
    routes = [each for each in request.app.routes if isinstance(each, Route)]
    fit = [each for each in routes if each.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for each in fit for method in each.methods or ()})


async def _disconnected(_: HttpRequest, __: Exception) -> Response:
    """Answer a client that left before its request was complete: this is never sent."""
    return Response(status_code=400)


async def _fault(request: HttpRequest, _: Exception) -> Response:
    return error_response(ApiError(500, "a fault of the server's own"), request.url.path)
