"""Where a chat leaves checkpoints: at what its structure declares, and where a client marks it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from tests.server.dialects import told
from tests.server.world import MODEL, Server, cached, serve

NUMBERS = count()
SYSTEM = "You are a helper who tells short stories of the sea. " * 4
TOOL = {
    "name": "weather",
    "description": "Tells what the weather will be.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
MARK = {"cache_control": {"type": "ephemeral"}}
TURNS = 10


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with serve(lanes=2) as server:
        yield server


@pytest.fixture
def server(running: Server) -> Server:
    """The server, with nothing retained."""
    running.idle()
    running.http.delete("/pool/entries")
    return running


def fresh() -> str:
    return f"Number {next(NUMBERS)} is a new question of more than a few words."


def length(server: Server, text: str) -> int:
    return len(server.runner.tokenizer.encode(text))


def points(server: Server) -> dict[int, str]:
    """The checkpoints of the one entry."""
    server.idle()
    (entry,) = server.get("/pool")["entries"]
    return {each["position"]: each["kind"] for each in entry["checkpoints"]}


def message(server: Server, **fields: Any) -> Any:
    """Ask in Anthropic's dialect; return what its answer says."""
    body = {"model": MODEL, "temperature": 0, "max_tokens": 4, **fields}
    answer = server.http.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    return told(answer.json())


# -- the chat's own -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("switch", "prologue"),
    [({"enable_thinking": False}, "<think>\n\n</think>\n\n"), ({}, "<think>\n")],
)
def test_the_points_of_a_chat(server: Server, switch: dict[str, bool], prologue: str) -> None:
    text = fresh()
    body = server.chat({"role": "system", "content": SYSTEM.strip()}, text, **switch)
    lead = f"<|im_start|>system\n{SYSTEM.strip()}<|im_end|>\n"
    history = f"{lead}<|im_start|>user\n{text}<|im_end|>\n"
    turn = f"{history}<|im_start|>assistant\n"
    wanted = {
        length(server, lead): "system",
        length(server, history): "history",
        length(server, turn): "turn",
        length(server, turn + prologue): "response",
    }
    found = points(server)
    assert {at: found.get(at) for at in wanted} == wanted
    prompt, made = body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]
    assert prompt == length(server, turn + prologue)
    assert found[prompt + made - 1] == "frontier"


def test_another_conversation_shares_tools_and_system(server: Server) -> None:
    asked = {"system": SYSTEM, "tools": [TOOL]}
    first = message(server, messages=[{"role": "user", "content": fresh()}], **asked)
    second = message(server, messages=[{"role": "user", "content": fresh()}], **asked)
    assert first.cached == 0
    assert second.reuse == "restore_system_checkpoint"
    assert second.exact
    assert second.cached > length(server, SYSTEM)
    other = {**TOOL, "description": "Tells another thing."}
    third = message(
        server, messages=[{"role": "user", "content": fresh()}], system=SYSTEM, tools=[other]
    )
    assert third.cached == 0


@pytest.mark.parametrize("head", [[{"role": "system", "content": SYSTEM}], []])
@pytest.mark.parametrize(
    ("switch", "prologue"),
    [({"enable_thinking": False}, "<think>\n\n</think>\n\n"), ({}, "<think>\n")],
)
def test_hits_stay_exact_over_many_turns(
    server: Server, head: list[Any], switch: dict[str, bool], prologue: str
) -> None:
    """Every hit gives a cold run's bits, and reuses all but the beginning of the answer before."""
    messages, message = list(head), None
    before = 0
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"{turn}: {fresh()}"})
        body = server.chat(*messages, max_tokens=4, **switch)
        if turn:
            assert cached(body) == before - length(server, prologue)
            assert body["pool"]["exact"]
            assert body["pool"]["reuse"] == "restore_turn_checkpoint"
        before = body["usage"]["prompt_tokens"]
        message = body["choices"][0]["message"]
        messages.append({"role": "assistant", "content": message["content"] or "So it was."})
    cold = server.chat(*messages[:-1], max_tokens=4, cache_prompt=False, **switch)
    assert cold["choices"][0]["message"] == message


