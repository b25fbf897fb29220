"""Anthropic's dialect: bodies of requests; `anthropic_replies` writes the answers.

An invalid body is an `ApiError` of status 400, which names the field and valid values. The names
of headers are in lower case.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from ninfer_pool.server.chat_request import ChatRequest
from ninfer_pool.server.dialect import (
    ANTHROPIC,
    Body,
    CacheControl,
    Fraction,
    MessageParts,
    Name,
    Part,
    Stop,
    StrictModel,
    TextOrList,
    Whole,
    conversation,
    one_of,
    only,
    read_object,
    sampling,
    text_or_list,
)
from ninfer_pool.server.errors import ApiError

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
MAX_STOPS = 64
NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}

# -- parts of messages ----------------------------------------------------------------------


class _Text(StrictModel):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Any = None

    def part(self) -> Part:
        return Part(self.text, marked=self.cache_control is not None)


_Texts = Annotated[
    TextOrList[_Text],
    text_or_list(why="text or a list of text parts: this model reads text alone"),
]


class _ToolResult(StrictModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: _Texts | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: str | None = None

    def parts(self) -> list[Part]:
        parts = _parts(self.content)
        if self.cache_control is None:
            return parts
        last = parts[-1].text if parts else ""
        return [*parts[:-1], Part(last, marked=True)]


class _Thinking(StrictModel):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class _RedactedThinking(StrictModel):
    """Its text is encrypted: the model gets none of it."""

    type: Literal["redacted_thinking"]
    data: str


class _ToolUse(StrictModel):
    type: Literal["tool_use"]
    id: str
    name: Name
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: Any = None
    toolset_name: str | None = None

    def plain(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.input}
        return {"id": self.id, "type": "function", "function": function}


_UserPart = Annotated[
    Annotated[_Text, Tag("<text>")] | Annotated[_ToolResult, Tag("<tool_result>")],
    one_of(
        *("text", "tool_result"),
        by="type",
        why="a part of type 'text' or 'tool_result': this model reads text alone",
    ),
]
_AssistantPart = Annotated[
    Annotated[_Text, Tag("<text>")]
    | Annotated[_Thinking, Tag("<thinking>")]
    | Annotated[_RedactedThinking, Tag("<redacted_thinking>")]
    | Annotated[_ToolUse, Tag("<tool_use>")],
    one_of(
        *("text", "thinking", "redacted_thinking", "tool_use"),
        by="type",
        why="a part of type 'text', 'thinking', 'redacted_thinking' or 'tool_use'",
    ),
]
_TEXT_OR_PARTS = text_or_list(why="text or a list of parts")

# -- messages and tools ---------------------------------------------------------------------


class _User(StrictModel):
    role: Literal["user"]
    content: Annotated[TextOrList[_UserPart], _TEXT_OR_PARTS]


class _Assistant(StrictModel):
    role: Literal["assistant"]
    content: Annotated[TextOrList[_AssistantPart], _TEXT_OR_PARTS]


class _System(StrictModel):
    role: Literal["system"]
    content: _Texts


_Message = Annotated[
    Annotated[_User, Tag("<user>")]
    | Annotated[_Assistant, Tag("<assistant>")]
    | Annotated[_System, Tag("<system>")],
    one_of(
        *("user", "assistant", "system"),
        by="role",
        why="a role that is 'user', 'assistant' or 'system'",
    ),
]


class _Tool(StrictModel):
    type: Annotated[Any, only(["custom"], why="'custom': the server has no tools of its own")] = (
        None
    )
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]
    cache_control: CacheControl | None = None
    # Known, and without effect.
    allowed_callers: list[str] | None = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    input_examples: list[dict[str, Any]] | None = None
    strict: bool | None = None

    def plain(self) -> dict[str, Any]:
        described = {} if self.description is None else {"description": self.description}
        function = {"name": self.name, **described, "parameters": self.input_schema}
        return {"type": "function", "function": function}


class _ToolChoice(StrictModel):
    type: Literal["auto", "none"]
    disable_parallel_tool_use: bool | None = None


class _ThinkingSwitch(StrictModel):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Whole | None = None
    display: str | None = None


class _OutputConfig(StrictModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Annotated[Any, only([], why="null: no format can be forced here")] = None
    task_budget: Any = None


# -- bodies ---------------------------------------------------------------------------------


class _CountBody(Body):
    messages: Annotated[list[_Message], Field(min_length=1)]
    system: _Texts | None = None
    tools: list[_Tool] | None = None
    tool_choice: _ToolChoice | None = None
    thinking: _ThinkingSwitch | None = None
    output_config: _OutputConfig | None = None
    cache_control: CacheControl | None = None
    max_tokens: Whole | None = None
    temperature: Fraction | None = None
    stop_sequences: Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    mcp_servers: Annotated[Any, only([[]], why="[]: the server calls no others")] = None
    container: Annotated[Any, only([], why="null: the server runs no code")] = None
    compaction: Annotated[Any, only([], why="null: the client compacts")] = None
    thread: Any = None
    output_format: Annotated[Any, only([], why="null: no format can be forced here")] = None
    # Known, and without effect.
    metadata: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    betas: list[str] | None = None
    billing_policy: Any = None
    diagnostics: Any = None
    fallbacks: Any = None
    fallback_credit_token: str | None = None
    inference_geo: str | None = None
    service_tier: str | None = None
    speed: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None

    def implied(self) -> dict[str, Any]:
        """Return the template's switches that other fields amount to."""
        kind = self.thinking.type if self.thinking is not None else None
        # The rest leave it to the model, that is to the server's own default.
        switch = {"enabled": True, "disabled": False}.get(kind or "")
        effort = self.output_config.effort if self.output_config is not None else None
        return {"enable_thinking": switch, "reasoning_effort": effort}


