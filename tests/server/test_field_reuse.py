"""Reuse that people missed with other engines, asked of a real server, by report number."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

from ninfer_pool.core.operations import LoadImage
from ninfer_pool.runner import Chat, Tokenizer
from ninfer_pool.runner.chat_template import ChatTemplate
from tests.server.talks import (
    ALONE,
    Talk,
    answer,
    begun,
    explained,
    prefilled,
    prompted,
    prose,
    said,
    system,
    together,
    user,
)
from tests.server.world import MODEL, Server, cached, serve

PAGE = 64


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    with serve(max_entries=2) as server:
        yield server


@pytest.fixture
def two(shared: Server) -> Iterator[Server]:
    """A server with room for two entries, empty."""
    shared.runner.pool.clear()
    yield shared
    shared.idle()


@pytest.mark.parametrize(("room", "fields"), [(2, {}), (1, {"retain_prefix": False})])
def test_field_01_a_one_shot_between_two_turns(
    room: int, fields: dict[str, Any], *, long_run: bool
) -> None:
    with serve(max_entries=room) as server:
        main = begun(server, 0, words=13_000 if long_run else 900)
        one = server.chat(prose(1, 22), enable_thinking=False, **fields)
        assert 40 <= prompted(one) <= 66
        kept = main.kept()
        assert cached(main.turn("And then?")) == kept


def titled(server: Server, *, turns: int) -> int:
    """Tokens reused by a conversation with a title request beside every turn."""
    talk = Talk(server, [system(prose(0, 120))])
    reused = 0
    for turn in range(turns):
        body = talk.turn(f"Chapter {turn}: what came next?", max_tokens=4)
        title = server.chat(f"Title of three words: {talk.messages[-2:]}", max_tokens=4)
        reused += cached(body) + cached(title)
    return reused


def test_field_02_a_title_request_beside_every_turn(two: Server, *, long_run: bool) -> None:
    turns = 27 if long_run else 9
    with serve() as endless:
        most = titled(endless, turns=turns)
    assert titled(two, turns=turns) >= 0.95 * most > 0


def test_field_03_helpers_that_quote_the_chat(wide: Server) -> None:
    talk = begun(wide, 0)
    for _ in range(2):
        path = f"/pool/entries/{talk.last['pool']['key']}"
        before = wide.get(path)["entry"]
        for task in ("Write a title", "Give three tags", "Name a question to ask next"):
            wide.chat(f"### Task: {task} for this chat.\n{talk.messages}", max_tokens=4)
        after = wide.get(path)["entry"]
        for name in ("tokens", "bytes", "hits", "checkpoints"):
            assert after[name] == before[name]
        kept = talk.kept()
        assert cached(talk.turn("And then?")) == kept


def test_field_07_a_parent_and_its_children(wide: Server) -> None:
    parent, *children = (begun(wide, number, words=100) for number in range(10, 14))
    for turn in range(3):
        kept = [child.kept() for child in children]
        assert [cached(body) for body in together(children, f"Step {turn}?")] == kept
        mine = parent.kept()
        assert cached(parent.turn(f"What did they find in step {turn}?")) == mine


@pytest.mark.parametrize("name", ["prompt_cache_key", "session_id"])
def test_field_10_a_compaction_under_the_chats_own_key(two: Server, name: str) -> None:
    hint: dict[str, Any] = {name: "main"}
    talk = begun(two, 0, **hint)
    key = talk.last["pool"]["key"]
    asked = [system(prose(1, 60)), *talk.messages[1:], user("Summarise all this.")]
    other = two.chat(*asked, enable_thinking=False, **hint)
    assert cached(other) <= 4  # what any two prompts open with
    assert key in [entry["key"] for entry in two.get("/pool")["entries"]]
    kept = talk.kept()
    body = talk.turn("And then?")
    assert (cached(body), body["pool"]["exact"]) == (kept, True)


def tool_step(number: int, thought: str | None) -> list[dict[str, Any]]:
    """A call of a tool and what it returned, as an agent appends them."""
    call = {
        "id": f"call_{number}",
        "type": "function",
        "function": {"name": "look", "arguments": f'{{"page": {number}}}'},
    }
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    if thought is not None:
        asked["reasoning_content"] = thought
    return [
        asked,
        {"role": "tool", "tool_call_id": f"call_{number}", "content": prose(number, 20 + number)},
    ]


LOOK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Reads a page",
        "parameters": {"type": "object", "properties": {"page": {"type": "integer"}}},
    },
}


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("kept", [False, True], ids=["dropped", "sent_back"])
def test_field_14_each_tool_step_prefills_its_growth(
    *, thinking: bool, kept: bool, long_run: bool
) -> None:
    """With room for one entry alone, whether the client sends back what was thought or not."""
    with serve(max_entries=1) as server:
        messages = [system(prose(0, 150)), user("Read all pages and tell me of them.")]
        before = None
        for step in range(60 if long_run else 10):
            body = server.chat(*messages, tools=[LOOK], enable_thinking=thinking, max_tokens=6)
            if before is not None:
                growth = prompted(body) - before
                assert prompted(body) - cached(body) <= growth + PAGE
            before = prompted(body)
            thought = body["choices"][0]["message"].get("reasoning_content")
            messages += tool_step(step, thought if kept else None)


EDITS: dict[str, Callable[[str], str]] = {
    "reasoning_stripped": lambda _: "The ship came home.",
    "space_trimmed": str.strip,
    "token_merged": lambda text: text + "s",
    "cut": lambda text: text[: len(text) // 2],
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("thinking", [False, True])
def test_field_15_a_tail_that_changes_resumes_at_the_turn(
    two: Server, edit: str, *, thinking: bool
) -> None:
    talk = begun(two, 0, enable_thinking=thinking)
    talk.messages[-1]["content"] = EDITS[edit](str(talk.messages[-1]["content"]))
    kept = talk.kept()
    body = talk.turn("And then?")
    assert cached(body) == kept
    assert (body["pool"]["reuse"], body["pool"]["exact"]) == ("restore_turn_checkpoint", True)


@pytest.mark.parametrize("failures", [1, 1000], ids=["once", "always"])
def test_field_20_a_failed_restore_leaves_the_answer_right(wide: Server, failures: int) -> None:
    talk, other = begun(wide, 0), begun(wide, 1)
    inner, left = wide.runner.slab.execute, itertools.count(failures, -1)

    def execute(operations: Any) -> None:
        listed = list(operations)
        if any(isinstance(each, LoadImage) for each in listed) and next(left) > 0:
            raise RuntimeError("the copy failed")
        inner(listed)

    before = wide.runner.pool.stats().counters.quarantined
    with mock.patch.object(wide.runner.slab, "execute", execute), prefilled(wide) as chunks:
        body = talk.turn("And then?")
    assert wide.runner.pool.stats().counters.quarantined > before
    assert sum(chunks) == prompted(body) - cached(body)
    if failures > 1:
        assert cached(body) == 0
    cold = wide.chat(*talk.messages[:-1], enable_thinking=False, **ALONE)
    assert (answer(body), body["pool"]["exact"]) == (answer(cold), True)
    for each in (talk, other):  # nothing else is lost, and what failed is made anew
        kept = each.kept()
        assert cached(each.turn("And what then?")) == kept


TOOLS_FIRST = (
    "<|im_start|>system\n{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{{ messages[0].content }}<|im_end|>\n"
    "{% for each in messages[1:] %}<|im_start|>{{ each.role }}\n{{ each.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def tools_first(two: Server) -> Iterator[Server]:
    """The same model under a template that tells the tools before the system text."""
    inner = two.runner.tokenizer.inner
    chat = Chat(Tokenizer(inner, chat_template=ChatTemplate(TOOLS_FIRST)))
    with mock.patch.object(two.service, "chat", chat):
        yield two


def look(number: int) -> dict[str, Any]:
    """A tool as Anthropic's clients declare it."""
    schema = {"type": "object", "properties": {"page": {"type": "integer"}}}
    return {"name": f"look_{number}", "description": prose(number, 40), "input_schema": schema}


