"""OpenAI's bodies: what they become, and what is refused in which words."""

from __future__ import annotations

from typing import Any

import pytest

from ninfer_pool.runner import Sampling
from ninfer_pool.server import openai
from ninfer_pool.server.chat_request import Control
from tests.server.asked import HELLO, TOOL, WEATHER, chat, completion, refusal

EPHEMERAL = {"type": "ephemeral"}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def test_a_plain_request_has_the_api_s_own_defaults() -> None:
    call = chat()
    assert call.messages == ({"role": "user", "content": "Hello"},)
    assert (call.endpoint, call.model, call.tools, call.text) == (openai.CHAT, "m", (), None)
    assert call.sampling == Sampling(temperature=1.0, top_p=1.0)
    assert (call.stop, call.stream, call.include_usage) == ((), False, False)
    assert (call.max_tokens, call.breakpoints, call.template) == (None, (), {})
    assert call.parse_tools
    assert call.control == Control()


def test_sampling_is_passed_on() -> None:
    call = chat(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        seed=-3,
        presence_penalty=-2,
        frequency_penalty=2,
        repetition_penalty=1.1,
    )
    assert call.sampling == Sampling(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        seed=-3,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        repetition_penalty=1.1,
    )


@pytest.mark.parametrize("top_k", [-1, 0])
def test_top_k_is_off(top_k: int) -> None:
    assert chat(top_k=top_k).sampling.top_k == 0


@pytest.mark.parametrize("fields", [{"top_p": 0}, {"temperature": 0}, {"top_p": 0.0, "seed": 1}])
def test_greedy(fields: dict[str, Any]) -> None:
    assert chat(**fields).sampling.temperature == 0
    assert completion(**fields).sampling.temperature == 0


def test_max_completion_tokens_wins() -> None:
    assert chat(max_tokens=3).max_tokens == 3
    assert chat(max_tokens=3, max_completion_tokens=5).max_tokens == 5


@pytest.mark.parametrize(("stop", "found"), [("a", ("a",)), (["a", "b"], ("a", "b")), (None, ())])
def test_stops(stop: Any, found: tuple[str, ...]) -> None:
    assert chat(stop=stop).stop == found


def test_streaming_with_usage() -> None:
    call = chat(stream=True, stream_options={"include_usage": True, "include_obfuscation": False})
    assert call.stream
    assert call.include_usage


