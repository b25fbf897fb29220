"""Conversations as clients hold them, and what a server made of each request, token for token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import xxhash

from ninfer_pool.runner import Sequence as Held
from ninfer_pool.server.request import ServedRequest
from tests.server.world import Server, chat_body

Body = dict[str, Any]
Message = dict[str, Any]
STORY = (
    "the sea was calm and the ship went on to the north while the crew told stories of old kings "
    "and of the land behind the hills where nobody had ever been before them"
)
WORDS = STORY.split()
ALONE: dict[str, Any] = {"cache_prompt": False}
"""Fields of a request that reads nothing and leaves nothing."""


def prose(number: int, words: int) -> str:
    """Text of so many words; texts of other numbers part from it at their first word."""
    return f"{number:03d} " + " ".join(
        WORDS[(at * (number + 3) + at // 7) % len(WORDS)] for at in range(words)
    )


def user(text: str) -> Message:
    """A user's message."""
    return {"role": "user", "content": text}


def system(text: str) -> Message:
    """A system message."""
    return {"role": "system", "content": text}


def said(body: Body) -> Message:
    """An answer's message as a client sends it back: without what was thought."""
    return {"role": "assistant", "content": body["choices"][0]["message"]["content"]}


def prompted(body: Body) -> int:
    """Tokens of the prompt that an answer answers."""
    return int(body["usage"]["prompt_tokens"])


def prologue(server: Server, body: Body) -> int:
    """Tokens that open an answer and that later prompts leave out."""
    thinking = body["choices"][0]["message"].get("reasoning_content") is not None
    return len(server.runner.tokenizer.encode("<think>\n" + ("" if thinking else "\n</think>\n\n")))


@dataclass
class Talk:
    """A conversation: each turn quotes all before it, then asks."""

    server: Server
    messages: list[Message]
    fields: dict[str, Any] = field(default_factory=dict)
    last: Body = field(default_factory=dict)

    def turn(self, text: str, **fields: Any) -> Body:
        """Ask, and keep the answer for the next turn."""
        self.messages.append(user(text))
        self.last = self.server.chat(
            *self.messages, **{"enable_thinking": False, **self.fields, **fields}
        )
        self.messages.append(said(self.last))
        return self.last

    def kept(self) -> int:
        """Tokens of the last prompt that the next one repeats: all but the answer's opening."""
        return prompted(self.last) - prologue(self.server, self.last)


def together(talks: Sequence[Talk], text: str) -> list[Body]:
    """A turn of each conversation, all at once."""
    with ThreadPoolExecutor(len(talks)) as crowd:
        return list(crowd.map(lambda talk: talk.turn(text), talks))


def begun(server: Server, number: int, *, words: int = 60, **fields: Any) -> Talk:
    """A conversation of its own, one turn old."""
    talk = Talk(server, [system(prose(number, words))], fields)
    talk.turn(f"What is told of {number}?")
    return talk


@dataclass
class Watch:
    """What a server made of its requests, seen from within."""

    requests: dict[int, ServedRequest] = field(default_factory=dict)
    """By number."""
    logits: dict[Held | None, str] = field(default_factory=dict)
    """Digests of those that each request's first token was drawn from."""

    def tokens(self, body: Body) -> list[int]:
        """The tokens that were made for an answer."""
        return list(self.requests[body["pool"]["request"]].tokens)

    def bits(self, body: Body) -> tuple[str, list[int]]:
        """What tells to the bit whether an answer was made as another: states count, not words."""
        handle = self.requests[body["pool"]["request"]].submitted
        assert handle is not None
        return self.logits[handle.sequence], self.tokens(body)


@contextmanager
def watched(server: Server) -> Iterator[Watch]:
    """Watch the server while the block runs."""
    seen, runner = Watch(), server.runner
    inner, tail = server.service.submit, runner.executor.tail_logits

    def submit(request: ServedRequest) -> None:
        inner(request)
        seen.requests[request.number] = request

    def tail_logits(lane: int) -> torch.Tensor:
        found = tail(lane)
        (running,) = (each for each in runner.running if each.lane == lane)
        seen.logits[running] = xxhash.xxh3_64_hexdigest(found.numpy().tobytes())
        return found

    with (
        mock.patch.object(server.service, "submit", submit),
        mock.patch.object(runner.executor, "tail_logits", tail_logits),
    ):
        yield seen


@contextmanager
def prefilled(server: Server) -> Iterator[list[int]]:
    """Count what really passes through the model: the tokens of each chunk of a prompt."""
    chunks: list[int] = []
    executor = server.runner.executor
    inner = executor.prefill

    def prefill(lane: int, tokens: Any, **rest: Any) -> Any:
        chunks.append(len(tokens))
        return inner(lane, tokens, **rest)

    with mock.patch.object(executor, "prefill", prefill):
        yield chunks


def explained(server: Server, *messages: Message | str, **fields: Any) -> Body:
    """What the server says of a request before it is asked."""
    found = server.http.post("/pool/explain", json=chat_body(*messages, **fields))
    assert found.status_code == 200, found.text
    seen: Body = found.json()
    return seen


def answer(body: Body) -> tuple[Any, ...]:
    """What a client sees of an answer, but for ids and times."""
    choice = body["choices"][0]
    return choice["message"], choice["finish_reason"], body["usage"]["completion_tokens"]