def at(second: int) -> str:
    """System text with a first line that is another each time."""
    return f"Now: {second * 7919 % 86_400}.\n" + prose(0, 80)


def test_field_21_tools_before_a_volatile_line_are_reused_where_they_are_marked(
    tools_first: Server,
) -> None:
    tools = [look(1), {**look(2), "cache_control": {"type": "ephemeral"}}]
    counts = []
    for second in (1, 2, 3):
        body = {
            "model": MODEL,
            "max_tokens": 4,
            "system": at(second),
            "tools": tools,
            "messages": [user("Hello.")],
        }
        found = tools_first.http.post("/v1/messages", json=body).json()
        counts.append(found["usage"]["cache_read_input_tokens"])
    asked = tools_first.runner.tokenizer.encode(f"{at(1)}<|im_end|>\n<|im_start|>user\nHello.")
    assert counts[0] == 0
    assert counts[1] == counts[2] > len(asked)


def test_field_21_without_marks_the_line_is_named_and_the_third_request_profits(
    tools_first: Server,
) -> None:
    tools = [
        {"type": "function", "function": {"name": each["name"], "parameters": each["input_schema"]}}
        for each in (look(1), look(2))
    ]
    fields = {"tools": tools, "enable_thinking": False}
    first = tools_first.chat(system(at(1)), "Hello.", **fields)
    seen = explained(tools_first, system(at(2)), "Hello.", **fields)
    line = prompted(first) - len(tools_first.runner.tokenizer.encode(at(1)))
    assert seen["diverged_in"] == "system"
    assert 0 < seen["diverged_at"] <= line
    bodies = [tools_first.chat(system(at(n)), "Hello.", **fields) for n in (2, 3)]
    assert [cached(body) for body in bodies] == [0, seen["diverged_at"]]


