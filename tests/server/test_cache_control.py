"""What a request may ask of the pool, over HTTP: in every dialect, in its body and in headers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from tests.server.dialects import DIALECTS, ask, body_of, explain, headers_of
from tests.server.world import Server, cached, serve

NUMBERS = count()
WAYS = [(path, how) for path in DIALECTS for how in ("body", "header")]
every_way = pytest.mark.parametrize(("path", "how"), WAYS)
Clock = list[float]


@pytest.fixture(scope="module")
def clock() -> Clock:
    """What time it is for the pool: a list of one, which tests move."""
    return [0.0]


@pytest.fixture(scope="module")
def running(clock: Clock) -> Iterator[Server]:
    with serve(lanes=2, clock=lambda: clock[0]) as server:
        yield server


@pytest.fixture
def server(running: Server) -> Server:
    """The server, with nothing retained."""
    running.idle()
    running.http.delete("/pool/entries")
    return running


def fresh() -> str:
    """A text that no other test asks."""
    return f"Number {next(NUMBERS)} is a new question of more than a few words."


def retained(server: Server) -> tuple[Any, ...]:
    """Everything that tells what is kept, and how it ranks."""
    server.idle()
    pool = server.runner.pool
    shown = server.get("/pool")
    return pool.entries(), pool.events(), shown["bytes"], shown["pages"], pool.state.catalog.version


# -- neither, or one of both --------------------------------------------------------------


@every_way
def test_retain_prefix_false_leaves_nothing(server: Server, path: str, how: str) -> None:
    text = fresh()
    told = ask(server, path, text, how=how, retain_prefix=False)
    assert told.key is None
    assert server.get("/pool")["entries"] == []
    assert ask(server, path, text).cached == 0
    assert ask(server, path, text, how=how, retain_prefix=False).cached > 0


@every_way
def test_allow_prefix_reuse_false_resumes_nothing(server: Server, path: str, how: str) -> None:
    text = fresh()
    ask(server, path, text)
    told = ask(server, path, text, how=how, allow_prefix_reuse=False)
    assert (told.cached, told.reuse, told.reason) == (0, "full_reset", "opted_out")
    assert told.key is not None
    assert ask(server, path, text).cached > 0


@every_way
def test_cache_prompt_false_neither_reads_nor_leaves_anything(
    server: Server, path: str, how: str
) -> None:
    known, new = fresh(), fresh()
    ask(server, path, known)
    before = retained(server)
    for text in (known, new):
        told = ask(server, path, text, how=how, cache_prompt=False)
        assert (told.cached, told.reason, told.key) == (0, "opted_out", None)
    assert retained(server) == before


def test_what_is_not_reused_is_answered_alike(server: Server) -> None:
    text = fresh()
    bodies = [server.chat(text, **more) for more in ({}, {}, {"cache_prompt": False})]
    assert [cached(body) > 0 for body in bodies] == [False, True, False]
    assert bodies[0]["choices"] == bodies[1]["choices"] == bodies[2]["choices"]


# -- a tenant's salt ----------------------------------------------------------------------


@every_way
def test_a_salt_is_a_pool_of_its_own(server: Server, path: str, how: str) -> None:
    text = fresh()
    said = [{}, {"cache_salt": "a"}, {"cache_salt": "b"}]
    first = [ask(server, path, text, how=how, **salt) for salt in said]
    again = [ask(server, path, text, how=how, **salt) for salt in said]
    assert [told.cached for told in first] == [0, 0, 0]
    assert all(told.cached > 0 for told in again)
    assert len({told.key for told in again}) == 3


# -- a hint -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["prompt_cache_key", "session_id"])
@every_way
def test_a_hint_is_never_identity(server: Server, path: str, how: str, name: str) -> None:
    text, other = fresh(), fresh()
    ask(server, path, text, how=how, **{name: "one"})
    assert ask(server, path, other, how=how, **{name: "one"}).cached == 0
    assert ask(server, path, text, how=how, **{name: "two"}).cached > 0
    assert ask(server, path, text).cached > 0


@pytest.mark.parametrize("name", ["prompt_cache_key", "session_id"])
def test_a_hint_chooses_the_lane_of_what_has_no_home(server: Server, name: str) -> None:
    path, left, right = DIALECTS[0], f"left {name}", f"right {name}"
    homes = {hint: ask(server, path, fresh(), **{name: hint}).lane for hint in (left, right)}
    assert homes[left] != homes[right]
    for hint in (left, left, right, right, left):
        assert ask(server, path, fresh(), **{name: hint}).lane == homes[hint]
    # A prompt's home comes first.
    text = fresh()
    ask(server, path, text, **{name: left})
    assert ask(server, path, text, **{name: right}).lane == homes[left]


# -- who goes first, and when -------------------------------------------------------------


@pytest.fixture(scope="module")
def two() -> Iterator[Server]:
    with serve(max_entries=2) as server:
        yield server


@every_way
def test_entries_of_a_lower_priority_go_first(two: Server, path: str, how: str) -> None:
    two.http.delete("/pool/entries")
    dear, cheap, newer = fresh(), fresh(), fresh()
    ask(two, path, dear, how=how, priority=3)
    ask(two, path, cheap, how=how, priority=-1)
    ask(two, path, newer)
    shown = two.get("/pool")["entries"]
    assert sorted(entry["priority"] for entry in shown) == [0, 3]
    assert ask(two, path, dear, how=how, priority=3).cached > 0
    gone = ask(two, path, cheap, how=how, retain_prefix=False)
    assert (gone.cached, gone.reason) == (0, "evicted")


@every_way
def test_what_is_older_than_its_time_is_not_offered(
    server: Server, clock: Clock, path: str, how: str
) -> None:
    brief, lasting = fresh(), fresh()
    ask(server, path, brief, how=how, ttl_seconds=10)
    ask(server, path, lasting)
    clock[0] += 9
    assert ask(server, path, brief, retain_prefix=False).cached > 0
    clock[0] += 2
    assert ask(server, path, brief, retain_prefix=False).cached == 0
    assert ask(server, path, lasting, retain_prefix=False).cached > 0
    assert len(server.get("/pool")["entries"]) == 1


# -- the template's switches --------------------------------------------------------------

SYSTEM = {"role": "system", "content": "You are kind. " * 8}


def parted(server: Server, *messages: Any, **fields: Any) -> str | None:
    """In which part a request parts from what is kept."""
    body = {
        "messages": [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]
    }
    found: str | None = explain(server, DIALECTS[0], {**body, **fields})["diverged_in"]
    return found


@pytest.mark.parametrize("head", [[SYSTEM], []])
def test_an_effort_changes_the_system_text(server: Server, head: list[Any]) -> None:
    text = fresh()
    server.chat(*head, text, reasoning_effort="low")
    assert parted(server, *head, text, reasoning_effort="low") is None
    assert parted(server, *head, text, reasoning_effort="high") == "system"
    for way in ({"chat_template_kwargs": {"reasoning_effort": "high"}}, {}):
        assert parted(server, *head, text, **way) in ("system", "messages[0]")
    header = explain(
        server,
        DIALECTS[0],
        {"messages": [*head, {"role": "user", "content": text}]},
        **headers_of({"reasoning_effort": "high"}),
    )
    assert header["diverged_in"] == "system"


def test_an_effort_in_anthropic_s_dialect(server: Server) -> None:
    text, path = fresh(), "/v1/messages"
    effort = {"output_config": {"effort": "high"}}
    answer = server.http.post(path, json=body_of(path, text, **effort))
    assert answer.status_code == 200, answer.text
    assert explain(server, path, body_of(path, text, **effort))["diverged_in"] is None
    other = body_of(path, text, output_config={"effort": "low"})
    assert explain(server, path, other)["diverged_in"] == "system"


@pytest.mark.parametrize(
    "off",
    [
        {"enable_thinking": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
    ],
)
def test_thinking_changes_how_the_answer_begins(server: Server, off: dict[str, Any]) -> None:
    text = fresh()
    thinking = server.chat(text)
    assert parted(server, text, **off) == "generation_prompt"
    answered = server.chat(text, **off)
    assert cached(answered) == thinking["usage"]["prompt_tokens"]
    assert answered["choices"][0]["message"]["content"]
    assert "reasoning_content" not in answered["choices"][0]["message"]


def test_thinking_that_is_kept_changes_earlier_turns(server: Server) -> None:
    text = fresh()
    answer = {"role": "assistant", "content": "Yes.", "reasoning_content": "Let me see."}
    server.chat(SYSTEM, text, answer, "And then?")
    assert (
        parted(server, SYSTEM, text, answer, "And then?", preserve_thinking=True) == "messages[2]"
    )
    kept = server.chat(SYSTEM, text, answer, "And then?", preserve_thinking=True)
    again = server.chat(SYSTEM, text, answer, "And then?", preserve_thinking=True)
    assert 0 < cached(kept) < cached(again)


def test_the_server_s_own_defaults() -> None:
    with serve({"template": {"enable_thinking": False}, "read": False}) as plain:
        body = plain.chat("Hi there.")
        assert body["choices"][0]["message"]["content"]
        assert cached(plain.chat("Hi there.")) == 0
        assert (
            "reasoning_content" in plain.chat("Hi.", enable_thinking=True)["choices"][0]["message"]
        )


def test_a_bad_wish_changes_nothing(server: Server) -> None:
    before = retained(server)
    for fields in ({"cache_salt": ""}, {"ttl_seconds": 0}, {"priority": "high"}):
        for path in DIALECTS:
            answer = server.http.post(path, json=body_of(path, fresh(), **fields))
            assert answer.status_code == 400, answer.text
            headed = server.http.post(path, json=body_of(path, fresh()), headers=headers_of(fields))
            assert headed.status_code == 400, headed.text
    assert retained(server) == before