def test_fields_that_change_nothing_here_are_accepted() -> None:
    same = chat(
        user="u",
        metadata={"a": "b"},
        store=True,
        service_tier="auto",
        parallel_tool_calls=False,
        safety_identifier="x",
        verbosity="low",
        stream_options=None,
        modalities=["text"],
        logit_bias={},
        prediction={"type": "content", "content": "x"},
        prompt_cache_retention="24h",
        prompt_cache_options={},
        n=1,
        logprobs=False,
        top_logprobs=0,
        response_format={"type": "text"},
        tool_choice="auto",
        audio=None,
        functions=None,
    )
    assert same == chat()
    assert completion(best_of=1, echo=False, suffix="", logprobs=None, user="u") == completion()


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("n", 2, "needs 1"),
        ("n", True, "needs 1"),
        ("n", 1.0, "needs 1"),
        ("logprobs", True, "needs false"),
        ("logprobs", 0, "needs false"),
        ("top_logprobs", 3, "needs 0"),
        ("logit_bias", {"5": 1}, "no bias"),
        ("response_format", {"type": "json_object"}, "'text'"),
        ("tool_choice", "required", "'auto' or 'none'"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}, "'auto' or 'none'"),
        ("modalities", ["text", "audio"], "['text']"),
        ("audio", {}, "text alone"),
        ("functions", [], "use tools"),
        ("function_call", "auto", "tool_choice"),
        ("web_search_options", {}, "null"),
    ],
)
def test_what_cannot_be_honoured_is_refused(field: str, value: Any, says: str) -> None:
    error = refusal(lambda: chat(**{field: value}))
    assert error.param == field
    assert error.message.startswith(f"{field}: ")
    assert says in error.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", 2.1),
        ("temperature", -0.1),
        ("temperature", 10**400),
        ("top_p", 1.1),
        ("top_p", [1]),
        ("top_k", -2),
        ("top_k", 1.0),
        ("min_p", -1),
        ("seed", "1"),
        ("seed", 2**63),
        ("presence_penalty", 2.5),
        ("repetition_penalty", 0),
        ("max_tokens", 0),
        ("max_tokens", "1"),
        ("max_tokens", 1.0),
        ("max_tokens", True),
        ("max_completion_tokens", -1),
        ("stop", 5),
        ("stop", ""),
        ("stop", "x" * 501),
        ("stop", list("abcde")),
        ("stream", "yes"),
        ("stream", 1),
        ("model", 3),
        ("user", 3),
        ("messages", []),
        ("messages", {}),
        ("messages", "Hello"),
        ("tools", {}),
        ("metadata", "x"),
        ("retain_prefix", "yes"),
        ("allow_prefix_reuse", 0),
        ("cache_prompt", "false"),
        ("cache_salt", ""),
        ("cache_salt", "x" * 129),
        ("cache_salt", "a\0b"),
        ("cache_salt", 5),
        ("prompt_cache_key", "x" * 501),
        ("session_id", 3),
        ("priority", 0.5),
        ("priority", 2**31),
        ("ttl_seconds", 0),
        ("ttl_seconds", -1),
        ("ttl_seconds", "9"),
        ("enable_thinking", "no"),
        ("preserve_thinking", 1),
        ("reasoning_effort", "banana"),
        ("reasoning_effort", "<|im_end|>"),
        ("chat_template_kwargs", []),
    ],
)
def test_a_wrong_value_is_refused_with_its_field(field: str, value: Any) -> None:
    error = refusal(lambda: chat(**{field: value}))
    assert error.param == field
    assert error.message.startswith(f"{field}: ")
    assert len(error.message) < 300


@pytest.mark.parametrize(
    ("message", "path"),
    [
        ({}, ""),
        ("Hello", ""),
        ({"role": "function", "name": "f", "content": "x"}, ""),
        ({"role": ["user"], "content": "x"}, ""),
        ({"role": "user"}, ".content"),
        ({"role": "user", "content": None}, ".content"),
        ({"role": "user", "content": 5}, ".content"),
        ({"role": "user", "content": [5]}, ".content[0]"),
        ({"role": "user", "content": [text("a"), {"type": "text"}]}, ".content[1].text"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, ".content[0].type"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, ".content[0].type"),
        ({"role": "user", "content": "x", "name": 3}, ".name"),
        ({"role": "tool", "content": "x"}, ".tool_call_id"),
        ({"role": "assistant", "content": [{"type": "audio"}]}, ".content[0]"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, ".tool_calls[0].function"),
        ({"role": "assistant", "content": "x", "function_call": {}}, ".function_call"),
    ],
)
def test_a_wrong_message_is_refused_with_its_path(message: Any, path: str) -> None:
    error = refusal(lambda: chat(HELLO, message))
    assert error.param == f"messages[1]{path}"


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"foo": 1}, "foo"),
        ({"<text>": 1}, "<text>"),
        ({"max_tokens_": 1}, "max_tokens_"),
        ({"messages": [{**HELLO, "colour": 1}]}, "messages[0].colour"),
        ({"messages": [{**HELLO, "tool_calls": []}]}, "messages[0].tool_calls"),
        ({"tools": [{**TOOL, "x": 1}]}, "tools[0].x"),
        ({"stream_options": {"x": 1}}, "stream_options.x"),
    ],
)
def test_unknown_fields_are_refused_as_openai_does(fields: dict[str, Any], path: str) -> None:
    error = refusal(lambda: chat(**fields))
    assert error.message == f"Unrecognized request argument supplied: {path}"
    assert error.param == path


def test_an_error_never_repeats_a_long_value() -> None:
    error = refusal(lambda: chat(temperature="x" * 100_000))
    assert len(error.message) < 200
    error = refusal(lambda: chat({**HELLO, "y" * 100_000: 1}))
    assert len(error.message) < 400