def test_field_21_a_volatile_line_before_everything_is_named(two: Server) -> None:
    two.chat(system(at(1)), "Hello.")
    seen = explained(two, system(at(2)), "Hello.")
    assert (seen["resumable"], seen["diverged_in"]) == (0, "system")
    assert 3 <= seen["diverged_at"] <= 12
    assert f"the same token at {seen['diverged_at']} as before" in " ".join(seen["helps"])
    two.chat(system(at(2)), "Hello.")
    told = two.get("/pool")["requests"][0]
    assert (told["parted_at"], told["parted_in"]) == (seen["diverged_at"], "system")


def test_field_22_tools_in_another_order_each_turn(two: Server) -> None:
    talk = Talk(two, [system("You are a helper.")])
    tools = [
        {"type": "function", "function": {**LOOK["function"], "name": f"look_{n}"}}
        for n in range(4)
    ]
    for turn, order in enumerate(itertools.islice(itertools.permutations(tools), 0, 24, 5)):
        asked = [*talk.messages, user(f"Chapter {turn}?")]
        seen = explained(two, *asked, tools=order, enable_thinking=False)
        body = talk.turn(f"Chapter {turn}?", tools=order)
        if turn == 1:
            assert (cached(body), body["pool"]["reason"]) == (0, "diverged")
        if turn:
            assert seen["diverged_in"] == "system"
            assert 0 <= cached(body) <= seen["diverged_at"]
        cold = two.chat(*asked, tools=order, enable_thinking=False, **ALONE)
        assert answer(body) == answer(cold)


def test_field_23_a_message_that_is_never_sent_again(wide: Server) -> None:
    """A proxy appends a reminder to every prompt, and the next prompt comes without it."""
    talk = Talk(wide, [system(prose(0, 100))])
    lengths: list[int] = []
    for turn in range(6):
        asked = [*talk.messages, user(f"Chapter {turn}? " + prose(turn, 20))]
        sent = [*asked, user(f"Reminder {turn}: be short.")]
        seen = explained(wide, *sent, enable_thinking=False)
        body = wide.chat(*sent, enable_thinking=False)
        if turn:  # the two part in the reminder, which the next prompt replaces by an answer
            assert seen["diverged_in"] == f"messages[{2 * turn}]"
            assert seen["matched"] < lengths[-1]
        if turn > 1:  # the point where the last two parted was noticed
            assert cached(body) >= lengths[-2] - PAGE
        cold = wide.chat(*sent, enable_thinking=False, **ALONE)
        assert answer(body) == answer(cold)
        lengths.append(prompted(body))
        talk.messages = [*asked, said(body)]
