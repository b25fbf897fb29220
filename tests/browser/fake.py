"""A server with the page's interface and no model: it makes up what `GET /pool` says.

A chat request is a conversation's next turn; each word counts as 40 tokens. It knows just enough
to be clicked through: what the page shows of a real pool is the real server's business.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

PAGE = files("ninfer_pool.server") / "page"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
LANES, MIB, TOKENS_A_WORD = 2, 2**20, 40
Json = dict[str, Any]


class Tenant:
    """What one salt left behind."""

    def __init__(self) -> None:
        self.entries: dict[str, Json] = {}
        self.requests: list[Json] = []

    def ask(self, messages: list[Json], *, number: int, now: float) -> Json:
        """One turn: it resumes the entry of the same first message, and grows it."""
        words = sum(len(str(message["content"]).split()) for message in messages)
        tokens = 12 + TOKENS_A_WORD * words
        key = hashlib.blake2b(str(messages[0]).encode(), digest_size=16).hexdigest()
        old = self.entries.pop(key, None)
        cached = min(old["tokens"], tokens - 4) if old else 0
        reason = "hit" if old else "no_entry"
        self.entries[key] = _entry(key, tokens + 8, hits=old["hits"] + 1 if old else 0, now=now)
        row = {
            "request": number, "endpoint": "/v1/chat/completions", "arrived": now,
            "prompt_tokens": tokens, "cached_tokens": cached, "output_tokens": 8, "exact": True,
            "reuse": "restore_turn_checkpoint" if old else "full_reset", "reason": reason,
            "finish": "stop", "lane": number % LANES, "key": key, "ttft_ms": 4.2 + tokens / 50,
            "queue_ms": 0.3, "total_ms": 31.5 + tokens / 50, "parted_at": None, "parted_in": None,
        }  # fmt: skip
        self.requests.insert(0, row)
        return row

    def totals(self) -> Json:
        """What all its requests come to."""
        total = {
            name: sum(row[name] for row in self.requests)
            for name in ("prompt_tokens", "cached_tokens", "output_tokens")
        }
        rate = total["cached_tokens"] / max(1, total["prompt_tokens"])
        return {"requests": len(self.requests), **total, "hit_rate": rate}


def _entry(key: str, tokens: int, *, hits: int, now: float) -> Json:
    kinds = [("system", 12), ("turn", tokens - 12), ("response", tokens - 9), ("frontier", tokens)]
    points = [{"position": p, "kind": k, "superseded": k == "response"} for k, p in kinds]
    kv, image = tokens * 6_144, len(kinds) * 3 * MIB
    return {
        "key": key, "tokens": tokens, "lane": 0, "bytes": kv + image, "kv_bytes": kv,
        "image_bytes": image, "hits": hits, "priority": 0, "pinned": False, "released": False,
        "used": now, "checkpoints": points,
    }  # fmt: skip


class World:
    """Every tenant, and the answers that the routes give."""

    def __init__(self) -> None:
        self.tenants: dict[str | None, Tenant] = {}
        self.started = time.time()
        self.count = 0

    def tenant(self, request: Request) -> Tenant:
        """Whose part of the pool `request` asks about."""
        salt = request.query_params.get("cache_salt") or request.headers.get("x-cache-salt")
        return self.tenants.setdefault(salt, Tenant())

    def rows(self, tenant: Tenant) -> list[Json]:
        """The entries of `tenant` as the page reads them."""
        now = time.time()
        return [
            {**{k: v for k, v in entry.items() if k != "used"}, "age_seconds": now - entry["used"],
             "idle_seconds": now - entry["used"]}
            for entry in tenant.entries.values()
        ]  # fmt: skip

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        body = await request.json()
        tenant = self.tenants.setdefault(body.get("cache_salt"), Tenant())
        self.count += 1
        row = tenant.ask(body["messages"], number=self.count, now=time.time())
        return JSONResponse({"pool": {"request": row["request"], "key": row["key"]}})

    async def pool(self, request: Request) -> Response:
        """`GET /pool`."""
        tenant = self.tenant(request)
        held = [e for other in self.tenants.values() for e in other.entries.values()]
        kv, images = (sum(e[name] for e in held) for name in ("kv_bytes", "image_bytes"))
        pinned = sum(e["bytes"] for e in held if e["pinned"])
        total = 256 * MIB
        lanes = [
            {"lane": n, "state": "idle", "request": None, "prompt_tokens": 0, "cached_tokens": 0,
             "position": 0, "output_tokens": 0, "reuse": None}
            for n in range(LANES)
        ]  # fmt: skip
        rows = tenant.requests
        history = [[r["arrived"], r["prompt_tokens"], r["cached_tokens"]] for r in reversed(rows)]
        return JSONResponse({
            "model": "tiny", "policy": "default", "affinity": "prefer", "max_entries": None,
            "single_lane": False, "uptime_seconds": time.time() - self.started, "now": time.time(),
            "capacity": {"tokens": 40_000, "conversations": 12, "page_bytes": 393_216,
                         "image_bytes": 3 * MIB, "text": "room for about 12 conversations"},
            "lanes": lanes, "queued": 0, "running": 0,
            "bytes": {"total": total, "free": total - kv - images, "retained": kv + images,
                      "kv": kv, "images": images, "pinned": pinned, "running": 0},
            "pages": {"total": 682, "free": 600}, "entries": self.rows(tenant), "counters": {},
            "totals": tenant.totals(), "history": history, "requests": rows[:64],
        })  # fmt: skip

    async def entry(self, request: Request) -> Response:
        """`GET` and `DELETE /pool/entries/{key}`."""
        tenant, key = self.tenant(request), request.path_params["key"]
        if key not in tenant.entries:
            return _unknown(key)
        if request.method == "DELETE":
            del tenant.entries[key]
            return JSONResponse({"removed": 1})
        row = next(row for row in self.rows(tenant) if row["key"] == key)
        uses = [r for r in tenant.requests if r["key"] == key]
        said = [f"It holds {row['tokens']} tokens.", "It was made by the fake server."]
        return JSONResponse({"entry": row, "explanation": said, "requests": uses})

    async def clear(self, request: Request) -> Response:
        """`DELETE /pool/entries`."""
        entries = self.tenant(request).entries
        removed = len(entries)
        entries.clear()
        return JSONResponse({"removed": removed})

    async def pin(self, request: Request) -> Response:
        """`POST /pool/entries/{key}/pin`."""
        tenant, key = self.tenant(request), request.path_params["key"]
        if key not in tenant.entries:
            return _unknown(key)
        pinned = bool((await request.json()).get("pinned", True))
        tenant.entries[key]["pinned"] = pinned
        return JSONResponse({"key": key, "pinned": pinned})


def _unknown(key: str) -> Response:
    return JSONResponse({"error": {"message": f"no entry {key}"}}, status_code=404)


async def _index(request: Request) -> Response:
    return FileResponse(str(PAGE / "index.html"))


async def _guard(request: Request, call_next: RequestResponseEndpoint) -> Response:
    response = await call_next(request)
    response.headers["Content-Security-Policy"] = POLICY
    return response


def app() -> Starlette:
    """A fresh world behind its routes."""
    world = World()
    routes = [
        Route("/", _index),
        Mount("/page", StaticFiles(directory=str(PAGE))),
        Route("/v1/chat/completions", world.chat, methods=["POST"]),
        Route("/pool", world.pool),
        Route("/pool/entries", world.clear, methods=["DELETE"]),
        Route("/pool/entries/{key}", world.entry, methods=["GET", "DELETE"]),
        Route("/pool/entries/{key}/pin", world.pin, methods=["POST"]),
    ]
    return Starlette(routes=routes, middleware=[Middleware(BaseHTTPMiddleware, dispatch=_guard)])


@contextmanager
def running() -> Iterator[str]:
    """Serve a fresh world on a free port of this machine; give its address."""
    config = uvicorn.Config(app(), host="127.0.0.1", port=0, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise RuntimeError("the fake server did not start")
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)
