"""Bodies as clients send them, and what the dialects answer to bad ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from ninfer_pool.server import anthropic, openai
from ninfer_pool.server.chat_request import ChatRequest
from ninfer_pool.server.errors import ApiError

Parse = Callable[..., ChatRequest]
HELLO = {"role": "user", "content": "Hello"}
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "Tells it",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "note": {"type": ["string", "null"]},
            "exact": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            "unit": {"enum": ["1", "2"]},
        },
    },
}
TOOL = {"type": "function", "function": WEATHER}


def chat(*messages: Any, headers: dict[str, str] | None = None, **fields: Any) -> ChatRequest:
    """What a chat request becomes."""
    body = {"model": "m", "messages": list(messages) or [HELLO], **fields}
    return openai.parse_chat(json.dumps(body).encode(), headers or {})


def completion(headers: dict[str, str] | None = None, **fields: Any) -> ChatRequest:
    """What a completion request becomes."""
    body = {"model": "m", "prompt": "Once", **fields}
    return openai.parse_completion(json.dumps(body).encode(), headers or {})


def messages(*asked: Any, headers: dict[str, str] | None = None, **fields: Any) -> ChatRequest:
    """What an Anthropic request becomes."""
    body = {"model": "m", "max_tokens": 9, "messages": list(asked) or [HELLO], **fields}
    return anthropic.parse_messages(json.dumps(body).encode(), headers or {})


def refusal(ask: Callable[[], Any]) -> ApiError:
    """The 400 that comes of a request."""
    with pytest.raises(ApiError) as caught:
        ask()
    assert caught.value.status == 400
    return caught.value