def test_dialects_share_what_they_ask_alike(server: Server) -> None:
    """Messages, tools and calls are one text, whoever asks: a conversation may change clients."""
    text, called = fresh(), {"city": "Paris"}
    function = {"name": "weather", "arguments": json.dumps(called)}
    call = {"id": "c", "type": "function", "function": function}
    schema = {name: TOOL[name] for name in ("name", "description")}
    tool = {"type": "function", "function": {**schema, "parameters": TOOL["input_schema"]}}
    first = server.chat(
        {"role": "system", "content": SYSTEM},
        text,
        {"role": "assistant", "content": "Well.", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "fine"},
        tools=[tool],
    )
    said = [
        {"type": "thinking", "thinking": "Hm.", "signature": "s"},
        {"type": "text", "text": "Well."},
        {"type": "tool_use", "id": "c", "name": "weather", "input": called},
    ]
    second = message(
        server,
        system=SYSTEM,
        tools=[TOOL],
        messages=[
            {"role": "user", "content": text},
            {"role": "assistant", "content": said},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": "fine"}],
            },
        ],
    )
    assert cached(first) == 0
    assert second.cached == second.prompt == first["usage"]["prompt_tokens"]


@pytest.mark.parametrize("cut", [2, 4, 8])
def test_an_earlier_turn_that_is_edited_resumes_where_it_parts(server: Server, cut: int) -> None:
    messages: list[Any] = []
    for turn in range(5):
        messages.append({"role": "user", "content": f"{turn}: {fresh()}"})
        body = server.chat(*messages, max_tokens=4, enable_thinking=False)
        messages.append(body["choices"][0]["message"])
    edited = [*messages[:cut], {"role": "user", "content": fresh()}]
    again = server.chat(*edited, max_tokens=4, enable_thinking=False)
    cold = server.chat(*edited, max_tokens=4, enable_thinking=False, cache_prompt=False)
    assert cached(again) > 0
    assert again["pool"]["exact"]
    assert again["choices"] == cold["choices"]


# -- a client's marks ---------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ["openai", "anthropic"])
def test_a_mark_inside_a_message_becomes_a_checkpoint(server: Server, dialect: str) -> None:
    document = "This is a document of some length. " * 8
    shared = f"<|im_start|>user\n{document}".strip()

    def ask(text: str, *, marked: bool = True) -> Any:
        first = {"type": "text", "text": document, **(MARK if marked else {})}
        asked = {"role": "user", "content": [first, {"type": "text", "text": text}]}
        if dialect == "openai":
            return told(server.chat(asked, max_tokens=4))
        return message(server, messages=[asked])

    ask("What is it?")
    junctions = [at for at, kind in points(server).items() if kind == "junction"]
    assert len(junctions) == 1
    assert length(server, shared) <= junctions[0] <= length(server, shared) + 2
    again = ask("Whose is it, then?")
    assert (again.cached, again.exact) == (junctions[0], True)
    assert again.reuse == "restore_junction_checkpoint"
    # One who does not mark it finds it, too: it is no identity.
    assert ask("How long is it?", marked=False).cached == junctions[0]


def test_marks_at_the_end_of_tools_system_and_messages(server: Server) -> None:
    question = fresh()
    user = {"role": "user", "content": [{"type": "text", "text": question, **MARK}]}
    asked = {"system": [{"type": "text", "text": SYSTEM, **MARK}], "tools": [{**TOOL, **MARK}]}
    answer = message(server, messages=[user], **asked)
    found = points(server)
    kinds = list(found.values())
    assert kinds.count("system") == 1
    assert kinds.count("junction") == 1
    (at,) = [at for at, kind in found.items() if kind == "junction"]
    assert at == answer.prompt - length(server, "<|im_start|>assistant\n<think>\n")


def test_one_mark_for_a_whole_request(server: Server) -> None:
    answer = message(server, messages=[{"role": "user", "content": fresh()}], **MARK)
    (at,) = [at for at, kind in points(server).items() if kind == "junction"]
    assert at == answer.prompt - length(server, "<|im_start|>assistant\n<think>\n")


def test_created_tokens_are_those_that_the_next_one_reads(server: Server) -> None:
    text = fresh()
    asked = {"messages": [{"role": "user", "content": text}], "system": SYSTEM}
    first = message(server, **asked).body["usage"]
    second = message(server, **asked).body["usage"]
    unkept = message(server, **{**asked, "system": "Another. " * 9}, retain_prefix=False)
    assert first["cache_read_input_tokens"] == 0
    assert first["input_tokens"] == 0
    assert second["cache_read_input_tokens"] == first["cache_creation_input_tokens"]
    assert second["cache_creation_input_tokens"] == second["input_tokens"] == 0
    assert unkept.body["usage"]["cache_creation_input_tokens"] == 0
    assert unkept.body["usage"]["input_tokens"] == unkept.prompt


def test_more_than_four_marks_are_refused(server: Server) -> None:
    parts = [{"type": "text", "text": str(n), **MARK} for n in range(5)]
    body = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": parts}]}
    answer = server.http.post("/v1/messages", json=body)
    assert answer.status_code == 400
    assert "maximum of 4" in answer.json()["error"]["message"]
