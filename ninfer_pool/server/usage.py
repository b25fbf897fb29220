"""Parts of every dialect's answers: usage, timings, the pool's part, server-sent events."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from ninfer_pool.server.chat_request import (
    OUTCOME,
    Piece,
    Reasoning,
    Report,
    Start,
    Text,
    fields_of,
)

DONE = b"data: [DONE]\n\n"


def openai_usage(report: Report) -> dict[str, Any]:
    """Return OpenAI's usage; cached tokens are prompt tokens that the runner skipped."""
    tier = {} if report.tier is None else {"cached_tier": report.tier}
    return {
        "prompt_tokens": report.prompt_tokens,
        "completion_tokens": report.output_tokens,
        "total_tokens": report.prompt_tokens + report.output_tokens,
        "prompt_tokens_details": {"cached_tokens": report.cached_tokens, **tier},
        "completion_tokens_details": {"reasoning_tokens": report.reasoning_tokens},
    }


def anthropic_usage(report: Report) -> dict[str, Any]:
    """Return Anthropic's usage, whose three counts of input add up to the prompt."""
    return {
        "input_tokens": report.prefilled_tokens - report.created_tokens,
        "cache_creation_input_tokens": report.created_tokens,
        "cache_read_input_tokens": report.cached_tokens,
        "output_tokens": report.output_tokens,
        **({} if report.tier is None else {"cache_read_tier": report.tier}),
    }


def anthropic_usage_at_start(start: Start) -> dict[str, int]:
    """Return Anthropic's usage as far as it is certain before the first token."""
    return {
        "input_tokens": start.prompt_tokens - start.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": start.cached_tokens,
        "output_tokens": 0,
    }


def extras(report: Report) -> dict[str, Any]:
    """Return the fields of every dialect's answer that are not the dialect's own.

    The pool's part has no text and no tokens.
    """
    pool = {"request": report.number, **fields_of(report, *OUTCOME[:3], "key", "lane", "tier")}
    return {"timings": timings(report), "pool": pool}


def timings(report: Report) -> dict[str, float]:
    """Return times under the names of llama.cpp's server; the rate of no tokens is 0.

    ``cache_n`` and ``prompt_n`` add up to the prompt: resumed and computed.
    """
    drafts = {"draft_n": report.drafted, "draft_n_accepted": report.accepted}
    decode_seconds = max(0.0, report.seconds - report.first_token_seconds)
    return {
        "cache_n": report.cached_tokens,
        **_pace("prompt", report.prefilled_tokens, report.prefill_seconds),
        **_pace("predicted", report.output_tokens, decode_seconds),
        **(drafts if report.drafted else {}),
    }


def _pace(name: str, tokens: int, seconds: float) -> dict[str, float]:
    return {
        f"{name}_n": tokens,
        f"{name}_ms": seconds * 1e3,
        f"{name}_per_token_ms": seconds * 1e3 / tokens if tokens else 0.0,
        f"{name}_per_second": tokens / seconds if seconds else 0.0,
    }


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Join neighbours of one kind: the result does not depend on how a text was cut up."""
    found: list[Piece] = []
    for kind, group in groupby(pieces, key=type):
        same = list(group)
        if issubclass(kind, Text | Reasoning):
            same = [kind("".join(piece.text for piece in same if isinstance(piece, kind)))]
        found += same
    return found


def event(data: Mapping[str, Any], *, name: str | None = None) -> bytes:
    """Return one server-sent event in ASCII: readers differ in the line ends beyond it."""
    head = f"event: {name}\n" if name is not None else ""
    return f"{head}data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
