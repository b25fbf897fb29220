"""The scenarios: the requests of everyday clients and their order.

A script yields one request after the other and receives each answer, like a client that keeps the
conversation itself. The shipped model calls no tools, so the calls of agents are written here;
all other text of an assistant's message is the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, replace
from typing import Any

from ninfer_pool.demo import texts

Message = dict[str, Any]
ANSWER_TOKENS, SUMMARY_TOKENS = 6, 24


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
        yield ScriptedRequest(label=label, messages=(_user(texts.GREETING),))


def alternate(_: Size) -> Script:
    """Yield A, B, A, A."""
    passages = dict(zip("AB", texts.PASSAGES, strict=False))
    for label in "ABAA":
        yield ScriptedRequest(
            label=label, messages=(_user(f"{passages[label]}\n\n{texts.QUESTION}"),)
        )


def turns(size: Size) -> Script:
    """Yield a conversation alone."""
    messages = [_system(texts.COMPANION)]
    for number, passage in enumerate(texts.PASSAGES[: size.turns], 1):
        messages.append(_user(f"{passage}\n\n{texts.QUESTION}"))
        answer = yield ScriptedRequest(label=f"turn {number}", messages=tuple(messages))
        messages.append(_assistant(answer))


def titled(size: Size, *, retain: bool = True) -> Script:
    """Yield the same conversation, with a request for a title after each turn."""
    conversation = turns(size)
    turn = next(conversation)
    for number in range(1, size.turns + 1):
        answer = yield turn
        begins = _user(f"{texts.PASSAGES[number - 1]}\n\n{answer}")
        messages = (_system(texts.TITLE), begins)
        yield ScriptedRequest(label=f"title {number}", messages=messages, retain=retain)
        if number < size.turns:
            turn = conversation.send(answer)


def titled_unretained(size: Size) -> Script:
    """Yield the same again, the title requests with ``retain_prefix: false``."""
    return titled(size, retain=False)


def agents(size: Size) -> Script:
    """Yield the steps of a parent agent, each followed by a step of three sub-agents."""
    editor = [_system(texts.EDITOR), _user(texts.TASK)]
    readers = [[_system(texts.READER), _user(f"Look for {work}.")] for work in texts.CHAPTERS]
    pages = iter(texts.PASSAGES * size.steps)
    for step in range(1, size.steps + 1):
        answer = yield ScriptedRequest(
            label=f"parent {step}", messages=tuple(editor), tools=texts.EDITOR_TOOLS
        )
        calls = [_call("assign", reader=str(n), work=f"page {step}") for n in (1, 2, 3)]
        editor.append(_assistant(answer, *calls))
        for number, (messages, page) in enumerate(zip(readers, pages, strict=False), 1):
            found = yield ScriptedRequest(
                label=f"sub-agent {number}, {step}",
                messages=tuple(messages),
                tools=texts.READER_TOOLS,
            )
            messages += [_assistant(found, _call("turn_page", chapter=str(step))), _tool(page)]
            editor.append(_tool(f"Reader {number}: {found}"))
    yield ScriptedRequest(label="parent, end", messages=tuple(editor), tools=texts.EDITOR_TOOLS)


def compaction(size: Size) -> Script:
    """Yield a conversation that its client shortens to a summary half-way."""
    messages = [_system(texts.COMPANION)]
    passages = list(reversed(texts.PASSAGES))[: size.turns]
    summary = ""
    for number, passage in enumerate(passages, 1):
        messages.append(_user(f"{summary}{passage}\n\n{texts.QUESTION}"))
        answer = yield ScriptedRequest(label=f"turn {number}", messages=tuple(messages))
        messages.append(_assistant(answer))
        summary = ""
        if number == size.turns // 2:
            short = yield ScriptedRequest(
                label="compaction",
                messages=(*messages, _user(texts.COMPACT)),
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


SCENARIOS = (
    Scenario(
        name="repeat",
        title="same request twice",
        script=repeat,
        happens="a short request, and the very same once more.",
    ),
    Scenario(
        name="alternate",
        title="A, B, A, A",
        script=alternate,
        happens="a request A, another one, B, then A again, twice.",
    ),
    Scenario(
        name="turns",
        title="turns without titles",
        script=turns,
        means="the conversation of table 3, without the requests for titles.",
    ),
    Scenario(
        name="titles",
        title="turns with titles",
        script=titled,
        happens="after each turn of a conversation its client requests a title.",
    ),
    Scenario(
        name="titles_unretained",
        title="titles not retained",
        script=titled_unretained,
        means="table 3 again, its requests for titles with retain_prefix: false.",
    ),
    Scenario(
        name="agents",
        title="sub-agents",
        script=agents,
        happens="after each step of an agent with tools, three others take a step each.",
    ),
    Scenario(
        name="compaction",
        title="compaction",
        script=compaction,
        happens="half-way a conversation is summed up and goes on from its summary.",
    ),
    Scenario(
        name="together",
        title="all at once",
        script=together,
        means="the requests of tables 1 to 5, one of each in turn.",
    ),
)


def _system(text: str) -> Message:
    return {"role": "system", "content": text}


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str, *calls: Message) -> Message:
    return {"role": "assistant", "content": text, "tool_calls": list(calls) or None}


def _tool(text: str) -> Message:
    return {"role": "tool", "content": text}


def _call(name: str, **arguments: str) -> Message:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}
