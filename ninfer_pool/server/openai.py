"""OpenAI's dialect: bodies of requests; `openai_replies` writes the answers.

An invalid body is an `ApiError` of status 400, which names the field and valid values. The names
of headers are in lower case.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, Tag

from ninfer_pool.server.chat_request import ChatRequest
from ninfer_pool.server.dialect import (
    OPENAI,
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
    needs,
    one_of,
    only,
    read_object,
    sampling,
    text_or_list,
)
from ninfer_pool.server.strict_json import read_text_object

CHAT, COMPLETIONS, EXPLAIN = "/v1/chat/completions", "/v1/completions", "/pool/explain"
MAX_STOPS = 4
TEXT_ALONE = "null, text or a list of text parts: this model reads and writes text alone"

# -- messages and tools ---------------------------------------------------------------------


class _Text(StrictModel):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None

    def part(self) -> Part:
        return Part(self.text, marked=bool(self.cache_control or self.prompt_cache_breakpoint))


class _Refusal(StrictModel):
    type: Literal["refusal"]
    refusal: str

    def part(self) -> Part:
        return Part(self.refusal)


_AssistantPart = Annotated[
    Annotated[_Text, Tag("<text>")] | Annotated[_Refusal, Tag("<refusal>")],
    one_of("text", "refusal", by="type", why="a part of type 'text'"),
]
_Content = Annotated[TextOrList[_Text], text_or_list(why=TEXT_ALONE.removeprefix("null, "))]
_Answer = Annotated[TextOrList[_AssistantPart], text_or_list(why=TEXT_ALONE)]
_TOOLS_INSTEAD = "null: this is an old name; use tools and tool_choice"


class _CalledFunction(StrictModel):
    name: Name
    arguments: str

    def plain(self) -> dict[str, Any]:
        text = self.arguments
        found = read_text_object(text) if text.strip() else {}
        return {"name": self.name, "arguments": text if found is None else found}


class _ToolCall(StrictModel):
    id: str
    type: Literal["function"] = "function"
    function: _CalledFunction
    index: int | None = None

    def plain(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": self.function.plain()}


class _Prose(StrictModel):
    role: Literal["system", "developer", "user"]
    content: _Content
    name: str | None = None


class _Assistant(StrictModel):
    """May be an answer of ours as a client echoes it, with all that was null in it."""

    role: Literal["assistant"]
    content: _Answer | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None
    annotations: Annotated[Any, only([[]], why="none")] = None
    audio: Annotated[Any, only([], why="null: this model reads text alone")] = None
    function_call: Annotated[Any, only([], why=_TOOLS_INSTEAD)] = None


class _ToolResult(StrictModel):
    role: Literal["tool"]
    content: _Content
    tool_call_id: str
    name: str | None = None


_Message = Annotated[
    Annotated[_Prose, Tag("<system>")]
    | Annotated[_Prose, Tag("<developer>")]
    | Annotated[_Prose, Tag("<user>")]
    | Annotated[_Assistant, Tag("<assistant>")]
    | Annotated[_ToolResult, Tag("<tool>")],
    one_of(
        *("system", "developer", "user", "assistant", "tool"),
        by="role",
        why="a role that is 'system', 'developer', 'user', 'assistant' or 'tool'",
    ),
]


class _Function(StrictModel):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(StrictModel):
    type: Literal["function"]
    function: _Function
    cache_control: CacheControl | None = None


# -- bodies ---------------------------------------------------------------------------------

_Penalty = Annotated[float, Field(ge=-2, le=2)]
_ONE = "1: one answer a request"


class _StreamOptions(StrictModel):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Shared(Body):
    """Fields of both of OpenAI's bodies, then known ones without effect."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    min_p: Fraction | None = None
    repetition_penalty: Annotated[float, Field(ge=1e-6, le=1e6)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    max_tokens: Whole | None = None
    stop: (
        Annotated[
            Annotated[Stop, Tag("<text>")]
            | Annotated[list[Stop], Field(max_length=MAX_STOPS), Tag("<list>")],
            text_or_list(why=f"text or a list of at most {MAX_STOPS} texts"),
        ]
        | None
    ) = None
    stream_options: _StreamOptions | None = None
    n: Annotated[Any, only([1], why=_ONE)] = None
    logit_bias: Annotated[Any, only([{}], why="no bias: logits are left as they are")] = None
    user: str | None = None


class _ChatBody(_Shared):
    messages: Annotated[list[_Message], Field(min_length=1)]
    tools: list[_Tool] | None = None
    tool_choice: Annotated[
        Any, only(["auto", "none"], why="'auto' or 'none': no call can be forced here")
    ] = None
    max_completion_tokens: Whole | None = None
    response_format: Annotated[
        Any, only([{"type": "text"}], why="{'type': 'text'}: no format can be forced here")
    ] = None
    logprobs: Annotated[Any, only([False], why="false: no probabilities are given")] = None
    top_logprobs: Annotated[Any, only([0], why="0: no probabilities are given")] = None
    modalities: Annotated[Any, only([["text"]], why="['text']: this model writes text alone")] = (
        None
    )
    audio: Annotated[Any, only([], why="null: this model writes text alone")] = None
    functions: Annotated[Any, only([], why=_TOOLS_INSTEAD)] = None
    function_call: Annotated[Any, only([], why=_TOOLS_INSTEAD)] = None
    web_search_options: Annotated[Any, only([], why="null: nothing is searched for here")] = None
    moderation: Annotated[Any, only([], why="null: nothing is moderated here")] = None
    # Known, and without effect.
    metadata: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    prediction: dict[str, Any] | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    verbosity: str | None = None


def _one_prompt(value: Any) -> Any:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) and value:
        return value
    tokens = value if isinstance(value, list) else []
    if tokens and all(type(token) is int and 0 <= token < 2**31 for token in tokens):
        return tokens
    raise needs("one text or one list of token ids, that is not empty")


