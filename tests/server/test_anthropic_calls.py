"""Anthropic's bodies: what they become, and what is refused in which words."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from ninfer_pool.runner import Sampling
from ninfer_pool.server import anthropic
from ninfer_pool.server.chat_request import Control
from tests.server.asked import HELLO, TOOL, WEATHER, messages, refusal

MARK = {"cache_control": {"type": "ephemeral"}}
TOOL_HERE = {
    "name": "weather",
    "description": "Tells it",
    "input_schema": WEATHER["parameters"],
}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def result(name: str, content: Any = "fine", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": name, "content": content, **more}


def use(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": name, "name": "weather", "input": {"city": "Ulm"}, **more}


def test_a_plain_request_has_the_api_s_own_defaults() -> None:
    call = messages()
    assert call.messages == ({"role": "user", "content": "Hello"},)
    assert (call.endpoint, call.model, call.max_tokens) == (anthropic.MESSAGES, "m", 9)
    assert call.sampling == Sampling(temperature=1.0)
    assert (call.tools, call.stop, call.stream) == ((), (), False)
    assert (call.breakpoints, call.template, call.control) == ((), {}, Control())


def test_sampling_and_stops_are_passed_on() -> None:
    call = messages(temperature=0.5, top_k=3, top_p=0.9, stop_sequences=["a", "b"], stream=True)
    assert call.sampling == Sampling(temperature=0.5, top_k=3, top_p=0.9)
    assert call.stop == ("a", "b")
    assert call.stream
    assert messages(top_p=0).sampling.temperature == 0


@pytest.mark.parametrize("system", ["Be brief", [text("Be "), text("brief")]])
def test_the_system_text_comes_first(system: Any) -> None:
    assert messages(system=system).messages[0] == {"role": "system", "content": "Be brief"}


@pytest.mark.parametrize("system", ["", [], None])
def test_no_system_text(system: Any) -> None:
    assert messages(system=system).messages == (HELLO,)


def test_a_conversation_with_tools() -> None:
    thinking = {"type": "thinking", "thinking": "Hm", "signature": "s"}
    hidden = {"type": "redacted_thinking", "data": "x"}
    said = {
        "role": "assistant",
        "content": [thinking, hidden, text("Let "), text("me"), use("t1"), use("t2")],
    }
    answered = user(text("and"), result("t1"), result("t2", [text("sun"), text("ny")]), text(" so"))
    call = messages(HELLO, said, answered, tools=[TOOL_HERE])
    function = {"name": "weather", "arguments": {"city": "Ulm"}}
    assert call.messages[1:] == (
        {
            "role": "assistant",
            "content": "Let me",
            "reasoning_content": "Hm",
            "tool_calls": [
                {"id": name, "type": "function", "function": function} for name in ("t1", "t2")
            ],
        },
        {"role": "tool", "content": "fine", "tool_call_id": "t1"},
        {"role": "tool", "content": "sunny", "tool_call_id": "t2"},
        {"role": "user", "content": "and so"},
    )
    assert call.tools == (TOOL,)
    assert call.parse_tools


def test_results_alone_are_no_words_of_the_user() -> None:
    call = messages(HELLO, {"role": "assistant", "content": [use("t")]}, user(result("t", None)))
    assert call.messages[2:] == ({"role": "tool", "content": "", "tool_call_id": "t"},)


def test_empty_content_is_an_empty_message() -> None:
    call = messages(user(), {"role": "assistant", "content": []})
    assert [each["content"] for each in call.messages] == ["", ""]


def test_no_tool_may_be_called() -> None:
    call = messages(tools=[TOOL_HERE], tool_choice={"type": "none"})
    assert call.tools == (TOOL,)
    assert not call.parse_tools
    auto = {"type": "auto", "disable_parallel_tool_use": True}
    assert messages(tool_choice=auto).parse_tools


@pytest.mark.parametrize(
    ("fields", "template"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"enable_thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, {}),
        ({"thinking": {"type": "disabled"}, "enable_thinking": True}, {"enable_thinking": True}),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"output_config": {"effort": None, "format": None}}, {}),
        ({"preserve_thinking": True}, {"preserve_thinking": True}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False}),
    ],
)
def test_the_template_s_arguments(fields: dict[str, Any], template: dict[str, Any]) -> None:
    assert messages(**fields).template == template


def test_control_in_body_and_headers() -> None:
    headers = {"x-cache-salt": "h", "x-priority": "2", "x-enable-thinking": "true"}
    call = messages(
        cache_salt="b", retain_prefix=False, thinking={"type": "disabled"}, headers=headers
    )
    assert call.control == Control(salt="b", retain=False, priority=2)
    assert call.template == {"enable_thinking": False}


def test_what_agents_send_is_accepted() -> None:
    call = messages(
        user(text("Hello", cache_control={"type": "ephemeral", "ttl": "1h", "scope": "global"})),
        metadata={"user_id": "u"},
        context_management={"edits": [{"type": "clear_thinking_20251015"}]},
        output_config={"effort": "high"},
        betas=["interleaved-thinking-2025-05-14"],
        mcp_servers=[],
        container=None,
        diagnostics={"a": 1},
        service_tier="auto",
        tools=[{**TOOL_HERE, "eager_input_streaming": True, "type": "custom"}],
    )
    assert call.messages == (HELLO,)
    assert call.tools == (TOOL,)


# -- breakpoints ------------------------------------------------------------------------------


def test_breakpoints_at_tools_system_and_messages() -> None:
    call = messages(
        user(text("c"), text("d", **MARK)),
        tools=[TOOL_HERE, {**TOOL_HERE, "name": "other", **MARK}],
        system=[text("a", **MARK), text("b")],
    )
    assert call.breakpoints == ((-1, 1), (0, 0), (1, 0))
    assert call.messages[0]["content"] == [text("a"), text("b")]
    assert call.messages[1]["content"] == "cd"
    assert "cache_control" not in json.dumps([call.messages, call.tools])


def test_a_breakpoint_at_a_result_lies_in_the_result_s_message() -> None:
    results = user(result("1"), result("2", [text("x"), text("y")], **MARK), text("z", **MARK))
    call = messages(HELLO, results)
    assert [each["role"] for each in call.messages] == ["user", "tool", "tool", "user"]
    assert call.breakpoints == ((2, 0), (3, 0))


def test_a_breakpoint_at_a_call_lies_at_the_message_s_end() -> None:
    said = {"role": "assistant", "content": [text("a", **MARK), text("b"), use("t", **MARK)]}
    assert messages(HELLO, said).breakpoints == ((1, 0), (1, 1))
    alone = {"role": "assistant", "content": [use("t", **MARK)]}
    assert messages(HELLO, alone).breakpoints == ((1, 0),)


def test_a_breakpoint_for_the_whole_request() -> None:
    assert messages(HELLO, HELLO, **MARK).breakpoints == ((1, 0),)
    split = user(text("a", **MARK), text("b"))
    assert messages(split, **MARK).breakpoints == ((0, 0), (0, 1))


def test_there_are_four_breakpoints_at_most() -> None:
    four = [user(text("a", **MARK))] * 4
    assert len(messages(*four).breakpoints) == 4
    error = refusal(lambda: messages(*four, tools=[{**TOOL_HERE, **MARK}]))
    told = "A maximum of 4 blocks with cache_control may be provided. Found 5."
    assert error.message == told


# -- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", "9"),
        ("max_tokens", True),
        ("max_tokens", None),
        ("messages", []),
        ("messages", "Hello"),
        ("temperature", 1.5),
        ("temperature", "1"),
        ("top_k", -2),
        ("stop_sequences", "a"),
        ("stop_sequences", ["a"] * 65),
        ("stream", "yes"),
        ("system", 5),
        ("tools", "weather"),
        ("mcp_servers", [{"url": "x"}]),
        ("container", "c"),
        ("metadata", "x"),
        ("cache_salt", ""),
        ("cache_salt", "a\0"),
        ("ttl_seconds", 0),
        ("retain_prefix", "no"),
    ],
)
def test_a_wrong_value_is_refused_with_its_field(field: str, value: Any) -> None:
    error = refusal(lambda: messages(**{field: value}))
    assert error.message.startswith(f"{field}: ")


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"output_config": {"effort": "none"}}, "output_config.effort"),
        ({"system": [{"type": "image"}]}, "system.0.type"),
        ({"system": [text("x", cache_control={"type": "for ever"})]}, "system.0.cache_control"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
    ],
)
def test_a_wrong_part_is_refused_with_its_path(fields: dict[str, Any], path: str) -> None:
    assert refusal(lambda: messages(**fields)).message.startswith(path)


@pytest.mark.parametrize(
    ("message", "path"),
    [
        ({"role": "tool", "content": "x"}, "messages.1: "),
        ({"role": "user"}, "messages.1.content: Field required"),
        (user({"type": "image", "source": {}}), "messages.1.content.0: "),
        (user(use("t")), "messages.1.content.0: "),
        ({"role": "assistant", "content": [result("t")]}, "messages.1.content.0: "),
        (user(result("t", [{"type": "image"}])), "messages.1.content.0.content.0.type: "),
        (user(text("a"), {"type": "text"}), "messages.1.content.1.text: Field required"),
        ({"role": "assistant", "content": [{**use("t"), "input": "{}"}]}, "messages.1.content.0.i"),
        (5, "messages.1: "),
    ],
)
def test_a_wrong_message_is_refused_with_its_path(message: Any, path: str) -> None:
    assert refusal(lambda: messages(HELLO, message)).message.startswith(path)


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"foo": 1}, "foo"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
        ({"messages": [{**HELLO, "name": "x"}]}, "messages.0.name"),
        ({"tools": [{**TOOL_HERE, "x": 1}]}, "tools.0.x"),
    ],
)
def test_unknown_fields_are_refused_as_anthropic_does(fields: dict[str, Any], path: str) -> None:
    told = refusal(lambda: messages(**fields)).message
    assert told == f"{path}: Extra inputs are not permitted"


@pytest.mark.parametrize("body", [b"", b"[]", b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    for parse in (anthropic.parse_messages, anthropic.parse_count):
        assert refusal(partial(parse, body, {})).message.startswith("body: ")


def test_counting_needs_no_limit() -> None:
    body = json.dumps({"model": "m", "messages": [HELLO], "system": "Be brief"}).encode()
    call = anthropic.parse_count(body, {"x-cache-salt": "s"})
    assert [each["role"] for each in call.messages] == ["system", "user"]
    assert (call.endpoint, call.max_tokens) == (anthropic.COUNT, None)
    assert refusal(lambda: anthropic.parse_messages(body, {})).message == (
        "max_tokens: Field required"
    )


def test_a_client_that_asks_for_a_thread_is_told_to_go_on_without() -> None:
    error = refusal(lambda: messages(thread={"type": "create"}))
    assert error.anthropic()["error"]["details"]["error_code"] == "thread_unsupported_request"
    assert error.param == "thread"
    assert "details" not in refusal(lambda: messages(max_tokens=0)).anthropic()["error"]


def test_messages_know_which_of_the_request_they_came_from() -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": "4"}
    use = {"type": "tool_use", "id": "a", "name": "weather", "input": {}}
    asked = [
        HELLO,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
    ]
    assert messages(*asked, system="Be brief.").origins == (-1, 0, 1, 2, 2)
    assert messages(HELLO).origins == (0,)
