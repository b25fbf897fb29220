"""Recorded agents replayed message by message, as they would send them, with reuse and without."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.server.talks import ALONE, Body, Message, Watch, answer, prompted, user, watched
from tests.server.world import Server, cached, serve

DATA = Path(__file__).parents[1] / "data"
MOST = 300
"""Characters of a message that are kept where the test may not take long."""
OPENING = 8
"""Tokens, at most, that open an answer and that the next prompt leaves out."""


def recorded(name: str) -> list[Message]:
    """A recording's messages, as they went over the wire; without demonstrations."""
    found = json.loads(gzip.decompress((DATA / f"{name}.traj.json.gz").read_bytes()))
    listed = found["history"] if isinstance(found, dict) else found
    return [
        {"role": each["role"], "content": each["content"]}
        for each in listed
        if not each.get("is_demo")
    ]


def cut(messages: Sequence[Message], most: int | None) -> list[Message]:
    """The messages with at most so many characters each."""
    return [{**each, "content": each["content"][:most]} for each in messages]


@pytest.fixture(scope="session")
def swe(long_run: bool) -> list[Message]:  # noqa: FBT001
    """An agent that mends a library: a long system text, twelve steps."""
    return cut(recorded("sweagent_pydicom-1458"), None if long_run else MOST)


@pytest.fixture(scope="session")
def mini(long_run: bool) -> list[Message]:  # noqa: FBT001
    """An agent that works with a shell alone: eleven steps."""
    return cut(recorded("miniswe_github_issue"), None if long_run else MOST)


@dataclass(frozen=True)
class Step:
    """One request of a replay, and what came of it."""

    messages: list[Message]
    body: Body


@dataclass(frozen=True)
class Replay:
    """A server with what was asked of it and what it made."""

    server: Server
    made: Watch
    fields: dict[str, Any]
    asked: dict[str, Body] = field(default_factory=dict)
    """Answers to be compared with, by what was asked."""

    def ask(self, messages: Sequence[Message], **fields: Any) -> Step:
        """Ask for what comes next."""
        asked = {"max_tokens": 6, **self.fields, **fields}
        return Step(list(messages), self.server.chat(*messages, **asked))

    def again(self, messages: Sequence[Message], **fields: Any) -> Body:
        """The same, but asked once."""
        name = json.dumps([messages, self.fields, fields])
        if name not in self.asked:
            self.asked[name] = self.ask(messages, **fields).body
        return self.asked[name]

    def agent(self, messages: Sequence[Message]) -> list[Step]:
        """Replay an agent: ask at each of its turns, then go on with what it said then."""
        turns = [at for at, each in enumerate(messages) if each["role"] == "assistant"]
        return [self.ask(messages[:at]) for at in turns]

    def compacting(self, messages: Sequence[Message]) -> tuple[list[Step], Step, list[Step]]:
        """The same with a compaction in the middle: what came before becomes a summary."""
        middle = len(messages) // 2 // 2 * 2  # a user's turn was just answered
        before = self.agent(messages[:middle])
        summed = self.ask([*messages[:middle], user("Summarise all of the above for yourself.")])
        head = messages[0]
        summary = user("What was done so far: " + " ".join(m["content"][:60] for m in messages))
        after = self.agent([head, summary, *messages[middle:]])
        return before, summed, after

    def compare(self, steps: Sequence[Step], cold: Replay) -> None:
        """Each answer is that of the same server with reuse off, to the bit."""
        alone = ALONE if cold.server is self.server else {}
        for step in steps:
            assert step.body["pool"]["exact"]
            same = cold.again(step.messages, **alone)
            assert cached(same) == 0
            assert self.made.bits(step.body) == cold.made.bits(same)
            assert answer(step.body) == answer(same)


@contextmanager
def replaying(
    settings: dict[str, Any] | None = None, fields: dict[str, Any] | None = None, **options: Any
) -> Iterator[Replay]:
    """A server whose requests are kept."""
    with (
        serve(settings, **{"lanes": 4, **options}) as server,
        watched(server) as made,
    ):
        yield Replay(server, made, fields or {})
        server.idle()


@pytest.fixture(scope="session")
def budget(long_run: bool) -> str:  # noqa: FBT001
    """Room for all that an agent leaves."""
    return "512MiB" if long_run else "64MiB"


