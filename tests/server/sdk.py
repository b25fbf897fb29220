"""The official clients in front of a server that runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import openai

from tests.server.world import MODEL, Server

Client = Any
"""One of the official clients: their types of messages are more than plain JSON."""
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}


def options(server: Server, path: str) -> dict[str, Any]:
    """What every client is made with: no retries, which would hide what happened."""
    return {"base_url": server.url + path, "api_key": "none", "max_retries": 0, "timeout": 60}


@contextmanager
def openai_of(server: Server, **more: Any) -> Iterator[Client]:
    """OpenAI's client."""
    with openai.OpenAI(**{**options(server, "/v1"), **more}) as client:
        yield client


@contextmanager
def anthropic_of(server: Server, **more: Any) -> Iterator[Client]:
    """Anthropic's client."""
    with anthropic.Anthropic(**{**options(server, ""), **more}) as client:
        yield client


def user(text: Any) -> dict[str, Any]:
    """A user's message."""
    return {"role": "user", "content": text}
