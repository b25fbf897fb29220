"""One question in every dialect, with what it says to the pool in its body or in headers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tests.server.world import MODEL, Server

DIALECTS = ("/v1/chat/completions", "/v1/completions", "/v1/messages")
ANTHROPIC = {"anthropic-version": "2023-06-01"}


@dataclass(frozen=True)
class Told:
    """What every dialect's answer says."""

    prompt: int
    cached: int
    reuse: str
    reason: str
    exact: bool
    key: str | None
    lane: int
    number: int
    body: dict[str, Any]


def body_of(path: str, text: str, **fields: Any) -> dict[str, Any]:
    """A greedy request of a few tokens."""
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 3, **fields}
    if path == "/v1/completions":
        return {"prompt": text, **asked}
    return {"messages": [{"role": "user", "content": text}], **asked}


def headers_of(fields: dict[str, Any]) -> dict[str, str]:
    """The same fields as headers."""
    values = {k: v if isinstance(v, str) else json.dumps(v) for k, v in fields.items()}
    return {f"X-{name.replace('_', '-')}": value for name, value in values.items()}


def ask(server: Server, path: str, text: str, *, how: str = "body", **control: Any) -> Told:
    """Ask, with ``control`` in the body or in headers; the answer must be a 200."""
    body = body_of(path, text, **(control if how == "body" else {}))
    headers = headers_of(control) if how == "header" else {}
    answer = server.http.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return told(answer.json())


def told(body: dict[str, Any]) -> Told:
    """Read an answer of any dialect; its usage and its timings must agree."""
    usage, pool, timings = body["usage"], body["pool"], body["timings"]
    if "input_tokens" in usage:
        cached = usage["cache_read_input_tokens"]
        prompt = cached + usage["input_tokens"] + usage["cache_creation_input_tokens"]
    else:
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        prompt = usage["prompt_tokens"]
    assert (timings["cache_n"], timings["prompt_n"]) == (cached, prompt - cached)
    return Told(
        prompt=prompt,
        cached=cached,
        number=pool["request"],
        body=body,
        **{name: pool[name] for name in ("reuse", "reason", "exact", "key", "lane")},
    )


def explain(server: Server, path: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    """What the pool says of a request of any dialect."""
    shape = ANTHROPIC if path == "/v1/messages" else {}
    answer = server.http.post("/pool/explain", json=body, headers={**shape, **headers})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found
