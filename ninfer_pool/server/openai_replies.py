"""OpenAI's dialect: answers, whole or as a stream of events."""

from __future__ import annotations

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
from ninfer_pool.server.usage import DONE, event, extras, openai_usage


class _Writer:
    """The common part of both writers: the head of each chunk, and the end of a stream."""

    prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, request: ChatRequest, *, id: str, created: int, model: str) -> None:
        self._usage = request.include_usage
        self._head = {"id": id, "created": created, "model": model}

    def error(self, error: ApiError) -> list[bytes]:
        """Return the events of a failure in mid-stream."""
        return [event(error.openai()), DONE]

    def _chunk(self, choice: dict[str, Any], **more: Any) -> bytes:
        choices = [{"index": 0, "logprobs": None, "finish_reason": None, **choice}]
        # Every chunk announces usage, where it was requested.
        usage = {"usage": None} if self._usage else {}
        return event({**self._head, "object": self.chunk_kind, "choices": choices, **usage, **more})

    def _tail(self, report: Report) -> list[bytes]:
        if not self._usage:
            return [DONE]
        last = {"choices": [], "usage": openai_usage(report)}
        return [event({**self._head, "object": self.chunk_kind, **last}), DONE]

    def _whole(self, choice: dict[str, Any], report: Report) -> dict[str, Any]:
        return {
            **self._head,
            "object": self.kind,
            "choices": [{"index": 0, "logprobs": None, **choice}],
            "usage": openai_usage(report),
            **extras(report),
        }


class ChatWriter(_Writer):
    """Answers of POST /v1/chat/completions."""

    prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, request: ChatRequest, *, id: str, created: int, model: str) -> None:
        super().__init__(request, id=id, created=created, model=model)
        self._calls = 0
        self._blank: str | None = ""  # white space with which the answer began; None: over

    def start(self, start: Start) -> list[bytes]:
        """Return the role of the answer."""
        return [self._chunk({"delta": {"role": "assistant", "content": ""}})]

    def piece(self, piece: Piece) -> list[bytes]:
        """Return the events of a piece; white space before a call is held back."""
        if isinstance(piece, Reasoning):
            return [self._chunk({"delta": {"reasoning_content": piece.text}})]
        if isinstance(piece, ToolCall):
            call = {"index": self._calls, **_call(piece)}
            self._calls += 1
            return [self._chunk({"delta": {"tool_calls": [call]}})]
        if self._blank is None:
            return [self._content(piece.text)]
        self._blank += piece.text
        return [] if self._blank.isspace() else self._begin()

    def end(self, report: Report) -> list[bytes]:
        """Return why the answer ended, how it was made, and the usage if requested."""
        rest = self._begin() if self._blank and not self._calls else []
        finish = {"delta": {}, "finish_reason": _finish(report, calls=self._calls)}
        return [*rest, self._chunk(finish, **extras(report)), *self._tail(report)]

    def body(self, pieces: Sequence[Piece], report: Report) -> dict[str, Any]:
        """Return a whole answer; ``content`` is null where there are calls and no text."""
        text = "".join(piece.text for piece in pieces if isinstance(piece, Text))
        thought = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
        calls = [_call(piece) for piece in pieces if isinstance(piece, ToolCall)]
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message["content"] = text if text.strip() else None
            message["tool_calls"] = calls
        if thought:
            message["reasoning_content"] = thought
        finish = _finish(report, calls=len(calls))
        return self._whole({"message": message, "finish_reason": finish}, report)

    def _begin(self) -> list[bytes]:
        text, self._blank = self._blank or "", None
        return [self._content(text)]

    def _content(self, text: str) -> bytes:
        return self._chunk({"delta": {"content": text}})


class CompletionWriter(_Writer):
    """Answers of POST /v1/completions."""

    prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"

    def start(self, start: Start) -> list[bytes]:
        """Return no events: there is no role."""
        return []

    def piece(self, piece: Piece) -> list[bytes]:
        """Return the event of a piece."""
        return [self._chunk({"text": _text(piece)})]

    def end(self, report: Report) -> list[bytes]:
        """Return why the text ended, how it was made, and the usage if requested."""
        last = {"text": "", "finish_reason": _finish(report, calls=0)}
        return [self._chunk(last, **extras(report)), *self._tail(report)]

    def body(self, pieces: Sequence[Piece], report: Report) -> dict[str, Any]:
        """Return a whole answer."""
        choice = {"text": "".join(map(_text, pieces)), "finish_reason": _finish(report, calls=0)}
        return self._whole(choice, report)


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _text(piece: Piece) -> str:
    assert not isinstance(piece, ToolCall), "raw text has no calls in it"
    return piece.text


def _finish(report: Report, *, calls: int) -> str:
    """Whatever ended before the model did was cut short."""
    if report.finish != "stop":
        return "length"
    return "tool_calls" if calls else "stop"
