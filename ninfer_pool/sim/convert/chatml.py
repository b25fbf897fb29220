"""Chat requests rendered in ChatML, cut where a checkpoint may stand.

Tools come first, inside the system message. A message is ``<|im_start|>role``, a line feed, its
content, ``<|im_end|>`` and a line feed; the prompt ends with ``<|im_start|>assistant`` and a line
feed. The *reply* of an assistant message is what a model generates after that: its content, its
tool calls and ``<|im_end|>``. An image, a sound or a file stands for `MEDIA_POSITIONS` positions,
because a log does not say how many the model gave it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from ninfer_pool.sim.jsonl import Where, list_of, object_of, text_of

MEDIA_POSITIONS: Final = 256
GENERATION_PROMPT: Final = "<|im_start|>assistant\n"
_END: Final = "<|im_end|>"
_TEXT_PARTS: Final = ("text", "input_text", "output_text", "refusal")
_SYSTEM_ROLES: Final = ("system", "developer")

Mark = Literal["", "system", "turn", "reply"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A piece of a rendered prompt that is always tokenized alone.

    Either `text`, or `media` (a digest that stands for `MEDIA_POSITIONS` positions). `mark` says
    what ends here: the system part, a generation prompt (``turn``) or an assistant's reply.
    """

    text: str = ""
    media: str | None = None
    mark: Mark = ""


def render_prompt(request: dict[str, object], where: Where) -> list[Segment]:
    """Render ``messages`` and ``tools`` of a chat request up to the generation prompt.

    Raises:
        TraceError: messages are missing or do not have the shape of the chat format.
    """
    if "messages" not in request:
        raise where.missing("messages")
    items = list_of(request["messages"], "messages", where)
    if not items:
        raise where.error("messages", items, "a list with at least one message")
    messages = [object_of(m, f"messages[{n}]", where) for n, m in enumerate(items)]
    roles = [_role(message, number, where) for number, message in enumerate(messages)]
    leading = next((n for n, role in enumerate(roles) if role not in _SYSTEM_ROLES), len(roles))
    segments = _system(messages[:leading], _tools(request, where), where)
    for number, message in enumerate(messages[leading:], start=leading):
        segments += _message(message, roles[number], f"messages[{number}]", where)
    return [*segments, Segment(text=GENERATION_PROMPT, mark="turn")]


def render_reply(message: dict[str, object], name: str, where: Where) -> list[Segment]:
    """Render what a model generates for an assistant message; the last segment is marked."""
    parts = list(_content(message, name, where))
    reasoning = message.get("reasoning_content", message.get("reasoning"))
    if isinstance(reasoning, str) and reasoning:
        parts.insert(0, Segment(text=f"<think>\n{reasoning}\n</think>\n\n"))
    parts += [Segment(text=call) for call in _calls(message, name, where)]
    return _join([*parts, Segment(text=_END, mark="reply")])


def _role(message: dict[str, object], number: int, where: Where) -> str:
    if "role" not in message:
        raise where.missing(f"messages[{number}].role")
    return text_of(message["role"], f"messages[{number}].role", where)


def _tools(request: dict[str, object], where: Where) -> list[object]:
    for name in ("tools", "functions"):
        value = request.get(name)
        if value is not None:
            return list_of(value, name, where)
    return []


def _system(messages: list[dict[str, object]], tools: list[object], where: Where) -> list[Segment]:
    if not messages and not tools:
        return []
    segments: list[Segment] = []
    lines = "".join(f"{_dump(tool)}\n" for tool in tools)
    nothing: dict[str, object] = {}
    for number, message in enumerate(messages or [nothing]):
        opening = "<|im_start|>system\n"
        if tools and not number:
            opening += f"# Tools\n\n<tools>\n{lines}</tools>\n\n"
        content = _content(message, f"messages[{number}]", where)
        segments += [Segment(text=opening), *content, Segment(text=f"{_END}\n")]
    joined = _join(segments)
    return [*joined[:-1], Segment(text=joined[-1].text, mark="system")]


def _message(message: dict[str, object], role: str, name: str, where: Where) -> list[Segment]:
    if role == "assistant":
        opening = Segment(text=GENERATION_PROMPT, mark="turn")
        return [opening, *render_reply(message, name, where), Segment(text="\n")]
    opening = Segment(text=f"<|im_start|>{role}\n")
    return _join([opening, *_content(message, name, where), Segment(text=f"{_END}\n")])


def _content(message: dict[str, object], name: str, where: Where) -> Iterator[Segment]:
    content = message.get("content")
    if content is None:
        return
    if isinstance(content, str):
        yield Segment(text=content)
        return
    if not isinstance(content, list):
        raise where.error(f"{name}.content", content, "a string, a list of parts or null")
    for number, item in enumerate(content):
        place = f"{name}.content[{number}]"
        yield _part(object_of(item, place, where), place, where)


def _part(part: dict[str, object], place: str, where: Where) -> Segment:
    kind = text_of(part.get("type", "text"), f"{place}.type", where)
    if kind in _TEXT_PARTS:
        field = "refusal" if kind == "refusal" else "text"
        if field not in part:
            raise where.missing(f"{place}.{field}")
        return Segment(text=text_of(part[field], f"{place}.{field}", where))
    # An image, a sound, a file: whatever it holds, the same bytes are the same media.
    body = part.get(kind, part.get("image_url", part.get("source", part)))
    inner = body.get("url", body.get("data")) if isinstance(body, dict) else body
    shown = inner if isinstance(inner, str) else _dump(body)
    digest = hashlib.sha256(shown.encode("utf-8", "surrogatepass")).hexdigest()
    return Segment(media=f"sha256:{digest}")


def _calls(message: dict[str, object], name: str, where: Where) -> Iterator[str]:
    calls = message.get("tool_calls")
    legacy = message.get("function_call")
    items = [] if calls is None else list_of(calls, f"{name}.tool_calls", where)
    for number, item in enumerate(items):
        place = f"{name}.tool_calls[{number}]"
        call = object_of(item, place, where)
        yield _call(object_of(call.get("function", call), f"{place}.function", where))
    if legacy is not None:
        yield _call(object_of(legacy, f"{name}.function_call", where))


def _call(function: dict[str, object]) -> str:
    arguments = function.get("arguments", "")
    # The chat format carries arguments as a string that holds JSON; it is rendered as it came.
    text = arguments if isinstance(arguments, str) else _dump(arguments)
    name = _dump(function.get("name"))
    return f'\n<tool_call>\n{{"name": {name}, "arguments": {text}}}\n</tool_call>'


def _join(segments: list[Segment]) -> list[Segment]:
    """Merge neighbouring texts, so that they are tokenized together."""
    joined: list[Segment] = []
    for segment in segments:
        last = joined[-1] if joined else None
        if last and last.media is None and segment.media is None and not last.mark:
            joined[-1] = Segment(text=last.text + segment.text, mark=segment.mark)
        else:
            joined.append(segment)
    return joined


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
