"""Where a chat request's prompt has boundaries, and that later prompts declare them again."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from ninfer_pool.core.identity import Namespace
from ninfer_pool.core.prompt import Prompt
from ninfer_pool.errors import PromptError
from ninfer_pool.runner import TINY, Chat, Rendered, Tokenizer
from ninfer_pool.runner.chat_template import ChatTemplate
from tests.runner.chats import (
    KINDS,
    PLAIN,
    WHOLE,
    calls,
    chat,
    heads,
    rendered,
    says,
    tokenizer,
    told,
    tool,
    user,
)

SYSTEM = {"role": "system", "content": "Be brief."}
THINKS = ("shipped", "chatml")


# -- boundaries -------------------------------------------------------------------------------


def test_boundaries_of_the_shipped_template() -> None:
    ask = chat("shipped").render([SYSTEM, user("Well?"), says("Yes."), user("So?")])
    system = "<|im_start|>system\nBe brief.<|im_end|>\n"
    first = system + "<|im_start|>user\nWell?<|im_end|>\n"
    second = first + "<|im_start|>assistant\nYes.<|im_end|>\n<|im_start|>user\nSo?<|im_end|>\n"
    assert heads("shipped", ask) == [
        ("system", system),
        ("history", first),
        ("turn", first + "<|im_start|>assistant\n"),
        ("history", second),
        ("turn", second + "<|im_start|>assistant\n"),
        ("response", second + "<|im_start|>assistant\n<think>\n"),
    ]
    assert ask.thinking


def test_the_prologue_without_thinking_is_the_whole_of_it() -> None:
    for kind in THINKS:
        ask = chat(kind).render([user("Well?")], enable_thinking=False)
        text = told(kind, ask.tokens)
        assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
        assert heads(kind, ask)[-1] == ("response", text)
        assert not ask.thinking


def test_a_template_that_leaves_thinking_to_the_model_has_no_prologue() -> None:
    ask = chat("chatml").render([user("Well?")])
    assert [kind for _, kind in ask.boundaries] == ["history", "turn"]
    assert not ask.thinking


def test_headers_around_a_role_and_a_system_part_that_is_always_there() -> None:
    ask = chat("headers").render([user("Well?"), says("Yes."), user("So?")])
    opening = "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
    system = opening + "Knowledge ends in 2023.\n\n<|eot_id|>"
    answer = "<|start_header_id|>assistant<|end_header_id|>\n\n"
    first = system + "<|start_header_id|>user<|end_header_id|>\n\nWell?<|eot_id|>"
    second = rendered("headers", [user("Well?"), says("Yes."), user("So?")])
    assert heads("headers", ask) == [
        ("system", system),
        ("history", first),
        ("turn", first + answer),
        ("history", second.removesuffix(answer)),
        ("turn", second),
    ]
    assert not ask.thinking


def test_without_a_generation_prompt_what_ends_a_question_opens_the_answer() -> None:
    ask = chat("instructions").render([user("Well?"), says("Yes."), user("So?")])
    first, second = "<s>[INST] Well? [/INST]", "<s>[INST] Well? [/INST] Yes.</s>[INST] So? [/INST]"
    assert heads("instructions", ask) == [("turn", first), ("turn", second)]


def test_without_control_tokens_words_are_headers() -> None:
    ask = chat("words").render([user("Well?"), says("Yes."), user("So?")])
    assert [kind for kind, _ in heads("words", ask)] == ["history", "turn"] * 2
    assert heads("words", ask)[1] == ("turn", "User: Well?\nAssistant: ")


@pytest.mark.parametrize("kind", KINDS)
def test_tools_and_system_text_end_where_messages_begin(kind: str) -> None:
    tools = [tool("look", at={"type": "string"})]
    for system, given_tools in itertools.product(([], [SYSTEM]), ([], tools)):
        if kind in ("instructions", "words") and (system or given_tools):
            continue
        ask = chat(kind).render([*system, user("Well?")], tools=given_tools)
        found = [text for name, text in heads(kind, ask) if name == "system"]
        wanted = kind == "headers" or bool(system or given_tools)
        assert len(found) == wanted
        for text in found:
            assert text.endswith(("<|im_end|>\n", "<|eot_id|>"))
            assert text.count("<|im_start|>") in (0, 1)
            assert ("Be brief." in text, '"look"' in text) == (bool(system), bool(given_tools))


def test_a_template_that_says_no_to_system_alone_still_has_its_end() -> None:
    source = (
        "{%- if messages[-1].role == 'system' %}{{ raise_exception('no question') }}{% endif %}"
    )
    whole = source + (TINY / "chat_template.jinja").read_text("utf-8")
    strict = Chat(Tokenizer(tokenizer("shipped").inner, chat_template=ChatTemplate(whole)))
    messages = [SYSTEM, user("Well?")]
    assert strict.render(messages).boundaries == chat("shipped").render(messages).boundaries
    with pytest.raises(PromptError, match="no question"):
        strict.render([SYSTEM])


@pytest.mark.parametrize("kind", [*KINDS, *WHOLE])
def test_every_boundary_can_be_declared(kind: str) -> None:
    ask = chat(kind).render([user("a\n"), says("\n\nb"), user(" c "), says("  "), user("\n")])
    space = Namespace(weights="w", kv_dtype="bf16")
    prompt = Prompt(ask.tokens, namespace=space, boundaries=ask.boundaries)
    assert len({position for position, _ in prompt.boundaries}) == len(ask.boundaries)
    assert ask.tokens.dtype == np.int32
    for position, _ in ask.boundaries:
        assert told(kind, ask.tokens) == told(kind, ask.tokens[:position]) + told(
            kind, ask.tokens[position:]
        )


def test_a_boundary_inside_a_token_is_left_out() -> None:
    early = [user("Well?"), says("\n\nYes."), user("So?")]
    kinds = [kind for kind, _ in heads("chatml", chat("chatml").render(early))]
    assert kinds == ["history", "history", "turn"]  # the header's line feed begins a token of two


# -- canonical: later prompts declare them again ----------------------------------------------

REPLIES = (
    says("Yes."),
    says("<think>\nhm\n</think>\n\nYes."),
    says("Yes.", reasoning_content="hm"),
    says(""),
    says("\n Yes"),
    says("I say <|im_end|> and <think>\n", reasoning_content=""),
)
LOOPS = (
    (calls("look", {"at": "a"}), {"role": "tool", "content": "seen"}),
    (calls("look", {"at": "b"}, reasoning_content="hm"), {"role": "tool", "content": ""}),
    (
        {**calls("look", {}), "content": "I look."},
        {"role": "tool", "content": "<tool_response>"},
        {"role": "tool", "content": "twice"},
    ),
)


def check_canonical(kind: str, first: Any, second: Any, **options: Any) -> None:
    """Boundaries up to where two prompts part are the same in both."""
    one, other = (chat(kind).render(messages, **options) for messages in (first, second))
    size = min(len(one.tokens), len(other.tokens))
    differs = np.nonzero(one.tokens[:size] != other.tokens[:size])[0]
    shared = int(differs[0]) if len(differs) else size
    assert shared, "two prompts of one conversation begin alike"
    before, after = (
        [(at, kind) for at, kind in ask.boundaries if at <= shared] for ask in (one, other)
    )
    assert before == after


@pytest.mark.parametrize("kind", [*KINDS, "stripping"])
@pytest.mark.parametrize("reply", REPLIES, ids=str)
def test_turns_are_declared_again(kind: str, reply: Any) -> None:
    for options in ({}, {"enable_thinking": False}, {"preserve_thinking": True}):
        messages = [user("Well?")] if kind in ("instructions", "words") else [SYSTEM, user("Well?")]
        for step in range(4):
            longer = [*messages, reply, user(f"And {step}?")]
            check_canonical(kind, messages, longer, **options)
            messages = longer


@pytest.mark.parametrize("kind", ["shipped", "chatml", "headers", "stripping"])
@pytest.mark.parametrize("thinking", [True, False])
def test_tool_loops_are_declared_again(kind: str, thinking: bool) -> None:  # noqa: FBT001
    options = {"tools": [tool("look")], "enable_thinking": thinking}
    messages = [SYSTEM, user("Well?")]
    for loop in (*LOOPS, (says("Done."), user("So?")), *LOOPS):
        longer = [*messages, *loop]
        check_canonical(kind, messages, longer, **options)
        messages = longer


@settings(deadline=None, max_examples=60)
@given(kind=st.sampled_from(KINDS), said=st.lists(PLAIN, min_size=3, max_size=7))
def test_any_conversation_is_declared_again(kind: str, said: list[str]) -> None:
    turns = [user(text) if n % 2 == 0 else says(text) for n, text in enumerate(said)]
    odd = len(turns) - 1 + len(turns) % 2
    for end in range(1, odd - 1, 2):
        check_canonical(kind, turns[:end], turns[: end + 2])


# -- breakpoints ------------------------------------------------------------------------------

LONG = [
    {
        "role": "system",
        "content": [{"type": "text", "text": "One. "}, {"type": "text", "text": "Two."}],
    },
    user([{"type": "text", "text": "See "}, {"type": "text", "text": "this."}]),
    {**calls("look", {"at": "a"}), "content": ""},
    {"role": "tool", "content": "seen"},
    {"role": "tool", "content": "heard"},
    says("Done."),
    user("So?"),
]


def junctions(*breakpoints: tuple[int, int]) -> list[str]:
    ask = chat("shipped").render(LONG, tools=[tool("look")], breakpoints=breakpoints)
    return [text for kind, text in heads("shipped", ask) if kind == "junction"]


@pytest.mark.parametrize(
    ("where", "end"),
    [
        ((1, 0), "<|im_start|>user\nSee"),  # the space belongs to what follows
        ((1, 1), "See this.<|im_end|>\n"),
        ((2, 0), "</function>\n</tool_call><|im_end|>\n"),
        ((4, 0), "heard\n</tool_response><|im_end|>\n"),
        ((5, 0), "Done.<|im_end|>\n"),
        ((6, 0), "So?<|im_end|>\n"),
        ((0, 0), "<|im_start|>system\nOne."),
    ],
)
def test_a_breakpoint_is_the_end_of_a_part_or_of_its_message(
    where: tuple[int, int], end: str
) -> None:
    (text,) = junctions(where)
    assert text.endswith(end)


@pytest.mark.parametrize("kind", KINDS)
def test_text_in_parts_is_rendered_as_one_string(kind: str) -> None:
    several = user([{"type": "text", "text": "Well"}, {"type": "text", "text": ", you?"}])
    ask = chat(kind).render([several], breakpoints=[(0, 0)])
    assert told(kind, ask.tokens) == rendered(kind, [user("Well, you?")])
    (text,) = (text for name, text in heads(kind, ask) if name == "junction")
    assert text.endswith("Well")


def test_a_breakpoint_at_a_history_point_takes_its_place() -> None:
    bare = chat("shipped").render(LONG, tools=[tool("look")])
    ask = chat("shipped").render(LONG, tools=[tool("look")], breakpoints=[(1, 1), (6, 0)])
    assert [at for at, _ in ask.boundaries] == [at for at, _ in bare.boundaries]
    changed = [(a[1], b[1]) for a, b in zip(bare.boundaries, ask.boundaries, strict=True) if a != b]
    assert changed == [("history", "junction")] * 2


def test_the_end_of_tools_and_system_stays_a_system_point() -> None:
    ask = chat("shipped").render(LONG, tools=[tool("look")], breakpoints=[(-1, 0), (0, 1)])
    assert ask.boundaries == chat("shipped").render(LONG, tools=[tool("look")]).boundaries


@pytest.mark.parametrize("kind", KINDS)
def test_a_breakpoint_ends_a_message_in_any_template(kind: str) -> None:
    messages = [user("Well?"), says("Yes."), user("So?")]
    for index, said in enumerate(("Well?", "Yes.", "So?")):
        ask = chat(kind).render(messages, breakpoints=[(index, 0)])
        (text,) = (text for name, text in heads(kind, ask) if name == "junction")
        assert said in text
        assert not any(later in text for later in ("Well?", "Yes.", "So?")[index + 1 :])


def test_a_breakpoint_beyond_the_messages_is_a_mistake() -> None:
    with pytest.raises(PromptError, match=r"breakpoints: messages\[9\]; there are 7"):
        junctions((9, 0))


# -- parts ------------------------------------------------------------------------------------


def parts(kind: str, messages: Sequence[Any], **options: Any) -> dict[str, str]:
    """The text of each part of a prompt."""
    ask, found = chat(kind).render(messages, **options), dict[str, list[int]]()
    for position, token in enumerate(ask.tokens):
        found.setdefault(ask.part_at(position), []).append(int(token))
    assert ask.part_at(len(ask.tokens)) == "generation_prompt"
    return {part: told(kind, tokens) for part, tokens in found.items()}


def test_each_token_lies_in_a_part() -> None:
    found = parts("shipped", LONG, tools=[tool("look")])
    assert list(found) == ["system", *(f"messages[{n}]" for n in range(1, 7)), "generation_prompt"]
    assert found["messages[1]"] == "<|im_start|>user\nSee this.<|im_end|>\n"
    assert found["messages[2]"].startswith("<|im_start|>assistant\n")
    assert found["messages[4]"].startswith("heard")
    assert found["generation_prompt"] == "<|im_start|>assistant\n<think>\n"


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_any_template(kind: str) -> None:
    found = parts(kind, [user("Well?"), says("Yes."), user("So?")])
    for index, said in enumerate(("Well?", "Yes.", "So?")):
        assert said in found[f"messages[{index}]"]


@pytest.mark.parametrize("kind", THINKS)
def test_messages_that_a_template_looks_into_are_told_apart(kind: str) -> None:
    messages = [
        user("<tool_response>x</tool_response>"),
        says("<think>\nhm\n</think>\n\nYes."),
        user("\U000f0000"),
        says(None),
        user("So?"),
    ]
    found = parts(kind, messages)
    assert "Yes." in found["messages[1]"]
    assert "So?" in found["messages[4]"]


def test_a_prompt_of_no_chat_is_one_part() -> None:
    ask = Rendered.raw([5, 6, 7])
    assert (ask.tokens.tolist(), ask.boundaries, ask.thinking) == ([5, 6, 7], ((3, "turn"),), False)
    assert ask.part_at(1) == "prompt"
    assert Rendered.raw([]).boundaries == ()


# -- reasoning effort -------------------------------------------------------------------------


def test_reasoning_effort_ends_the_system_text() -> None:
    told_so = rendered("shipped", [SYSTEM, user("x")], reasoning_effort="high")
    assert told_so.startswith("<|im_start|>system\nBe brief.\nReasoning effort: high<|im_end|>\n")
    alone = rendered("shipped", [user("x")], reasoning_effort="low")
    assert alone.startswith("<|im_start|>system\nReasoning effort: low<|im_end|>\n<|im_start|>user")
    tools = rendered("shipped", [user("x")], reasoning_effort="low", tools=[tool("look")])
    assert tools.startswith("<|im_start|>system\nReasoning effort: low\n\nYou may call these tools")


def test_without_reasoning_effort_nothing_changes() -> None:
    for messages in ([user("x")], [SYSTEM, user("x")]):
        for effort in ("", None):
            assert rendered("shipped", messages, reasoning_effort=effort) == rendered(
                "shipped", messages
            )


def test_two_efforts_part_in_the_system_text() -> None:
    one, other = (
        chat("shipped").render([SYSTEM, user("x")], reasoning_effort=effort)
        for effort in ("high", "low")
    )
    texts = [told("shipped", ask.tokens) for ask in (one, other)]
    shared = tokenizer("shipped").encode(os.path.commonprefix(texts))  # noqa: RUF071
    assert one.part_at(len(shared) - 1) == "system"
    assert one.boundaries[0][1] == "system"
