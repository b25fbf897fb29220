"""The text that a chat template writes around messages, found by rendering a few of them."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from ninfer_pool.errors import PromptError
from ninfer_pool.runner.tokenizer import Tokenizer

THINK, UNTHINK = "<think>", "</think>"
SWITCHES: tuple[dict[str, Any], ...] = ({}, {"enable_thinking": True}, {"enable_thinking": False})
ANSWER = "2"
"""The assistant's text in the conversations that are rendered to find the text around it."""
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Headers:
    """The text that a template writes before a message.

    Attributes:
        answer: opens an assistant's message, the last and earlier ones; "" where unknown.
        apart: True where the conversation before an answer can be rendered without the header.
        prologues: texts that may follow ``answer`` before the model's own text.
        question: opens a user's message.
    """

    answer: str
    apart: bool
    prologues: tuple[str, ...]
    question: str

    @classmethod
    def of(cls, tokenizer: Tokenizer, controls: re.Pattern[str]) -> Headers:
        """Find a template's headers by a dozen renderings; call it once per template."""
        user = question_of("0")
        prompts = [
            _tried(tokenizer, [user], add_generation_prompt=True, **switches)
            for switches in SWITCHES
        ]
        bare, prompt = _tried(tokenizer, [user]), prompts[0]
        if prompt is None:
            return cls(answer="", apart=False, prologues=(), question="")
        tails = [
            text[len(bare or "") :] for text in prompts if text and text.startswith(bare or "")
        ]
        if bare is None or not tails or not any(tails):
            return cls._closing(tokenizer, controls, prompt)
        answer = _common(tails).partition(THINK)[0]
        after = _after(tokenizer, bare)
        earlier = _common([answer, after])
        if after.startswith(earlier + ANSWER):  # earlier turns open with the shared part alone
            answer = earlier
        prologues = {tail[len(answer) :] for tail in tails} - {""}
        return cls(
            answer=answer if answer.strip() else "",
            apart=True,
            prologues=tuple(sorted(prologues, key=len)),
            question=_question(tokenizer),
        )

    @classmethod
    def _closing(cls, tokenizer: Tokenizer, controls: re.Pattern[str], prompt: str) -> Headers:
        """Find the headers of a template without generation prompt: a question's end is one."""
        other = _tried(tokenizer, [question_of("1")], add_generation_prompt=True) or prompt
        same = _common_end([prompt, other])
        answer, think, rest = same.partition(THINK)
        if same == prompt or not controls.search(answer):
            answer = think = ""
        prologues = (think + rest,) if think else ()
        return cls(answer=answer, apart=False, prologues=prologues, question=_question(tokenizer))


def question_of(text: str) -> Message:
    """Return a user's message."""
    return {"role": "user", "content": text}


def lead_of(render: Callable[[Sequence[Message]], str], system: Sequence[Message]) -> str | None:
    """Return the text before the first question's content; None where the template rejects it."""
    try:
        return _common([render([*system, question_of(text)]) for text in "01"])
    except PromptError:
        return None


def _tried(tokenizer: Tokenizer, messages: Sequence[Message], **options: Any) -> str | None:
    try:
        return tokenizer.render(messages, **options)
    except PromptError:
        return None


def _after(tokenizer: Tokenizer, bare: str) -> str:
    """Return the text after the first question of a conversation with a second one."""
    answer = {"role": "assistant", "content": ANSWER}
    text = _tried(tokenizer, [question_of("0"), answer, question_of("3")])
    return text[len(bare) :] if text is not None and text.startswith(bare) else ""


def _question(tokenizer: Tokenizer) -> str:
    """Return the text before a second question, less the end of the answer before it."""
    turns = [[question_of("0"), {"role": "assistant", "content": text}] for text in (ANSWER, "5")]
    ends = [_tried(tokenizer, messages) for messages in turns]
    leads = [lead_of(tokenizer.render, messages) for messages in turns]
    end, lead = _common_end(ends), _common_end(leads)
    return lead[len(end) :] if lead.startswith(end) else ""


def _common_end(texts: Sequence[str | None]) -> str:
    return _common([(text or "")[::-1] for text in texts])[::-1]


def _common(texts: Sequence[str]) -> str:
    """Return the longest common beginning, by O(log length) comparisons of whole slices."""
    return reduce(_common_of_two, texts)


def _common_of_two(one: str, other: str) -> str:
    sizes = range(1, min(len(one), len(other)) + 1)
    return one[: bisect_left(sizes, 1, key=lambda n: int(one[:n] != other[:n]))]
