"""What the issue that began all this saw, asked of a real server over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.world import Server, cached, serve

SHORT = "Hi there."
OTHER = "Tell me of the weather in the north, and of the sea."
TITLE = "Write a title of three words for this conversation: "
SYSTEM = {"role": "system", "content": "You are a helper who tells short stories. " * 6}


@pytest.fixture
def two() -> Iterator[Server]:
    with serve(max_entries=2) as server:
        yield server


@pytest.fixture
def today() -> Iterator[Server]:
    """One lane that keeps what it ran last, and no pool."""
    with serve({"single_lane": True}, max_entries=1, policy="lru") as server:
        yield server


def reuse(body: dict[str, Any]) -> str:
    return str(body["pool"]["reuse"])


def test_the_same_short_request_twice_is_reused_but_for_its_answer(two: Server) -> None:
    first = two.chat(SHORT, enable_thinking=False)
    again = two.chat(SHORT, enable_thinking=False)
    assert cached(first) == 0
    assert cached(again) >= again["usage"]["prompt_tokens"] - 4
    assert reuse(first) == "full_reset"
    assert reuse(again) in (
        "restore_turn_checkpoint",
        "restore_response_checkpoint",
        "append_frontier",
    )
    assert again["choices"][0]["message"] == first["choices"][0]["message"]


def test_a_b_a_a_with_one_lane_and_no_pool(today: Server) -> None:
    counts = [cached(today.chat(text)) for text in (SHORT, OTHER, SHORT, SHORT)]
    assert counts[:3] == [0, 0, 0]
    assert counts[3] > 0


def test_a_b_a_a_with_room_for_two(two: Server) -> None:
    counts = [cached(two.chat(text)) for text in (SHORT, OTHER, SHORT, SHORT)]
    assert counts[:2] == [0, 0]
    assert min(counts[2:]) > 0


def test_a_second_turn_reuses_all_but_the_reply(two: Server) -> None:
    first = two.chat(SYSTEM, SHORT, enable_thinking=False)
    reply = first["choices"][0]["message"]["content"]
    second = two.chat(
        SYSTEM, SHORT, {"role": "assistant", "content": reply}, "And then?", enable_thinking=False
    )
    # The prologue before the reply is written only before the newest one.
    prologue = len(two.runner.tokenizer.encode("<think>\n\n</think>\n\n"))
    assert cached(second) == first["usage"]["prompt_tokens"] - prologue
    assert second["pool"]["exact"]


def conversation(server: Server, *, turns: int, title: dict[str, Any] | None = None) -> int:
    """Tokens reused by the turns of a conversation; ``title``: fields of a helper beside each."""
    messages: list[dict[str, Any]] = [SYSTEM]
    reused = 0
    for turn in range(turns):
        messages.append({"role": "user", "content": f"Chapter {turn}: what happened next?"})
        body = server.chat(*messages, max_tokens=4, enable_thinking=False)
        reused += cached(body)
        messages.append({"role": "assistant", "content": body["choices"][0]["message"]["content"]})
        if title is not None:
            server.chat(TITLE + str(messages[-2:]), max_tokens=4, **title)
    return reused


@pytest.fixture(scope="module")
def undisturbed() -> int:
    with serve(max_entries=2) as server:
        return conversation(server, turns=20)


def test_a_title_request_beside_every_turn_costs_the_conversation_nothing(
    two: Server, undisturbed: int
) -> None:
    assert conversation(two, turns=20, title={}) >= 0.95 * undisturbed > 0


def test_titles_that_leave_nothing_need_no_room_of_their_own(undisturbed: int) -> None:
    with serve(max_entries=1) as server:
        reused = conversation(server, turns=20, title={"retain_prefix": False})
        assert reused >= 0.95 * undisturbed


def test_a_conversation_is_one_entry_however_many_turns_it_has() -> None:
    with serve() as server:
        conversation(server, turns=6)
        assert len(server.get("/pool")["entries"]) == 1


def test_with_one_lane_and_no_pool_titles_cost_everything(today: Server) -> None:
    assert conversation(today, turns=4, title={"retain_prefix": False}) == 0


def test_the_panel_counts_what_the_answers_said(two: Server) -> None:
    bodies = [two.chat(text) for text in (SHORT, SHORT, OTHER, SHORT)]
    two.idle()
    told = two.get("/metrics")
    assert told["live"]["cache_hit_tokens"] == sum(map(cached, bodies)) > 0
    assert told["last"]["cache_hit_tokens"] == cached(bodies[-1])