class _MessagesBody(_CountBody):
    max_tokens: Whole


# -- requests -------------------------------------------------------------------------------


def parse_messages(body: bytes, headers: Mapping[str, str]) -> ChatRequest:
    """Check the body of POST /v1/messages."""
    checked = ANTHROPIC.check(_MessagesBody, read_object(body))
    return _request(checked, headers, endpoint=MESSAGES)


def parse_count(body: bytes, headers: Mapping[str, str]) -> ChatRequest:
    """Check the body of POST /v1/messages/count_tokens."""
    checked = ANTHROPIC.check(_CountBody, read_object(body))
    return _request(checked, headers, endpoint=COUNT)


def _request(body: _CountBody, headers: Mapping[str, str], *, endpoint: str) -> ChatRequest:
    if body.thread is not None:  # clients that read the details continue without
        text = "thread: an object; needs null: the server keeps no messages, send them all"
        raise ApiError(400, text, param="thread", details=dict(NO_THREADS))
    messages = _messages(body)
    tools = body.tools or ()
    marked = [n for n, tool in enumerate(tools) if tool.cache_control is not None]
    return ChatRequest(
        endpoint=endpoint,
        model=body.model,
        tools=tuple(tool.plain() for tool in tools),
        origins=tuple(message.origin for message in messages),
        **ANTHROPIC.controls(body, headers, implied=body.implied()),
        **conversation(messages, marked_tools=marked),
        sampling=sampling(body),
        max_tokens=body.max_tokens,
        stop=tuple(body.stop_sequences or ()),
        stream=bool(body.stream),
        include_usage=True,
        parse_tools=body.tool_choice is None or body.tool_choice.type != "none",
    )


def _messages(body: _CountBody) -> list[MessageParts]:
    """Return the messages as a chat template reads them."""
    found: list[MessageParts] = []
    if body.system:
        found.append(MessageParts(role="system", parts=_parts(body.system), origin=-1))
    for index, message in enumerate(body.messages):
        if isinstance(message, _User) and not isinstance(message.content, str):
            own = _of_user(message.content)
        elif isinstance(message, _Assistant) and not isinstance(message.content, str):
            own = [_of_assistant(message.content)]
        else:
            own = [MessageParts(role=message.role, parts=_parts(message.content))]
        found += [dataclasses.replace(each, origin=index) for each in own]
    if body.cache_control is not None:
        found[-1].end_marks += 1
    return found


def _parts(content: str | list[Any] | None) -> list[Part]:
    if isinstance(content, str):
        return [Part(content)]
    return [part.part() for part in content or ()]


def _of_user(content: Sequence[_Text | _ToolResult]) -> list[MessageParts]:
    """Return results of tools, each a message of its own, then the user's texts."""
    results = [
        MessageParts(role="tool", parts=part.parts(), more={"tool_call_id": part.tool_use_id})
        for part in content
        if isinstance(part, _ToolResult)
    ]
    texts = [part for part in content if isinstance(part, _Text)]
    if texts or not results:
        results.append(MessageParts(role="user", parts=_parts(texts)))
    return results


def _of_assistant(
    content: Sequence[_Text | _Thinking | _RedactedThinking | _ToolUse],
) -> MessageParts:
    texts = [part.part() for part in content if isinstance(part, _Text)]
    thoughts = [part.thinking for part in content if isinstance(part, _Thinking)]
    calls = [part for part in content if isinstance(part, _ToolUse)]
    more: dict[str, Any] = {}
    if thoughts:
        more["reasoning_content"] = "".join(thoughts)
    if calls:
        more["tool_calls"] = [call.plain() for call in calls]
    # Calls follow all of the text: a breakpoint after one is at the message's end.
    marks = sum(call.cache_control is not None for call in calls)
    return MessageParts(role="assistant", parts=texts, more=more, end_marks=marks)
