"""OpenAI's own Python client in front of a server that runs the shipped model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.server.scripted import Voice
from tests.server.sdk import GREEDY, Client, openai_of, options, user
from tests.server.world import MODEL, Server, serve

AsyncClient: Any = openai.AsyncOpenAI
PLAIN: dict[str, Any] = {**GREEDY, "max_tokens": 12, "extra_body": {"enable_thinking": False}}
SHORT = {**PLAIN, "max_tokens": 4}
HELLO = [user("Good morning to you.")]
LONG = "and so on " * 2000
"""More than any test waits for."""
SYSTEM = {"role": "system", "content": "You are a helper who tells short stories. " * 6}


@pytest.fixture(scope="module")
def server(scripted: tuple[Server, Voice]) -> Server:
    return scripted[0]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Client]:
    with openai_of(server) as client:
        yield client


def counts(body: Any) -> tuple[int, int]:
    """Prompt tokens of an answer, and how many of them were reused."""
    return body.usage.prompt_tokens, body.usage.prompt_tokens_details.cached_tokens


def newest(server: Server) -> dict[str, Any]:
    """The request that ended last, once nothing runs any more."""
    server.idle()
    found: dict[str, Any] = server.get("/pool")["requests"][0]
    return found


# -- chat ---------------------------------------------------------------------------------


def test_a_chat_and_the_same_again(client: Client) -> None:
    first = client.chat.completions.create(**PLAIN, messages=HELLO)
    again = client.chat.completions.create(**PLAIN, messages=HELLO)
    assert first.model == MODEL
    assert first.object == "chat.completion"
    (choice,) = first.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert again.choices == first.choices
    assert again.id != first.id
    for body in (first, again):
        assert body.usage is not None
        assert 0 < body.usage.completion_tokens <= 12
        assert body.usage.total_tokens == body.usage.prompt_tokens + body.usage.completion_tokens
    prompt, reused = counts(again)
    assert reused == prompt > 0


def test_a_stream_tells_what_the_whole_answer_does(client: Client) -> None:
    whole = client.chat.completions.create(**PLAIN, messages=HELLO)
    asked = {**PLAIN, "messages": HELLO, "stream": True}
    chunks = list(client.chat.completions.create(**asked))
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1
    assert [chunk.choices[0].delta.role for chunk in chunks][:2] == ["assistant", None]
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert said == whole.choices[0].message.content
    finish = [chunk.choices[0].finish_reason for chunk in chunks]
    assert finish == [None] * (len(chunks) - 1) + [whole.choices[0].finish_reason]

    counted = list(client.chat.completions.create(**asked, stream_options={"include_usage": True}))
    assert all(chunk.usage is None for chunk in counted[:-1])
    assert counted[-1].choices == []
    assert counted[-1].usage == whole.usage


def test_the_helper_that_joins_a_stream(client: Client) -> None:
    whole = client.chat.completions.create(**PLAIN, messages=HELLO)
    with client.chat.completions.stream(**PLAIN, messages=HELLO) as stream:
        said = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content == said
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason


def test_an_answer_that_is_cut_short_says_so(client: Client, voice: Voice) -> None:
    voice.says("one two three", LONG)
    asked = {**PLAIN, "messages": HELLO}
    whole, cut = (client.chat.completions.create(**asked).choices[0] for _ in range(2))
    assert (whole.message.content, whole.finish_reason) == ("one two three", "stop")
    assert cut.message.content is not None
    assert LONG.startswith(cut.message.content)
    assert cut.finish_reason == "length"


def test_a_stop_string_ends_the_text_before_it(client: Client) -> None:
    text = client.chat.completions.create(**PLAIN, messages=HELLO).choices[0].message.content
    assert text is not None
    stop = text[len(text) // 2 :][:3]
    wanted = text[: text.index(stop)]
    stopped = client.chat.completions.create(**PLAIN, messages=HELLO, stop=["\0never", stop])
    assert stopped.choices[0].message.content == wanted
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.usage is not None
    assert stopped.usage.completion_tokens < 12
    chunks = list(client.chat.completions.create(**PLAIN, messages=HELLO, stop=stop, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_seed_repeats_its_answer(client: Client) -> None:
    drawn = {**PLAIN, "temperature": 1.0, "messages": HELLO}
    one, same, other = (
        client.chat.completions.create(**drawn, seed=seed).choices[0].message.content
        for seed in (7, 7, 8)
    )
    assert one == same != other


def test_completions(client: Client, server: Server) -> None:
    asked = {**GREEDY, "max_tokens": 10}
    whole = client.completions.create(**asked, prompt="In the beginning")
    chunks = list(
        client.completions.create(
            **asked, prompt="In the beginning", stream=True, stream_options={"include_usage": True}
        )
    )
    text = whole.choices[0].text
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == text
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert (
        chunks[-1].usage.total_tokens == whole.usage.total_tokens == whole.usage.prompt_tokens + 10
    )
    tokens = server.runner.tokenizer.encode("In the beginning")
    assert client.completions.create(**asked, prompt=tokens).choices[0].text == text
    stopped = client.completions.create(**asked, prompt=tokens, stop=text[4:7])
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == (text[:4], "stop")


def test_models(client: Client) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "ninfer-pool"


def test_several_at_once_through_the_async_client(client: Client, server: Server) -> None:
    texts = [f"Tell me of number {index}." for index in range(4)]

    async def ask(client: Client, text: str) -> str:
        stream = await client.chat.completions.create(**PLAIN, messages=[user(text)], stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def ask_all() -> list[str]:
        async with AsyncClient(**options(server, "/v1")) as client:
            assert [model.id async for model in client.models.list()] == [MODEL]
            return list(await asyncio.gather(*(ask(client, text) for text in texts)))

    said = asyncio.run(ask_all())
    for text, answer in zip(texts, said, strict=True):
        body = {**PLAIN["extra_body"], "cache_prompt": False}
        alone = client.chat.completions.create(
            **{**PLAIN, "extra_body": body}, messages=[user(text)]
        )
        assert alone.choices[0].message.content == answer


# -- clients that leave -------------------------------------------------------------------


def test_a_client_that_times_out_cancels_its_request(
    client: Client, server: Server, voice: Voice
) -> None:
    voice.says(LONG)
    asked = {**PLAIN, "messages": [user("Go on for ever.")], "max_tokens": 4000}
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.4).chat.completions.create(**asked)
    request = newest(server)
    assert request["finish"] == "cancelled"
    assert request["output_tokens"] < 4000
    # Checkpoints that it had crossed stay.
    again = client.chat.completions.create(**{**asked, "max_tokens": 1})
    prompt, reused = counts(again)
    assert reused == prompt


def test_a_stream_that_is_closed_cancels_its_request(
    client: Client, server: Server, voice: Voice
) -> None:
    voice.says(LONG)
    asked = {**PLAIN, "messages": HELLO, "max_tokens": 4000}
    with client.chat.completions.create(**asked, stream=True) as stream:
        assert next(iter(stream)).choices[0].delta.role == "assistant"
    assert newest(server)["finish"] == "cancelled"


def test_a_task_that_is_cancelled_cancels_its_request(server: Server, voice: Voice) -> None:
    voice.says(LONG)

    async def leave() -> None:
        async with AsyncClient(**options(server, "/v1")) as client:
            asked = {**PLAIN, "messages": HELLO, "max_tokens": 4000}
            await asyncio.wait_for(client.chat.completions.create(**asked), 0.4)

    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(leave())
    assert newest(server)["finish"] == "cancelled"


# -- errors -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "kind", "code", "param"),
    [
        ({"model": "other"}, openai.NotFoundError, "model_not_found", "model"),
        ({"messages": []}, openai.BadRequestError, None, "messages"),
        ({"temperature": 3}, openai.BadRequestError, None, "temperature"),
        ({"n": 2}, openai.BadRequestError, None, "n"),
        ({"max_tokens": 10**6}, openai.BadRequestError, "context_length_exceeded", "messages"),
        ({"extra_body": {"foo": 1}}, openai.BadRequestError, None, "foo"),
        ({"extra_body": {"cache_salt": ""}}, openai.BadRequestError, None, "cache_salt"),
    ],
)
def test_errors_are_the_client_s_own(
    client: Client, fields: dict[str, Any], kind: Any, code: str | None, param: str
) -> None:
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{**PLAIN, "messages": HELLO, **fields})
    assert (caught.value.code, caught.value.param) == (code, param)
    with pytest.raises(kind):
        client.chat.completions.create(**{**PLAIN, "messages": HELLO, **fields}, stream=True)


def test_other_errors(client: Client) -> None:
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=MODEL, input="text")
    with pytest.raises(openai.BadRequestError, match="prompt"):
        client.completions.create(**GREEDY, prompt=["two", "prompts"])


def test_a_key_that_is_asked_for() -> None:
    with serve({"api_key": "secret"}) as server:
        with openai_of(server) as client, pytest.raises(openai.AuthenticationError):
            client.chat.completions.create(**PLAIN, messages=HELLO)
        with openai_of(server, api_key="secret") as client:
            assert client.chat.completions.create(**PLAIN, messages=HELLO).choices
        assert server.http.get("/health").status_code == 200


# -- a title request beside every turn ----------------------------------------------------


@pytest.mark.parametrize("title", [{}, {"retain_prefix": False}])
def test_a_conversation_with_titles_resumes_every_time(
    client: Client, server: Server, title: dict[str, Any]
) -> None:
    # The prologue of an answer is written only before the newest one.
    prologue = len(server.runner.tokenizer.encode("<think>\n\n</think>\n\n"))
    create = client.chat.completions.create
    messages: list[Any] = [SYSTEM]
    before = 0
    for turn in range(5):
        messages.append(user(f"Chapter {turn}, {title}: what happened next?"))
        asked = [user(f"Write a title of three words for this: {messages[-2:]}")]
        with ThreadPoolExecutor(1) as beside:
            named = beside.submit(create, **{**SHORT, "extra_body": title}, messages=asked)
            body = create(**SHORT, messages=messages)
            assert named.result().choices
        prompt, reused = counts(body)
        if turn:
            assert reused == before - prologue
            assert body.model_dump()["pool"]["exact"]
        before = prompt
        messages.append(body.choices[0].message.model_dump(exclude_none=True))
