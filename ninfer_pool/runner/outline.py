"""Where each message is within a rendered prompt."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from ninfer_pool.errors import PromptError
from ninfer_pool.runner.headers import Message

PRIVATE = (0xF0000, 0x100000)
"""Where private characters begin that serve as anchors next to a message's text."""
ANCHORS = 0xFFFE
"""The number of anchors."""


class TextSpan(NamedTuple):
    """Where the first and the last character of a message's own text are."""

    first: int
    last: int


class Outline:
    """The places of messages in a prompt's text, looked up on demand.

    The messages are rendered once more with private characters in them. Where that gives another
    text, because the template reads how a message begins, only headers separate them.

    Args:
        text: the prompt.
        messages: as they were rendered, all of them.
        part_ends: for messages made of several texts, where in the content each of them ends.
        render: renders messages to a prompt like ``text``.
        controls: where control tokens begin in ``text``, ascending.
        openers: where headers of messages begin, ascending.
        system: how many messages belong to the system part, and where it ends.
        end: where the last answer's header begins.
    """

    def __init__(
        self,
        text: str,
        messages: Sequence[Message],
        *,
        part_ends: Mapping[int, Sequence[int]],
        render: Callable[[Sequence[Message]], str],
        controls: Sequence[int],
        openers: Sequence[int],
        system: tuple[int, int],
        end: int,
    ) -> None:
        self._text = text
        self._messages = messages
        self._part_ends = part_ends
        self._render = render
        self._controls = controls
        self._system, self._system_end = system
        self._openers = [at for at in openers if self._system_end <= at < end]
        self._end = end

    def part_at(self, character: int) -> str:
        """Return ``system``, ``messages[3]`` or ``generation_prompt``."""
        if character >= self._end:
            return "generation_prompt"
        if character < self._system_end:
            return "system"
        index = bisect_right(self._starts, character) - 1
        return f"messages[{max(index, self._system)}]"

    @property
    def text(self) -> str:
        """The prompt."""
        return self._text

    def begin_of(self, index: int) -> int | None:
        """Return where a message's own text begins; None where it cannot be found."""
        span = self._spans.get(index)
        return None if span is None else span.first

    def end_of(self, index: int) -> int:
        """Return where a message's text ends, what closes it included."""
        if index < self._system:
            return self._system_end
        span = self._spans.get(index)
        after = self._starts[index] if span is None else span.last
        end = next((at for at in self._openers if at > after), self._end)
        later = next((s.first for i, s in self._spans.items() if i > index), end)
        if later < end:  # an unknown header: its control token begins it
            between = self._controls[bisect_right(self._controls, after) :]
            return max((at for at in between if at < later), default=end)
        return end

    def end_of_part(self, index: int, part: int) -> int | None:
        """Return where one part of a message's content ends; None where it cannot be found."""
        ends = self._part_ends.get(index, ())
        if part >= len(ends) - 1:
            return self.end_of(index)
        if self._base is None:
            return None
        text, end = self._messages[index]["content"], ends[part]
        message = {
            **self._messages[index],
            "content": text[:end] + chr(self._base) + text[end:],
        }
        found = self._found([*self._messages[:index], message, *self._messages[index + 1 :]])
        return found.get(0)

    @cached_property
    def _base(self) -> int | None:
        """The first of the private characters that the prompt does not hold."""
        for base in PRIVATE:
            if not re.search(f"[{chr(base)}-{chr(base + ANCHORS - 1)}]", self._text):
                return base
        return None

    def _found(self, messages: Sequence[Message]) -> dict[int, int]:
        """Render with anchors and return where each is, by its number."""
        if self._base is None:
            return {}
        try:
            rendered = self._render(messages)
        except PromptError:  # of a template that looks at how a text begins
            return {}
        parts = re.split(f"([{chr(self._base)}-{chr(self._base + ANCHORS - 1)}])", rendered)
        if "".join(parts[::2]) != self._text:
            return {}
        found, at = dict[int, int](), 0
        for plain, anchor in zip(parts[::2], parts[1::2], strict=False):
            at += len(plain)
            found[ord(anchor) - self._base] = at
        return found

    @cached_property
    def _spans(self) -> dict[int, TextSpan]:
        """The spans of messages that have a text and could be found, in order."""
        base = self._base or 0
        found = self._found(
            [
                _anchored(message, chr(base + 2 * n), chr(base + 2 * n + 1))
                if 2 * n + 1 < ANCHORS
                else message
                for n, message in enumerate(self._messages)
            ]
        )
        spans: dict[int, TextSpan] = {}
        for number, at in found.items():
            index = number // 2
            first = spans[index].first if index in spans else at
            spans[index] = TextSpan(first, max(first, at))
        return dict(sorted(spans.items()))

    @cached_property
    def _starts(self) -> list[int]:
        """Where each message begins, its header included; ascending."""
        starts, headers = [0] * self._system, set(self._openers)
        least = self._system_end
        for index in range(self._system, len(self._messages)):
            span = self._spans.get(index)
            start = self._unseen(index, least) if span is None else self._header(span, least)
            starts.append(start)
            least = max(least, start if span is None else span.last)
            if start in headers:
                least = max(least, start + 1)
        return starts

    def _header(self, span: TextSpan, least: int) -> int:
        at = bisect_right(self._openers, span.first) - 1
        return self._openers[at] if at >= 0 and self._openers[at] >= least else span.first

    def _unseen(self, index: int, least: int) -> int:
        """Where a message without a text begins: a header that no later message needs."""
        later = next((span.first for i, span in self._spans.items() if i > index), None)
        begin = bisect_left(self._openers, least)
        end = len(self._openers) if later is None else bisect_right(self._openers, later) - 1
        return self._openers[begin] if begin < end else least


def _anchored(message: Message, first: str, last: str) -> Message:
    """Return a message with one anchor before its first and one before its last character."""
    text = message.get("content")
    if not isinstance(text, str) or not text.strip():
        return message
    begin, end = len(text) - len(text.lstrip()), len(text.rstrip()) - 1
    return {**message, "content": text[:begin] + first + text[begin:end] + last + text[end:]}
