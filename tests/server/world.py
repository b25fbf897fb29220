"""A real server on a port of its own, over the shipped model, and clients to talk to it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from ninfer_pool.runner import TINY, Runner
from ninfer_pool.server.command import listen, uvicorn_config
from ninfer_pool.server.request_log import RequestLog
from ninfer_pool.server.service import Service
from ninfer_pool.server.settings import Settings

MODEL = "ninfer-tiny"


@dataclass
class Server:
    """A server that runs, seen from both sides."""

    service: Service
    url: str
    lines: list[str] = field(default_factory=list)
    """What it said on the console."""

    @property
    def runner(self) -> Runner:
        """The runner behind it."""
        return self.service.runner

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def chat(self, *messages: dict[str, Any] | str, **fields: Any) -> dict[str, Any]:
        """Ask greedily; a plain text is a user's message. Returns the body of a 200."""
        answer = self.http.post("/v1/chat/completions", json=chat_body(*messages, **fields))
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def get(self, path: str, **options: Any) -> dict[str, Any]:
        """Return the JSON of a 200."""
        answer = self.http.get(path, **options)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def idle(self) -> None:
        """Wait until nothing runs or waits, then let the pool check itself."""
        until = time.monotonic() + 30
        while self.service.live or self.service.engine.running or self.service.engine.queued:
            assert time.monotonic() < until, "the server is still busy"
            time.sleep(0.005)
        self.runner.pool.check()


def chat_body(*messages: dict[str, Any] | str, **fields: Any) -> dict[str, Any]:
    """The body of a greedy chat request of a few tokens."""
    listed = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]
    return {"model": MODEL, "messages": listed, "temperature": 0, "max_tokens": 8, **fields}


def cached(body: dict[str, Any]) -> int:
    """Tokens that an answer says were reused."""
    return int(body["usage"]["prompt_tokens_details"]["cached_tokens"])


def events(text: str) -> list[dict[str, Any]]:
    """The JSON of a stream's data lines, but for the end mark."""
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@contextmanager
def serve(
    settings: dict[str, Any] | None = None, *, log: Path | None = None, **options: Any
) -> Iterator[Server]:
    """Run a server while the block runs; ``options`` as `Runner.from_pretrained` takes them."""
    plain: dict[str, Any] = {"dtype": "fp32", "kv_dtype": "fp32", "kv_budget": "64MiB"}
    runner = Runner.from_pretrained(TINY, **{"clock": time.monotonic, **plain, **options})
    stated = Settings(**{"model_ids": (MODEL,), **(settings or {})})
    with running(runner, stated, log=log) as server:
        yield server


@contextmanager
def running(runner: Runner, settings: Settings, *, log: Path | None = None) -> Iterator[Server]:
    """Run a server over a runner while the block runs."""
    lines: list[str] = []
    opened = None if log is None else RequestLog(log)
    service = Service(runner, settings=settings, log=opened, print_line=lines.append)
    listener = listen("127.0.0.1", 0)
    inner = uvicorn.Server(uvicorn_config(service, log_level="error", drain=2))
    thread = threading.Thread(target=lambda: inner.run(sockets=[listener]), daemon=True)
    thread.start()
    try:
        while not inner.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.005)
        server = Server(service, f"http://127.0.0.1:{listener.getsockname()[1]}", lines)
        with server.http:
            yield server
    finally:
        inner.should_exit = True
        thread.join(timeout=30)
        listener.close()