@pytest.fixture(scope="module")
def off(budget: str) -> Iterator[Replay]:
    """The same server, but that it neither reads nor leaves anything."""
    with replaying({"read": False, "retain": False}, kv_budget=budget) as cold:
        yield cold


def rate(steps: Sequence[Step]) -> float:
    """The share of prompt tokens that was reused."""
    return sum(cached(s.body) for s in steps) / sum(prompted(s.body) for s in steps)


def follows(before: Step, step: Step) -> bool:
    """Whether all of the prompt before was reused, but for the answer's opening."""
    return cached(step.body) >= prompted(before.body) - OPENING


def all_follow(steps: Sequence[Step]) -> bool:
    """Whether each step reused all of the one before."""
    return all(itertools.starmap(follows, itertools.pairwise(steps)))


def length(server: Server, message: Message) -> int:
    """Tokens of a message's text."""
    return len(server.runner.tokenizer.encode(message["content"]))


def test_an_agent_resumes_all_but_what_is_new(swe: list[Message], off: Replay, budget: str) -> None:
    with replaying(kv_budget=budget) as replay:
        steps = replay.agent(swe)
        assert all_follow(steps)
        assert rate(steps) >= 0.8
        replay.compare(steps, off)


def test_an_agent_that_does_not_think(mini: list[Message], off: Replay, budget: str) -> None:
    fields = {"enable_thinking": False}
    with replaying(kv_budget=budget, fields=fields) as replay:
        steps = replay.agent(mini)
        assert all_follow(steps)
        assert rate(steps) >= 0.75
        replay.compare(steps, replace(off, fields=fields))


@pytest.mark.parametrize("kv_dtype", ["fp32", "int8-g64"])
def test_an_agent_with_drafts(mini: list[Message], budget: str, kv_dtype: str) -> None:
    with replaying(kv_budget=budget, kv_dtype=kv_dtype, draft_tokens=3) as replay:
        steps = replay.agent(mini[:14])
        assert all_follow(steps)
        replay.compare(steps, replay)


def test_a_compaction_in_the_middle(mini: list[Message], off: Replay, budget: str) -> None:
    with replaying(kv_budget=budget, fields={"session_id": "main"}) as replay:
        before, summed, after = replay.compacting(mini)
        assert follows(before[-1], summed)
        assert cached(after[0].body) >= length(replay.server, mini[0])
        assert all_follow(after)
        undone = replay.ask(summed.messages[:-1])  # the agent goes on as if nothing had been
        assert follows(before[-1], undone)
        replay.compare([*before, summed, *after, undone], off)


def test_four_sub_agents_at_once(mini: list[Message], off: Replay, budget: str) -> None:
    """They share a system text, and the main agent goes on when they are done."""
    part, rest = mini[:10], mini[:14]
    tasks = [
        user(f"You are agent {n}. Do part {n} of this: {mini[1]['content']}") for n in range(4)
    ]
    with replaying(kv_budget=budget) as replay:
        main = replay.agent(part)
        with ThreadPoolExecutor(len(tasks)) as crowd:
            children = list(crowd.map(lambda task: replay.agent([mini[0], task, *part[2:]]), tasks))
        resumed = replay.agent(rest)
        for steps in [*children, resumed]:
            assert all_follow(steps)
        for first, *_ in children:  # what all of them begin with
            assert cached(first.body) >= length(replay.server, mini[0])
        assert all(prompted(s.body) - cached(s.body) <= 1 for s in resumed[: len(part) // 2 - 1])
        replay.compare(list(itertools.chain(main, *children, resumed)), off)


def test_four_agents_in_a_pool_that_is_too_small(mini: list[Message], off: Replay) -> None:
    """About a third of what they would like: hits or not, every answer is right."""
    part = mini[:8]
    tasks = [user(f"You are agent {n}. {mini[1]['content']}") for n in range(4)]
    with replaying(kv_budget="8MiB", lanes=4) as replay:
        with ThreadPoolExecutor(len(tasks)) as crowd:
            agents = list(crowd.map(lambda task: replay.agent([mini[0], task, *part[2:]]), tasks))
        counters = replay.server.runner.pool.stats().counters
        assert counters.evictions + counters.truncations + counters.superseded_evicted > 0
        replay.compare(list(itertools.chain(*agents)), off)
