"""What a server answers to what is wrong, and that it costs the others nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.server.raw import Answer
from tests.server.world import MODEL, Server, serve

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
COUNT, EXPLAIN = "/v1/messages/count_tokens", "/pool/explain"
BODIES = (CHAT, COMPLETIONS, MESSAGES, COUNT, EXPLAIN)
CONTEXT, MOST_BYTES = 1024, 1 << 20
HELLO = [{"role": "user", "content": "Hello there."}]


@contextmanager
def sturdy() -> Iterator[Server]:
    """A server with small limits and two names for its model."""
    limits = {"max_request_bytes": MOST_BYTES, "default_max_tokens": 8}
    settings = {"model_ids": (MODEL, "another"), **limits}
    with serve(settings, max_context=CONTEXT, lanes=2) as server:
        yield server


@contextmanager
def unharmed(server: Server) -> Iterator[Server]:
    """Whatever the block does: afterwards good clients are answered as they were before it.

    And the server holds nothing of what was wrong.
    """
    before = server.chat("Are you there?")["choices"]
    yield server
    assert server.chat("Are you there?")["choices"] == before
    server.idle()
    server.http.delete("/pool/entries")
    stats = server.runner.pool.stats()
    assert stats.leases == stats.entries == 0
    assert stats.pages_free == stats.pages_total
    assert not server.service.live


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    """A good body for an endpoint, with other fields."""
    if path == COMPLETIONS:
        return {"model": MODEL, "prompt": "Hello", "max_tokens": 2, **fields}
    return {"model": MODEL, "messages": HELLO, "max_tokens": 2, **fields}


def error_of(answer: Answer, path: str, *, status: int) -> dict[str, Any]:
    """The error of an answer, which must have the shape of the dialect that asked."""
    assert answer.status == status, answer
    assert answer.headers["content-type"] == "application/json"
    body = answer.json
    if path.startswith(MESSAGES):
        assert set(body) == {"type", "error"}
        assert body["type"] == "error"
        assert set(body["error"]) == {"type", "message"}
    else:
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    assert isinstance(error["message"], str)
    assert 0 < len(error["message"]) < 1000
    assert "Traceback" not in error["message"]
    return error
