"""Chat requests rendered in ChatML, cut where a checkpoint may be.

Tools come first, inside the system message. A message is ``<|im_start|>role``, a line feed, its
content, ``<|im_end|>`` and a line feed; the prompt ends with ``<|im_start|>assistant`` and a line
feed. The *reply* of an assistant message is the text that a model generates after that: its
content, its tool calls and ``<|im_end|>``. An image, a sound or a file stands for
`MEDIA_POSITIONS` positions, because a log does not have their number.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from ninfer_pool.sim.jsonl import JsonFields

MEDIA_POSITIONS: Final = 256
GENERATION_PROMPT: Final = "<|im_start|>assistant\n"
_END: Final = "<|im_end|>"
_TEXT_PARTS: Final = ("text", "input_text", "output_text", "refusal")
_SYSTEM_ROLES: Final = ("system", "developer")

End = Literal["", "system", "turn", "reply"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPiece:
    """A piece of a rendered prompt that is always tokenized alone.

    Either `text`, or `media` (a digest that stands for `MEDIA_POSITIONS` positions). `end` names
    the part that ends here: the system part, a generation prompt (``turn``) or a reply.
    """

    text: str = ""
    media: str | None = None
    end: End = ""


def render_prompt(request: JsonFields) -> list[PromptPiece]:
    """Render ``messages`` and ``tools`` of a chat request up to the generation prompt.

    Raises:
        TraceError: messages are missing or do not have the shape of the chat format.
    """
    messages = list(request.children("messages"))
    if not messages:
        raise request.error("messages", [], "a list with at least one message")
    roles = [message.text("role") for message in messages]
    leading = next((n for n, role in enumerate(roles) if role not in _SYSTEM_ROLES), len(roles))
    pieces = _system(messages[:leading], _tools(request))
    for message, role in zip(messages[leading:], roles[leading:], strict=True):
        pieces += _message(message, role)
    return [*pieces, PromptPiece(text=GENERATION_PROMPT, end="turn")]


def render_reply(message: JsonFields) -> list[PromptPiece]:
    """Render the reply of an assistant message; the last piece ends it."""
    parts = list(_content(message))
    values = message.values
    reasoning = values.get("reasoning_content", values.get("reasoning"))
    if isinstance(reasoning, str) and reasoning:
        parts.insert(0, PromptPiece(text=f"<think>\n{reasoning}\n</think>\n\n"))
    parts += [PromptPiece(text=call) for call in _calls(message)]
    return _join([*parts, PromptPiece(text=_END, end="reply")])


def _tools(request: JsonFields) -> list[object]:
    return next((request.items(n) for n in ("tools", "functions") if request.has(n)), [])


def _system(messages: list[JsonFields], tools: list[object]) -> list[PromptPiece]:
    if not messages and not tools:
        return []
    pieces: list[PromptPiece] = []
    lines = "".join(f"{_dump(tool)}\n" for tool in tools)
    for number, message in enumerate(messages or [JsonFields({}, "")]):
        opening = "<|im_start|>system\n"
        if tools and not number:
            opening += f"# Tools\n\n<tools>\n{lines}</tools>\n\n"
        content = _content(message)
        pieces += [PromptPiece(text=opening), *content, PromptPiece(text=f"{_END}\n")]
    joined = _join(pieces)
    return [*joined[:-1], PromptPiece(text=joined[-1].text, end="system")]


def _message(message: JsonFields, role: str) -> list[PromptPiece]:
    if role == "assistant":
        opening = PromptPiece(text=GENERATION_PROMPT, end="turn")
        return [opening, *render_reply(message), PromptPiece(text="\n")]
    opening = PromptPiece(text=f"<|im_start|>{role}\n")
    return _join([opening, *_content(message), PromptPiece(text=f"{_END}\n")])


def _content(message: JsonFields) -> Iterator[PromptPiece]:
    content = message.values.get("content")
    if content is None:
        return
    if isinstance(content, str):
        yield PromptPiece(text=content)
        return
    if not isinstance(content, list):
        raise message.error("content", content, "a string, a list of parts or null")
    yield from map(_part, message.children("content"))


def _part(part: JsonFields) -> PromptPiece:
    kind = part.text("type", "text")
    if kind in _TEXT_PARTS:
        return PromptPiece(text=part.text("refusal" if kind == "refusal" else "text"))
    # An image, a sound, a file: equal bytes are equal media, whatever their kind.
    values = part.values
    body = values.get(kind, values.get("image_url", values.get("source", values)))
    inner = body.get("url", body.get("data")) if isinstance(body, dict) else body
    shown = inner if isinstance(inner, str) else _dump(body)
    digest = hashlib.sha256(shown.encode("utf-8", "surrogatepass")).hexdigest()
    return PromptPiece(media=f"sha256:{digest}")


def _calls(message: JsonFields) -> Iterator[str]:
    for call in message.children("tool_calls") if message.has("tool_calls") else ():
        yield _call(call.child("function") if "function" in call.values else call)
    if message.has("function_call"):
        yield _call(message.child("function_call"))


def _call(function: JsonFields) -> str:
    arguments = function.values.get("arguments", "")
    # The chat format has arguments as a string that holds JSON; it is rendered as it came.
    text = arguments if isinstance(arguments, str) else _dump(arguments)
    name = _dump(function.values.get("name"))
    return f'\n<tool_call>\n{{"name": {name}, "arguments": {text}}}\n</tool_call>'


def _join(pieces: list[PromptPiece]) -> list[PromptPiece]:
    """Merge neighbouring texts, so that they are tokenized together."""
    joined: list[PromptPiece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last and last.media is None and piece.media is None and not last.end:
            joined[-1] = PromptPiece(text=last.text + piece.text, end=piece.end)
        else:
            joined.append(piece)
    return joined


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