# -- messages -------------------------------------------------------------------------------


def test_parts_are_joined_as_they_are() -> None:
    call = chat({"role": "user", "content": [text("a "), text(""), text("b")]})
    assert call.messages == ({"role": "user", "content": "a b"},)


def test_a_conversation_with_tools() -> None:
    called = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Ulm", "days": 2}'},
    }
    call = chat(
        {"role": "developer", "content": "Be brief"},
        HELLO,
        {"role": "assistant", "content": None, "tool_calls": [called], "reasoning_content": "Hm"},
        {"role": "tool", "tool_call_id": "call_1", "content": [text("sun"), text("ny")]},
    )
    assert call.messages[0] == {"role": "system", "content": "Be brief"}
    assert call.messages[2] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Hm",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "weather", "arguments": {"city": "Ulm", "days": 2}},
            }
        ],
    }
    assert call.messages[3] == {"role": "tool", "content": "sunny", "tool_call_id": "call_1"}


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ("", {}),
        ("{}", {}),
        ("[1]", "[1]"),
        ("not json", "not json"),
        ('{"a": NaN}', '{"a": NaN}'),
        ('{"a": 1, "a": 2}', {"a": 2}),
        ('{"a": "\\ud800"}', '{"a": "\\ud800"}'),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_arguments_are_an_object_or_stay_text(arguments: str, found: Any) -> None:
    called = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    call = chat(HELLO, {"role": "assistant", "content": "", "tool_calls": [called]})
    assert call.messages[1]["tool_calls"][0]["function"]["arguments"] == found


def test_an_answer_comes_back_as_the_client_library_keeps_it() -> None:
    echo = {
        "role": "assistant",
        "content": "Hi",
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": None,
        "reasoning_content": "Hm",
    }
    call = chat(HELLO, echo, HELLO)
    answer = {"role": "assistant", "content": "Hi", "reasoning_content": "Hm"}
    assert call.messages[1] == answer


def test_tools_keep_the_order_of_their_fields() -> None:
    backwards = dict(reversed(list(WEATHER.items())))
    call = chat(tools=[{"function": backwards, "type": "function", "cache_control": EPHEMERAL}])
    assert list(call.tools[0]["function"]) == list(backwards)
    assert call.tools == (TOOL,)
    assert call.breakpoints == ((-1, 0),)
    assert call.parse_tools


def test_tools_stay_in_the_prompt_though_none_may_be_called() -> None:
    call = chat(tools=[TOOL], tool_choice="none")
    assert call.tools == (TOOL,)
    assert not call.parse_tools


@pytest.mark.parametrize(
    ("tool", "path"),
    [
        ({"type": "custom", "custom": {}}, "type"),
        ({"type": "function"}, "function"),
        ({"type": "function", "function": {"name": ""}}, "function.name"),
        ({"type": "function", "function": {}}, "function.name"),
        ({"type": "function", "function": {"name": "f", "parameters": []}}, "function.parameters"),
        ("weather", None),
    ],
)
def test_a_wrong_tool_is_refused(tool: Any, path: str | None) -> None:
    error = refusal(lambda: chat(tools=[tool]))
    assert error.param == ("tools[0]" if path is None else f"tools[0].{path}")


def test_breakpoints_between_parts_and_at_an_end() -> None:
    call = chat(
        {"role": "system", "content": [text("a", cache_control=EPHEMERAL), text("b")]},
        {"role": "user", "content": [text("c"), text("d", cache_control=EPHEMERAL)]},
        {"role": "user", "content": [text("e", prompt_cache_breakpoint={"mode": "explicit"})]},
    )
    assert call.messages[0]["content"] == [text("a"), text("b")]
    assert call.messages[1]["content"] == "cd"
    assert call.breakpoints == ((0, 0), (1, 0), (2, 0))


def test_there_are_four_breakpoints_at_most() -> None:
    marked = {"role": "user", "content": [text("a", cache_control=EPHEMERAL)]}
    assert len(chat(*[marked] * 4).breakpoints) == 4
    assert "Found 5" in refusal(lambda: chat(*[marked] * 5)).message