class _CompletionBody(_Shared):
    prompt: Annotated[Any, AfterValidator(_one_prompt)]
    best_of: Annotated[Any, only([1], why=_ONE)] = None
    echo: Annotated[Any, only([False], why="false: the prompt is not repeated")] = None
    logprobs: Annotated[Any, only([], why="null: no probabilities are given")] = None
    suffix: Annotated[Any, only([""], why="none: text is only ever continued")] = None


# -- requests -------------------------------------------------------------------------------


def parse_chat(body: bytes, headers: Mapping[str, str]) -> ChatRequest:
    """Check the body of POST /v1/chat/completions."""
    return _chat(read_object(body), headers, endpoint=CHAT)


def parse_completion(body: bytes, headers: Mapping[str, str]) -> ChatRequest:
    """Check the body of POST /v1/completions."""
    return _completion(read_object(body), headers, endpoint=COMPLETIONS)


def parse_explain(body: bytes, headers: Mapping[str, str]) -> ChatRequest:
    """Check a body of either endpoint, for an explanation of its prompt."""
    data = read_object(body)
    raw = "prompt" in data and "messages" not in data
    return (_completion if raw else _chat)(data, headers, endpoint=EXPLAIN)


class _Pin(StrictModel):
    pinned: bool = True


def parse_pin(body: bytes) -> bool:
    """Return whether a body requests a pin, as an empty one does, or its removal."""
    return not body.strip() or OPENAI.check(_Pin, read_object(body)).pinned


def _chat(data: Mapping[str, Any], headers: Mapping[str, str], *, endpoint: str) -> ChatRequest:
    body = OPENAI.check(_ChatBody, data)
    # As they came: a template may show their fields in the client's order.
    tools = [{"type": "function", "function": t["function"]} for t in data.get("tools") or ()]
    marked = [n for n, tool in enumerate(body.tools or ()) if tool.cache_control is not None]
    limit = body.max_completion_tokens
    messages = [_in_parts(message) for message in body.messages]
    return ChatRequest(
        endpoint=endpoint,
        tools=tuple(tools),
        max_tokens=body.max_tokens if limit is None else limit,
        parse_tools=body.tool_choice != "none",
        **OPENAI.controls(body, headers),
        **conversation(messages, marked_tools=marked),
        sampling=sampling(body),
        **_shared(body),
    )


def _completion(
    data: Mapping[str, Any], headers: Mapping[str, str], *, endpoint: str
) -> ChatRequest:
    body = OPENAI.check(_CompletionBody, data)
    return ChatRequest(
        endpoint=endpoint,
        text=body.prompt,
        control=OPENAI.controls(body, headers)["control"],
        max_tokens=body.max_tokens,
        parse_tools=False,
        sampling=sampling(body),
        **_shared(body),
    )


def _shared(body: _Shared) -> dict[str, Any]:
    stop = [body.stop] if isinstance(body.stop, str) else body.stop
    options = body.stream_options
    return {
        "model": body.model,
        "stop": tuple(stop or ()),
        "stream": bool(body.stream),
        "include_usage": options is not None and bool(options.include_usage),
    }


def _in_parts(message: _Prose | _Assistant | _ToolResult) -> MessageParts:
    content = [Part(message.content)] if isinstance(message.content, str) else message.content
    parts = [part if isinstance(part, Part) else part.part() for part in content or ()]
    more: dict[str, Any] = {"name": message.name}
    if isinstance(message, _Assistant):
        more["reasoning_content"] = message.reasoning_content
        more["tool_calls"] = [call.plain() for call in message.tool_calls or ()] or None
    if isinstance(message, _ToolResult):
        more["tool_call_id"] = message.tool_call_id
    # Templates have no developer.
    role = "system" if message.role == "developer" else message.role
    return MessageParts(
        role=role, parts=parts, more={k: v for k, v in more.items() if v is not None}
    )
