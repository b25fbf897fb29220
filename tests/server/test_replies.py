"""Answers, whole and streamed, as the official clients' own types and decoders read them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from ninfer_pool.server.anthropic_replies import MessagesWriter
from ninfer_pool.server.chat_request import Piece, Reasoning, Report, Start, Text, ToolCall
from ninfer_pool.server.errors import ApiError
from ninfer_pool.server.openai_replies import ChatWriter, CompletionWriter
from ninfer_pool.server.usage import merged, timings
from tests.server.asked import chat, completion, messages
from tests.server.clients import client_of
from tests.server.made_reports import report as made_report

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")
pydantic = pytest.importorskip("pydantic")

from anthropic.types import Message, RawMessageStreamEvent  # noqa: E402
from openai.types import Completion  # noqa: E402
from openai.types.chat import ChatCompletion, ChatCompletionChunk  # noqa: E402

HEAD: dict[str, Any] = {"id": "id-1", "created": 1_700_000_000, "model": "tiny"}
CALL = ToolCall("call_1", "weather", '{"city": "Ulm"}')
OTHER = ToolCall("call_2", "weather", "{}")
START = Start(prompt_tokens=50, cached_tokens=40)
ANSWERS: list[list[Piece]] = [
    [],
    [Text("Yes")],
    [Text("\n")],
    [Text("\n"), Text(" "), Text("Yes"), Text("\n")],
    [Reasoning("H"), Reasoning("m\n"), Text("Y\u2028e\x85s"), Text("\N{GRINNING FACE}")],
    [Reasoning("Hm")],
    [CALL],
    [Text("\n"), CALL, Text("\n"), OTHER, Text("\n")],
    [Reasoning("Hm"), Text("So:"), Text("\n"), CALL, Text("\n"), OTHER],
]


def report(**changes: Any) -> Report:
    """What came of a request whose prompt was resumed at 40 of 50 tokens."""
    fields: dict[str, Any] = {
        "number": 7,
        "prompt_tokens": 50,
        "cached_tokens": 40,
        "output_tokens": 5,
        "reasoning_tokens": 2,
        "retained_tokens": 46,
        "key": "ab",
        "lane": 1,
        "drafted": 0,
        "accepted": 0,
        "first_token_seconds": 0.5,
        "prefill_seconds": 0.25,
        "seconds": 2.5,
    }
    return made_report(**{**fields, **changes})


def told(parts: Iterable[bytes]) -> list[Any]:
    """The data of server-sent events."""
    lines = b"".join(parts).decode("ascii").splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [text if text == "[DONE]" else json.loads(text) for text in data]


def streamed(writer: Any, pieces: Sequence[Piece], end: Report) -> list[bytes]:
    """A whole stream."""
    middle = [part for piece in pieces for part in writer.piece(piece)]
    return [*writer.start(START), *middle, *writer.end(end)]


# -- OpenAI's chat ----------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", ANSWERS)
def test_a_chat_body_is_what_the_client_expects(pieces: list[Piece]) -> None:
    body = ChatWriter(chat(), **HEAD).body(pieces, report())
    found = ChatCompletion.model_validate(json.loads(json.dumps(body)))
    message = found.choices[0].message
    calls = [p for p in pieces if isinstance(p, ToolCall)]
    text = "".join(p.text for p in pieces if isinstance(p, Text))
    assert message.content == (None if calls and not text.strip() else text)
    assert [c.id for c in message.tool_calls or []] == [c.id for c in calls]
    assert found.choices[0].finish_reason == ("tool_calls" if calls else "stop")
    thought = "".join(p.text for p in pieces if isinstance(p, Reasoning))
    assert body["choices"][0]["message"].get("reasoning_content", "") == thought
    assert chat(body["choices"][0]["message"]).messages[0]["role"] == "assistant"


@pytest.mark.parametrize("pieces", ANSWERS)
def test_a_chat_stream_adds_up_to_its_body(pieces: list[Piece]) -> None:
    call = chat(stream=True, stream_options={"include_usage": True})
    stream = streamed(ChatWriter(call, **HEAD), pieces, report())
    body = ChatWriter(call, **HEAD).body(pieces, report())
    with client_of(openai.OpenAI, stream=b"".join(stream)) as client:
        chunks = list(client.chat.completions.create(model="m", messages=[], stream=True))
    for chunk in told(stream)[:-1]:
        ChatCompletionChunk.model_validate(chunk)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    message = body["choices"][0]["message"]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == (message["content"] or "")
    calls = [each for delta in deltas for each in delta.tool_calls or []]
    assert [each.index for each in calls] == list(range(len(calls)))
    assert [each.to_dict(exclude_unset=True) for each in calls] == [
        {"index": index, **each} for index, each in enumerate(message.get("tool_calls", []))
    ]
    thoughts = [getattr(delta, "reasoning_content", "") for delta in deltas]
    assert "".join(thoughts) == message.get("reasoning_content", "")
    assert chunks[-2].choices[0].finish_reason == body["choices"][0]["finish_reason"]
    assert chunks[-1].usage.to_dict() == body["usage"]


def test_the_last_chunks_say_how_an_answer_was_made() -> None:
    *_, finish, usage, done = told(
        streamed(ChatWriter(chat(stream_options={"include_usage": True}), **HEAD), [], report())
    )
    assert finish["timings"] == timings(report())
    assert finish["pool"] == {
        "request": 7,
        "reuse": "restore_turn_checkpoint",
        "reason": "hit",
        "exact": True,
        "key": "ab",
        "lane": 1,
        "tier": None,
    }
    assert finish["usage"] is None
    assert (usage["choices"], done) == ([], "[DONE]")
    assert usage["usage"] == {
        "prompt_tokens": 50,
        "completion_tokens": 5,
        "total_tokens": 55,
        "prompt_tokens_details": {"cached_tokens": 40},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }


def test_usage_is_streamed_only_where_it_was_asked_for() -> None:
    chunks = told(streamed(ChatWriter(chat(), **HEAD), [Text("a")], report()))
    assert chunks[-1] == "[DONE]"
    assert all("usage" not in chunk for chunk in chunks[:-1])


@pytest.mark.parametrize("finish", ["length", "cancelled", "error"])
def test_what_was_cut_short_does_not_look_finished(finish: str) -> None:
    cut = report(finish=finish)
    assert ChatWriter(chat(), **HEAD).body([CALL], cut)["choices"][0]["finish_reason"] == "length"
    assert MessagesWriter(messages(), **HEAD).body([CALL], cut)["stop_reason"] == "max_tokens"


def test_a_failure_in_mid_stream_reaches_openai_s_client() -> None:
    writer = ChatWriter(chat(), **HEAD)
    stream = [*writer.start(START), *writer.error(ApiError(500, "it broke"))]
    with (
        client_of(openai.OpenAI, stream=b"".join(stream)) as client,
        pytest.raises(openai.APIError, match="it broke"),
    ):
        list(client.chat.completions.create(model="m", messages=[], stream=True))


# -- completions ------------------------------------------------------------------------------


def test_a_completion_body_is_what_the_client_expects() -> None:
    body = CompletionWriter(completion(), **HEAD).body([Text("a"), Reasoning("b")], report())
    found = Completion.model_validate(json.loads(json.dumps(body)))
    assert (found.choices[0].text, found.choices[0].finish_reason) == ("ab", "stop")
    assert found.usage is not None
    assert found.usage.total_tokens == 55
    assert body["pool"]["request"] == 7


def test_a_completion_stream_adds_up_to_its_body() -> None:
    writer = CompletionWriter(completion(stream_options={"include_usage": True}), **HEAD)
    stream = streamed(writer, [Text("a\u2028"), Text("b")], report(finish="length"))
    with client_of(openai.OpenAI, stream=b"".join(stream)) as client:
        chunks = list(client.completions.create(model="m", prompt="p", stream=True))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == "a\u2028b"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 40
    # The API gives no reason before the end, whatever the type of a whole completion says.
    for chunk in told(stream)[:-1]:
        for choice in chunk["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        Completion.model_validate(chunk)


# -- Anthropic's messages ---------------------------------------------------------------------


@pytest.mark.parametrize("pieces", ANSWERS)
def test_a_message_body_is_what_the_client_expects(pieces: list[Piece]) -> None:
    body = MessagesWriter(messages(), **HEAD).body(pieces, report())
    found = Message.model_validate(json.loads(json.dumps(body)))
    calls = any(isinstance(p, ToolCall) for p in pieces)
    kinds = {Text: "text", Reasoning: "thinking", ToolCall: "tool_use"}
    wanted = [p for p in merged(pieces) if not (calls and isinstance(p, Text) and p.text.isspace())]
    assert [block.type for block in found.content] == [kinds[type(p)] for p in wanted]
    assert found.stop_reason == ("tool_use" if calls else "end_turn")
    again = messages({"role": "assistant", "content": body["content"]})
    assert again.messages[0]["role"] == "assistant"


@pytest.mark.parametrize("pieces", ANSWERS)
def test_a_message_stream_adds_up_to_its_body(pieces: list[Piece]) -> None:
    stream = streamed(MessagesWriter(messages(), **HEAD), pieces, report())
    body = MessagesWriter(messages(), **HEAD).body(pieces, report())
    adapter = pydantic.TypeAdapter(RawMessageStreamEvent)
    for event in told(stream):
        adapter.validate_python(event)
    with (
        client_of(anthropic.Anthropic, stream=b"".join(stream)) as client,
        client.messages.stream(model="m", max_tokens=9, messages=[]) as events,
    ):
        found = events.get_final_message()
    assert [block.to_dict() for block in found.content] == body["content"]
    assert found.stop_reason == body["stop_reason"]
    usage = found.usage.to_dict()
    assert {name: usage[name] for name in body["usage"]} == body["usage"]


def test_events_have_the_names_and_order_that_clients_expect() -> None:
    pieces: list[Piece] = [Reasoning("Hm"), Text("So"), CALL]
    stream = streamed(MessagesWriter(messages(), **HEAD), pieces, report())
    names = [line[7:] for line in b"".join(stream).decode().splitlines() if line[:6] == "event:"]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    thought = [*block[:2], "content_block_delta", block[2]]  # and its signature
    assert names == ["message_start", *thought, *block, *block, "message_delta", "message_stop"]
    assert names == [event["type"] for event in told(stream)]
    first, *_, last, _ = told(stream)
    assert first["message"]["usage"]["cache_read_input_tokens"] == 40
    assert first["message"]["usage"]["input_tokens"] == 10
    assert last["pool"]["lane"] == 1
    assert last["timings"]["cache_n"] == 40


@pytest.mark.parametrize("retained", [0, 30, 46, 50, 99])
def test_anthropic_s_three_counts_add_up_to_the_prompt(retained: int) -> None:
    body = MessagesWriter(messages(), **HEAD).body([], report(retained_tokens=retained))
    usage = body["usage"]
    created = max(0, min(retained, 50) - 40)
    assert usage["cache_creation_input_tokens"] == created
    assert usage["cache_read_input_tokens"] == 40
    assert usage["input_tokens"] == 10 - created
    assert usage["output_tokens"] == 5


def test_a_stop_string_is_told() -> None:
    body = MessagesWriter(messages(), **HEAD).body([Text("a")], report(stop_string="END"))
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "END")


def test_a_failure_in_mid_stream_reaches_anthropic_s_client() -> None:
    writer = MessagesWriter(messages(), **HEAD)
    stream = [*writer.start(START), *writer.error(ApiError(503, "full up"))]
    with (
        client_of(anthropic.Anthropic, stream=b"".join(stream)) as client,
        pytest.raises(anthropic.APIStatusError, match="full up"),
        client.messages.stream(model="m", max_tokens=9, messages=[]) as events,
    ):
        events.get_final_message()


# -- timings ----------------------------------------------------------------------------------


def test_timings_are_those_of_llama_cpp() -> None:
    assert timings(report()) == {
        "cache_n": 40,
        "prompt_n": 10,
        "prompt_ms": 250.0,
        "prompt_per_token_ms": 25.0,
        "prompt_per_second": 40.0,
        "predicted_n": 5,
        "predicted_ms": 2000.0,
        "predicted_per_token_ms": 400.0,
        "predicted_per_second": 2.5,
    }


def test_drafts_are_told_where_there_are_some() -> None:
    found = timings(report(drafted=4, accepted=3))
    assert (found["draft_n"], found["draft_n_accepted"]) == (4, 3)


def test_nothing_done_in_no_time_is_no_trouble() -> None:
    found = timings(report(cached_tokens=50, output_tokens=0, prefill_seconds=0.0, seconds=0.1))
    assert found["prompt_per_token_ms"] == found["prompt_per_second"] == 0
    assert found["predicted_ms"] == found["predicted_per_second"] == 0
