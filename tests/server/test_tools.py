"""Tools that are called and answered, and what is thought before: in both dialects.

What the model says is scripted; how it is computed, kept, read and told is not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import beta_tool

from tests.server.scripted import Voice, serve_scripted
from tests.server.sdk import Client, anthropic_of, openai_of, user
from tests.server.world import MODEL, Server

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
OPENAI_TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
ANTHROPIC_TOOL = {"name": "weather", "input_schema": SCHEMA}
ASKED = [user("What will the weather be in Paris?")]


def call(city: str, days: int | None = None) -> str:
    """A call as the model writes it."""
    more = f"<parameter=days>\n{days}\n</parameter>\n" if days is not None else ""
    inner = f"<function=weather>\n<parameter=city>\n{city}\n</parameter>\n{more}</function>"
    return f"<tool_call>\n{inner}\n</tool_call>"


ONE = "hm\n</think>\n\nSure.\n\n" + call("Paris")
TWO = f"hm\n</think>\n\n{call('Paris')}\n{call('Rome', 3)}"


@pytest.fixture(scope="module")
def scripted() -> Iterator[tuple[Server, Voice]]:
    with serve_scripted(max_entries=32, lanes=2) as both:
        yield both


@pytest.fixture(scope="module")
def server(scripted: tuple[Server, Voice]) -> Server:
    return scripted[0]


@pytest.fixture
def voice(scripted: tuple[Server, Voice]) -> Voice:
    scripted[0].http.delete("/pool/entries")
    return scripted[1]


@pytest.fixture(scope="module")
def openai(server: Server) -> Iterator[Client]:
    with openai_of(server) as client:
        yield client


@pytest.fixture(scope="module")
def anthropic(server: Server) -> Iterator[Client]:
    with anthropic_of(server) as client:
        yield client


def chat(client: Client, messages: list[Any], **fields: Any) -> Any:
    asked = {"model": MODEL, "max_tokens": 200, "tools": [OPENAI_TOOL], **fields}
    return client.chat.completions.create(messages=messages, **asked)


def say(client: Client, messages: list[Any], **fields: Any) -> Any:
    asked = {"model": MODEL, "max_tokens": 200, "tools": [ANTHROPIC_TOOL], **fields}
    return client.messages.create(messages=messages, **asked)


def calls_of(message: Any) -> list[tuple[str, Any]]:
    """Name and arguments of each call of an OpenAI message."""
    return [
        (each.function.name, json.loads(each.function.arguments)) for each in message.tool_calls
    ]


# -- what is told -------------------------------------------------------------------------


def test_openai_a_call(openai: Client, voice: Voice) -> None:
    voice.says(ONE)
    (choice,) = chat(openai, ASKED).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Sure.\n\n"
    assert choice.message.reasoning_content == "hm\n"
    assert calls_of(choice.message) == [("weather", {"city": "Paris"})]


def test_openai_two_calls_and_nothing_said(openai: Client, voice: Voice) -> None:
    voice.says(TWO)
    (choice,) = chat(openai, ASKED).choices
    assert choice.message.content is None
    wanted = [("weather", {"city": "Paris"}), ("weather", {"city": "Rome", "days": 3})]
    assert calls_of(choice.message) == wanted
    assert len({each.id for each in choice.message.tool_calls}) == 2


@pytest.mark.parametrize("text", [ONE, TWO])
def test_openai_a_stream_of_calls(openai: Client, voice: Voice, text: str) -> None:
    voice.says(text, text)
    whole = chat(openai, ASKED).choices[0]
    chunks = list(chat(openai, ASKED, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason == "tool_calls"
    assert (
        "".join(delta.content or "" for delta in deltas).strip()
        == (whole.message.content or "").strip()
    )
    thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert thought == whole.message.reasoning_content
    calls = [each for delta in deltas for each in delta.tool_calls or ()]
    assert [each.index for each in calls] == list(range(len(calls)))
    told = [(each.function.name, json.loads(each.function.arguments)) for each in calls]
    assert told == calls_of(whole.message)


def test_anthropic_a_call(anthropic: Client, voice: Voice) -> None:
    voice.says(ONE)
    message = say(anthropic, ASKED)
    assert message.stop_reason == "tool_use"
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    thinking, text, used = message.content
    assert (thinking.thinking, text.text.strip()) == ("hm\n", "Sure.")
    assert (used.name, used.input) == ("weather", {"city": "Paris"})


@pytest.mark.parametrize("text", [ONE, TWO])
def test_anthropic_a_stream_of_calls(anthropic: Client, voice: Voice, text: str) -> None:
    voice.says(text, text)
    whole = say(anthropic, ASKED)
    asked = {"model": MODEL, "max_tokens": 200, "tools": [ANTHROPIC_TOOL], "messages": ASKED}
    with anthropic.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    unnamed = {"id", "signature", "citations"}
    told, wanted = (
        [block.model_dump(exclude=unnamed, exclude_none=True) for block in each.content]
        for each in (final, whole)
    )
    assert told == wanted
    assert final.stop_reason == whole.stop_reason == "tool_use"
    assert final.usage.output_tokens == whole.usage.output_tokens


@pytest.mark.parametrize("stop", ["Sure", "<parameter="])
def test_a_stop_string_comes_before_a_call(
    openai: Client, anthropic: Client, voice: Voice, stop: str
) -> None:
    voice.says(ONE, ONE)
    choice = chat(openai, ASKED, stop=stop).choices[0]
    assert choice.finish_reason == "stop"
    assert not choice.message.tool_calls
    message = say(anthropic, ASKED, stop_sequences=[stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert "tool_use" not in [block.type for block in message.content]


def test_a_call_that_is_cut_short_is_text(openai: Client, anthropic: Client, voice: Voice) -> None:
    voice.says(ONE, ONE)
    choice = chat(openai, ASKED, max_tokens=25).choices[0]
    assert choice.finish_reason == "length"
    assert not choice.message.tool_calls
    assert choice.message.content.startswith("Sure.\n\n<tool_call>\n<function=weather>")
    message = say(anthropic, ASKED, max_tokens=25)
    assert message.stop_reason == "max_tokens"
    assert [block.type for block in message.content] == ["thinking", "text"]


def test_tools_that_may_not_be_called(openai: Client, anthropic: Client, voice: Voice) -> None:
    voice.says(ONE, ONE)
    choice = chat(openai, ASKED, tool_choice="none").choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.content.endswith(call("Paris"))
    message = say(anthropic, ASKED, tool_choice={"type": "none"})
    assert message.stop_reason == "end_turn"


# -- what comes next ----------------------------------------------------------------------


def test_openai_what_the_tool_said_resumes_where_the_call_ended(
    openai: Client, voice: Voice
) -> None:
    voice.says(TWO, "</think>\n\nFine in both.")
    first = chat(openai, ASKED)
    message = first.choices[0].message
    results = [
        {"role": "tool", "tool_call_id": each.id, "content": f"{index}: fine"}
        for index, each in enumerate(message.tool_calls)
    ]
    answered = [*ASKED, message.model_dump(exclude_none=True), *results]
    second = chat(openai, answered)
    assert second.choices[0].message.content == "Fine in both."
    # All that was computed: the last token, which ended the answer, was only chosen.
    computed = first.usage.prompt_tokens + first.usage.completion_tokens - 1
    assert second.usage.prompt_tokens_details.cached_tokens == computed
    assert second.pool["reuse"] == "append_frontier"
    # What was decoded is as good as what was prefilled, not the same bits: and so it is told.
    assert not second.pool["exact"]


def test_anthropic_what_the_tool_said_resumes_where_the_call_ended(
    anthropic: Client, voice: Voice
) -> None:
    voice.says(TWO, "</think>\n\nFine in both.")
    first = say(anthropic, ASKED)
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "fine"}
        for block in first.content
        if block.type == "tool_use"
    ]
    content = [block.model_dump(exclude_none=True) for block in first.content]
    answered = [*ASKED, {"role": "assistant", "content": content}, user(results)]
    second = say(anthropic, answered)
    assert second.content[-1].text == "Fine in both."
    usage = first.usage
    prompt = usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens
    assert second.usage.cache_read_input_tokens == prompt + usage.output_tokens - 1


def test_openai_s_helper_reads_the_arguments_of_a_stream(openai: Client, voice: Voice) -> None:
    voice.says(ONE)
    strict = {**OPENAI_TOOL["function"], "strict": True}  # type: ignore[dict-item]
    asked = {"model": MODEL, "max_tokens": 200, "messages": ASKED}
    tools = [{"type": "function", "function": strict}]
    with openai.chat.completions.stream(**asked, tools=tools) as stream:
        (done,) = [e for e in stream if e.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion().choices[0]
    assert done.parsed_arguments == {"city": "Paris"}
    assert (final.finish_reason, calls_of(final.message)) == (
        "tool_calls",
        [("weather", {"city": "Paris"})],
    )


def test_anthropic_s_helper_runs_a_tool_to_the_end(anthropic: Client, voice: Voice) -> None:
    asked: list[str] = []

    @beta_tool
    def weather(city: str) -> str:
        """Tell what the weather will be."""
        asked.append(city)
        return "fine"

    voice.says(ONE, "</think>\n\nIt will be fine.")
    runner = anthropic.beta.messages.tool_runner(
        model=MODEL, max_tokens=200, messages=ASKED, tools=[weather]
    )
    final = runner.until_done()
    assert asked == ["Paris"]
    assert final.content[-1].text == "It will be fine."
    assert final.usage.cache_read_input_tokens > 0


def test_a_loop_without_thoughts_sent_back_stays_exact(
    openai: Client, server: Server, voice: Voice
) -> None:
    """Many clients drop what was thought: then each request parts where the answer began."""
    steps = 4
    voice.says(*[ONE] * steps)
    messages, before = list(ASKED), 0
    for step in range(steps):
        body = chat(openai, messages)
        cached, exact = body.usage.prompt_tokens_details.cached_tokens, body.pool["exact"]
        assert (cached, exact) == (before, True)
        before = body.usage.prompt_tokens
        message = body.choices[0].message.model_dump(exclude_none=True)
        del message["reasoning_content"]
        (called,) = message["tool_calls"]
        result = {"role": "tool", "tool_call_id": called["id"], "content": f"{step}: none yet"}
        messages += [message, result]
    body = chat(openai, messages, max_tokens=8, temperature=0)
    cold = chat(openai, messages, max_tokens=8, temperature=0, extra_body={"cache_prompt": False})
    assert body.usage.prompt_tokens_details.cached_tokens == before
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert body.choices == cold.choices
    server.idle()


def test_the_turn_point_moves_with_every_request_of_a_loop(
    openai: Client, server: Server, voice: Voice
) -> None:
    voice.says(ONE, ONE, ONE)
    messages = list(ASKED)
    turns = []
    for step in range(3):
        body = chat(openai, messages)
        server.idle()
        shown = server.get(f"/pool/entries/{body.pool['key']}")["entry"]["checkpoints"]
        turns.append(max(each["position"] for each in shown if each["kind"] == "turn"))
        assert body.usage.prompt_tokens - 4 <= turns[-1] < body.usage.prompt_tokens
        message = body.choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": str(step)}
        messages += [message.model_dump(exclude_none=True), result]
    assert turns == sorted(set(turns))
