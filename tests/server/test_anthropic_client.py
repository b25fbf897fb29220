"""Anthropic's own Python client in front of a server that runs the shipped model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import pytest

from tests.server.scripted import Voice
from tests.server.sdk import Client, anthropic_of, options, user
from tests.server.world import MODEL, Server, serve

AsyncClient: Any = anthropic.AsyncAnthropic
# The client itself has no field for a temperature any more.
GREEDY: dict[str, Any] = {"model": MODEL, "max_tokens": 10, "extra_body": {"temperature": 0}}
PLAIN: dict[str, Any] = {**GREEDY, "thinking": {"type": "disabled"}}
SHORT = {**PLAIN, "max_tokens": 4}
HELLO = [user("Good morning to you.")]
LONG = "and so on " * 2000
SYSTEM = "You are a helper who tells short stories. " * 6


@pytest.fixture(scope="module")
def server(scripted: tuple[Server, Voice]) -> Server:
    return scripted[0]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Client]:
    with anthropic_of(server) as client:
        yield client


def prompt_tokens(usage: Any) -> int:
    """What the three counts of input add up to."""
    created, read = usage.cache_creation_input_tokens, usage.cache_read_input_tokens
    return int(usage.input_tokens + created + read)


def newest(server: Server) -> dict[str, Any]:
    server.idle()
    found: dict[str, Any] = server.get("/pool")["requests"][0]
    return found


def test_a_message_and_the_same_again(client: Client) -> None:
    first = client.messages.create(**PLAIN, messages=HELLO)
    again = client.messages.create(**PLAIN, messages=HELLO)
    assert (first.type, first.role, first.model) == ("message", "assistant", MODEL)
    assert [block.type for block in first.content] == ["text"]
    assert again.content == first.content
    counted = client.messages.count_tokens(
        model=MODEL, messages=HELLO, thinking={"type": "disabled"}
    )
    for body in (first, again):
        assert prompt_tokens(body.usage) == counted.input_tokens
        assert 0 < body.usage.output_tokens <= 10
    assert first.usage.cache_read_input_tokens == 0
    assert first.usage.cache_creation_input_tokens == counted.input_tokens
    assert again.usage.cache_read_input_tokens == counted.input_tokens


def test_counting_runs_nothing(client: Client, server: Server) -> None:
    server.idle()
    before = server.get("/pool")["counters"]
    assert client.messages.count_tokens(model=MODEL, messages=HELLO, system=SYSTEM).input_tokens
    assert server.get("/pool")["counters"] == before


def test_models(client: Client) -> None:
    (model,) = client.models.list()
    assert (model.id, model.type, model.display_name) == (MODEL, "model", MODEL)
    assert client.models.retrieve(MODEL) == model
    assert model.created_at.year > 2000
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("other")


def test_the_order_of_events(client: Client) -> None:
    whole = client.messages.create(**PLAIN, messages=HELLO)
    events = list(client.messages.create(**PLAIN, messages=HELLO, stream=True))
    kinds = [event.type for event in events]
    deltas = len(kinds) - 5
    assert kinds == [
        *("message_start", "content_block_start"),
        *["content_block_delta"] * deltas,
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    begun = events[0].message
    assert begun.content == []
    assert begun.stop_reason is None
    assert begun.usage.cache_read_input_tokens == whole.usage.cache_read_input_tokens
    assert prompt_tokens(begun.usage) == prompt_tokens(whole.usage)
    text = "".join(event.delta.text for event in events[2 : 2 + deltas])
    assert text == whole.content[0].text
    last = events[-2]
    assert last.delta.stop_reason == whole.stop_reason
    assert last.usage.output_tokens == whole.usage.output_tokens
    assert prompt_tokens(last.usage) == prompt_tokens(whole.usage)


def test_the_helper_that_joins_a_stream(client: Client) -> None:
    whole = client.messages.create(**PLAIN, messages=HELLO)
    with client.messages.stream(**PLAIN, messages=HELLO) as stream:
        said = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert [block.text for block in final.content] == [said] == [whole.content[0].text]
    assert final.stop_reason == whole.stop_reason
    assert prompt_tokens(final.usage) == prompt_tokens(whole.usage)
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_why_a_message_ends(client: Client, voice: Voice) -> None:
    voice.says("one two three", LONG, "one two three")
    done, cut = (client.messages.create(**PLAIN, messages=HELLO) for _ in range(2))
    stopped = client.messages.create(**PLAIN, messages=HELLO, stop_sequences=["\0", " two"])
    assert (done.stop_reason, done.stop_sequence) == ("end_turn", None)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 10)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " two")
    assert stopped.content[0].text == "one"


def test_thinking_comes_first_and_apart(client: Client, voice: Voice) -> None:
    asked = {**GREEDY, "max_tokens": 100, "messages": HELLO, "thinking": {"type": "adaptive"}}
    voice.says("hm, hm\n</think>\n\nSure.", "hm, hm\n</think>\n\nSure.")
    whole = client.messages.create(**asked)
    assert [block.type for block in whole.content] == ["thinking", "text"]
    assert whole.content[0].thinking == "hm, hm\n"
    assert whole.content[1].text == "Sure."
    with client.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text"]
    assert final.content[0].thinking == "hm, hm\n"
    assert final.content[0].signature
    assert final.content[1].text == "Sure."


def test_several_at_once_through_the_async_client(client: Client, server: Server) -> None:
    texts = [f"Tell me of number {index}." for index in range(4)]

    async def ask(client: Client, text: str) -> str:
        async with client.messages.stream(**PLAIN, messages=[user(text)]) as stream:
            return "".join([part async for part in stream.text_stream])

    async def ask_all() -> list[str]:
        async with AsyncClient(**options(server, "")) as client:
            return list(await asyncio.gather(*(ask(client, text) for text in texts)))

    said = asyncio.run(ask_all())
    for text, answer in zip(texts, said, strict=True):
        body = {**PLAIN["extra_body"], "cache_prompt": False}
        alone = client.messages.create(**{**PLAIN, "extra_body": body}, messages=[user(text)])
        assert alone.content[0].text == answer


def test_clients_that_leave_cancel_their_requests(
    client: Client, server: Server, voice: Voice
) -> None:
    voice.says(LONG, LONG)
    asked = {**PLAIN, "max_tokens": 4000, "messages": HELLO}
    with pytest.raises(anthropic.APITimeoutError):
        client.with_options(timeout=0.4).messages.create(**asked)
    assert newest(server)["finish"] == "cancelled"
    with client.messages.stream(**asked) as stream:
        assert next(iter(stream)).type == "message_start"
    assert newest(server)["finish"] == "cancelled"


@pytest.mark.parametrize(
    ("fields", "kind", "type_"),
    [
        ({"model": "other"}, anthropic.NotFoundError, "not_found_error"),
        ({"messages": []}, anthropic.BadRequestError, "invalid_request_error"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "invalid_request_error"),
        ({"max_tokens": 10**6}, anthropic.BadRequestError, "invalid_request_error"),
        ({"extra_body": {"foo": 1}}, anthropic.BadRequestError, "invalid_request_error"),
        ({"extra_body": {"cache_salt": ""}}, anthropic.BadRequestError, "invalid_request_error"),
    ],
)
def test_errors_are_the_client_s_own(
    client: Client, fields: dict[str, Any], kind: Any, type_: str
) -> None:
    for stream in (False, True):
        with pytest.raises(kind) as caught:
            client.messages.create(**{**PLAIN, "messages": HELLO, **fields}, stream=stream)
        assert caught.value.body["type"] == "error"
        assert caught.value.body["error"]["type"] == type_


def test_a_key_that_is_asked_for() -> None:
    with serve({"api_key": "secret"}) as server:
        with anthropic_of(server) as client, pytest.raises(anthropic.AuthenticationError):
            client.messages.create(**PLAIN, messages=HELLO)
        with anthropic_of(server, api_key="secret") as client:
            assert client.messages.create(**PLAIN, messages=HELLO).content


def test_a_body_that_is_too_large() -> None:
    with serve({"max_request_bytes": 10_000}) as server, anthropic_of(server) as client:
        with pytest.raises(anthropic.APIStatusError) as caught:
            client.messages.create(**PLAIN, messages=[user("a" * 10_000)])
        assert caught.value.status_code == 413
        assert client.messages.create(**PLAIN, messages=HELLO).content


@pytest.mark.parametrize("title", [{}, {"retain_prefix": False}])
def test_a_conversation_with_titles_resumes_every_time(
    client: Client, server: Server, title: dict[str, Any]
) -> None:
    # The prologue of an answer is written only before the newest one.
    prologue = len(server.runner.tokenizer.encode("<think>\n\n</think>\n\n"))
    create = client.messages.create
    messages: list[Any] = []
    before = 0
    for turn in range(5):
        messages.append(user(f"Chapter {turn}, {title}: what happened next?"))
        asked = [user(f"Write a title of three words for this: {messages[-2:]}")]
        more = {**PLAIN["extra_body"], **title}
        with ThreadPoolExecutor(1) as beside:
            named = beside.submit(create, **{**SHORT, "extra_body": more}, messages=asked)
            body = create(**SHORT, messages=messages, system=SYSTEM)
            assert named.result().usage.output_tokens
        if turn:
            assert body.usage.cache_read_input_tokens == before - prologue
            assert body.model_dump()["pool"]["exact"]
        before = prompt_tokens(body.usage)
        content = [block.model_dump(exclude_none=True) for block in body.content]
        messages.append({"role": "assistant", "content": content})
