"""Anthropic's dialect: answers, whole or as a stream of events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ninfer_pool.server.chat_request import (
    ChatRequest,
    Piece,
    Reasoning,
    Report,
    Start,
    Text,
    ToolCall,
)
from ninfer_pool.server.errors import ApiError
from ninfer_pool.server.usage import (
    anthropic_usage,
    anthropic_usage_at_start,
    event,
    extras,
    merged,
)


class MessagesWriter:
    """Answers of POST /v1/messages."""

    prefix = "msg_"

    def __init__(self, request: ChatRequest, *, id: str, created: int, model: str) -> None:
        self._head = {"id": id, "type": "message", "role": "assistant", "model": model}
        self._index = -1  # of the newest block
        self._open: type[Piece] | None = None  # the kind of that block; None: it was closed
        self._blank = ""  # white space that would begin a block
        self._calls = False

    # -- a stream --------------------------------------------------------------------------

    def start(self, start: Start) -> list[bytes]:
        """Return the head of the message, with its usage so far."""
        message: dict[str, Any] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": anthropic_usage_at_start(start),
        }
        return [_event("message_start", message=message)]

    def piece(self, piece: Piece) -> list[bytes]:
        """Return the events of a piece; white space before a call is held back."""
        if isinstance(piece, ToolCall):
            self._calls, self._blank = True, ""
            block = {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": piece.arguments}
            return [*self._begin(ToolCall, block), self._delta(delta), *self._close()]
        if isinstance(piece, Reasoning):
            block = {"type": "thinking", "thinking": "", "signature": ""}
            delta = {"type": "thinking_delta", "thinking": piece.text}
            return [*self._begin(Reasoning, block), self._delta(delta)]
        text, self._blank = self._blank + piece.text, ""
        if self._open is not Text and text.isspace():
            self._blank = text
            return []
        return self._text(text)

    def end(self, report: Report) -> list[bytes]:
        """Return why the message ended, its usage, and how it was made."""
        rest = self._text(self._blank) if self._blank and not self._calls else []
        last = _event(
            "message_delta",
            delta=_stop(report, calls=self._calls),
            usage=anthropic_usage(report),
            **extras(report),
        )
        return [*rest, *self._close(), last, _event("message_stop")]

    def error(self, error: ApiError) -> list[bytes]:
        """Return the event of a failure in mid-stream."""
        return [event(error.anthropic(), name="error")]

    def _text(self, text: str) -> list[bytes]:
        begun = self._begin(Text, {"type": "text", "text": ""})
        return [*begun, self._delta({"type": "text_delta", "text": text})]

    def _begin(self, kind: type[Piece], block: dict[str, Any]) -> list[bytes]:
        """Open a block unless one of this kind is open; each call has its own."""
        if self._open is kind:
            return []
        closed = self._close()
        self._open = kind
        self._index += 1
        return [*closed, _event("content_block_start", index=self._index, content_block=block)]

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> list[bytes]:
        signed = []
        if self._open is Reasoning:
            signed = [self._delta({"type": "signature_delta", "signature": self._signature})]
        closed = [_event("content_block_stop", index=self._index)] if self._open else []
        self._open = None
        return [*signed, *closed]

    @property
    def _signature(self) -> str:
        """Some clients send thoughts back only if these are signed."""
        return str(self._head["id"])

    # -- a whole ---------------------------------------------------------------------------

    def body(self, pieces: Sequence[Piece], report: Report) -> dict[str, Any]:
        """Return a whole answer."""
        whole = merged(pieces)
        calls = any(isinstance(piece, ToolCall) for piece in whole)
        shown = [p for p in whole if not (calls and isinstance(p, Text) and p.text.isspace())]
        return {
            **self._head,
            "content": [self._block(piece) for piece in shown],
            **_stop(report, calls=calls),
            "usage": anthropic_usage(report),
            **extras(report),
        }

    def _block(self, piece: Piece) -> dict[str, Any]:
        if isinstance(piece, Text):
            return {"type": "text", "text": piece.text}
        if isinstance(piece, Reasoning):
            return {"type": "thinking", "thinking": piece.text, "signature": self._signature}
        arguments = json.loads(piece.arguments)
        return {"type": "tool_use", "id": piece.id, "name": piece.name, "input": arguments}


def _event(name: str, **data: Any) -> bytes:
    return event({"type": name, **data}, name=name)


def _stop(report: Report, *, calls: bool) -> dict[str, str | None]:
    """Whatever ended before the model did was cut short."""
    reason, sequence = "max_tokens", None
    if report.finish == "stop":
        sequence = report.stop_string
        reason = "tool_use" if calls else "end_turn"
        reason = reason if sequence is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": sequence}
