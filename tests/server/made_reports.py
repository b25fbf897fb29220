"""Reports made for tests."""

from __future__ import annotations

from typing import Any

from ninfer_pool.server.chat_request import Control, Report


def report(number: int = 1, **changes: Any) -> Report:
    """A finished request that resumed 60 of 100 tokens and made 20."""
    fields: dict[str, Any] = {
        "number": number,
        "endpoint": "/v1/chat/completions",
        "prompt_tokens": 100,
        "cached_tokens": 60,
        "output_tokens": 20,
        "reasoning_tokens": 0,
        "retained_tokens": 119,
        "reuse": "restore_turn_checkpoint",
        "reason": "hit",
        "exact": True,
        "finish": "stop",
        "stop_string": None,
        "key": "a-key-of-the-pool",
        "lane": 0,
        "drafted": 8,
        "accepted": 5,
        "arrived": 1000.0,
        "queued_seconds": 0.002,
        "first_token_seconds": 0.0123,
        "prefill_seconds": 0.01,
        "seconds": 1.5,
        "stream": False,
        "control": Control(),
    }
    return Report(**{**fields, **changes})


def unheard(number: int = 1, **changes: Any) -> Report:
    """A request that was cancelled while it waited."""
    never = {"cached_tokens": 0, "output_tokens": 0, "retained_tokens": 0, "lane": None}
    words = {"reuse": "full_reset", "reason": "no_entry", "finish": "cancelled", "key": None}
    return report(number, **{**never, **words, **changes})
