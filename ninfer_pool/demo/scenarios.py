"""The scenarios: the requests of everyday clients and their order.

A script yields one request after the other and receives each answer, like a client that keeps the
conversation itself. The shipped model calls no tools, so the calls of agents are written here;
all other text of an assistant's message is the model's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from typing import Any, Final

Message = dict[str, Any]
ANSWER_TOKENS, SUMMARY_TOKENS = 6, 24
TEXTS: Final[dict[str, Any]] = json.loads(
    (files("ninfer_pool.demo") / "texts.json").read_text(encoding="utf-8")
)
"""The texts of the demo's people, clients, tools and tables; the passages are Jane Austen's."""
QUESTION: Final[str] = TEXTS["question"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedRequest:
    """One chat request; ``retain`` False leaves no entry of it in the pool."""

    label: str
    messages: tuple[Message, ...]
    tools: tuple[Message, ...] = ()
    retain: bool = True
    max_tokens: int = ANSWER_TOKENS


Script = Generator[ScriptedRequest, str, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The length of the scenarios."""

    turns: int = 8
    steps: int = 3


FULL, QUICK = Size(), Size(turns=3, steps=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A script and its description; without ``happens`` it is a comparison."""

    name: str
    title: str
    script: Callable[[Size], Script]
    happens: str = ""
    means: str = ""


def repeat(_: Size) -> Script:
    """Yield the same short request twice."""
    for label in ("first time", "second time"):
        yield ScriptedRequest(label=label, messages=(_message("user", TEXTS["greeting"]),))


def alternate(_: Size) -> Script:
    """Yield A, B, A, A."""
    passages = dict(zip("AB", TEXTS["passages"], strict=False))
    for label in "ABAA":
        yield ScriptedRequest(
            label=label, messages=(_message("user", f"{passages[label]}\n\n{QUESTION}"),)
        )


def turns(size: Size) -> Script:
    """Yield a conversation alone."""
    messages = [_message("system", TEXTS["companion"])]
    for number, passage in enumerate(TEXTS["passages"][: size.turns], 1):
        messages.append(_message("user", f"{passage}\n\n{QUESTION}"))
        answer = yield ScriptedRequest(label=f"turn {number}", messages=tuple(messages))
        messages.append(_assistant(answer))


def titled(size: Size, *, retain: bool = True) -> Script:
    """Yield the same conversation, with a request for a title after each turn, retained or not."""
    conversation = turns(size)
    turn = next(conversation)
    for number in range(1, size.turns + 1):
        answer = yield turn
        passage = TEXTS["passages"][number - 1]
        begins = _message("user", f"{passage}\n\n{answer}")
        messages = (_message("system", TEXTS["title"]), begins)
        yield ScriptedRequest(label=f"title {number}", messages=messages, retain=retain)
        if number < size.turns:
            turn = conversation.send(answer)


def agents(size: Size) -> Script:
    """Yield the steps of a parent agent, each followed by a step of three sub-agents."""
    editor = [_message("system", TEXTS["editor"]), _message("user", TEXTS["task"])]
    readers = [
        [_message("system", TEXTS["reader"]), _message("user", f"Look for {work}.")]
        for work in TEXTS["chapters"]
    ]
    tools = tuple(TEXTS["editor_tools"])
    pages = iter(TEXTS["passages"] * size.steps)
    for step in range(1, size.steps + 1):
        answer = yield ScriptedRequest(label=f"parent {step}", messages=tuple(editor), tools=tools)
        calls = [_call("assign", reader=str(n), work=f"page {step}") for n in (1, 2, 3)]
        editor.append(_assistant(answer, *calls))
        for number, (messages, page) in enumerate(zip(readers, pages, strict=False), 1):
            found = yield ScriptedRequest(
                label=f"sub-agent {number}, {step}",
                messages=tuple(messages),
                tools=tuple(TEXTS["reader_tools"]),
            )
            messages += [
                _assistant(found, _call("turn_page", chapter=str(step))),
                _message("tool", page),
            ]
            editor.append(_message("tool", f"Reader {number}: {found}"))
    yield ScriptedRequest(label="parent, end", messages=tuple(editor), tools=tools)


def compaction(size: Size) -> Script:
    """Yield a conversation that its client shortens to a summary half-way."""
    messages = [_message("system", TEXTS["companion"])]
    passages = list(reversed(TEXTS["passages"]))[: size.turns]
    summary = ""
    for number, passage in enumerate(passages, 1):
        messages.append(_message("user", f"{summary}{passage}\n\n{QUESTION}"))
        answer = yield ScriptedRequest(label=f"turn {number}", messages=tuple(messages))
        messages.append(_assistant(answer))
        summary = ""
        if number == size.turns // 2:
            short = yield ScriptedRequest(
                label="compaction",
                messages=(*messages, _message("user", TEXTS["compact"])),
                max_tokens=SUMMARY_TOKENS,
            )
            messages, summary = messages[:1], f"We have spoken before, in short: {short}\n\n"


def together(size: Size) -> Script:
    """Yield all of the above at once: one request of each in turn."""
    scripts: list[Callable[[Size], Script]] = [repeat, alternate, titled, agents, compaction]
    return _in_turn([script(size) for script in scripts])


def _in_turn(scripts: Iterable[Script]) -> Script:
    going = [(number, script, next(script)) for number, script in enumerate(scripts, 1)]
    while going:
        later = []
        for number, script, request in going:
            answer = yield replace(request, label=f"{number}: {request.label}")
            try:
                later.append((number, script, script.send(answer)))
            except StopIteration:
                continue
        going = later


SCRIPTS: dict[str, Callable[[Size], Script]] = {
    "repeat": repeat,
    "alternate": alternate,
    "turns": turns,
    "titles": titled,
    "titles_unretained": partial(titled, retain=False),
    "agents": agents,
    "compaction": compaction,
    "together": together,
}
SCENARIOS = tuple(
    Scenario(name=name, script=script, **TEXTS["scenarios"][name])
    for name, script in SCRIPTS.items()
)


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _assistant(text: str, *calls: Message) -> Message:
    return {"role": "assistant", "content": text, "tool_calls": list(calls) or None}


def _call(name: str, **arguments: str) -> Message:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}
