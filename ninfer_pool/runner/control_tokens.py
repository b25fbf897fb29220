"""Text of a request stays text: control tokens in a prompt come from the template alone.

A *mark* is a character that the request does not contain. It is inserted before each character of
the request that could be part of a control token, and removed again after rendering. A control
token's string with a marked character is text, whether the request wrote all of it or the template
completed it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ninfer_pool.errors import PromptError
from ninfer_pool.runner.encoder import NOTHING, RenderedText, any_of

NONCHARACTERS = tuple(map(chr, itertools.chain(range(0xFDD0, 0xFDF0), (0xFFFE, 0xFFFF))))
"""Characters that no text should contain, so that the first is free in most requests."""
FIXED = ("role", "type")
"""Keys whose values a template compares with its own words, or turns into control tokens."""


class ControlTokenGuard:
    """Marks the strings of a request.

    ``controls`` are the strings of control tokens. ``headers`` are further strings that only a
    template may write; of these only whole ones are marked.
    """

    def __init__(self, controls: Iterable[str], *, headers: Iterable[str] = ()) -> None:
        self._controls = [token for token in controls if token.strip()]
        whole = sorted({*self._controls, *headers}, key=len, reverse=True)
        self._whole = any_of(whole)
        self._heads = {token[:n] for token in self._controls for n in range(1, len(token))}
        self._tails = {token[n:] for token in self._controls for n in range(1, len(token))}
        self._first = _one_of({token[0] for token in self._controls})
        self._last = _one_of({token[-1] for token in self._controls})
        self._longest = max(map(len, self._controls), default=0)
        self._joined = "\0".join(self._controls)

    def mark_all(
        self, messages: Any, tools: Any, switches: Mapping[str, Any]
    ) -> tuple[str, tuple[Any, Any, dict[str, Any]]]:
        """Return a mark that a chat does not contain, and its three parts, marked.

        Raises:
            PromptError: as `free_mark`.
        """
        mark = self.free_mark(messages, tools, switches)
        named = {name: self.marked(value, mark, key="type") for name, value in switches.items()}
        return mark, (self.marked(messages, mark), self.marked(tools, mark), named)

    def free_mark(self, *values: Any) -> str:
        """Return a character that plain JSON does not contain.

        Raises:
            PromptError: it contains every noncharacter of the basic plane.
        """
        joined = "".join(itertools.chain.from_iterable(map(_strings, values)))
        for mark in NONCHARACTERS:
            if mark not in joined:
                return mark
        raise PromptError("messages: every noncharacter from U+FDD0 on; needs text without them")

    def marked(self, value: Any, mark: str, *, key: str = "") -> Any:
        """Return a copy of plain JSON with its strings and keys marked."""
        if isinstance(value, str):
            return self._mark(value, mark, free=key not in FIXED)
        if isinstance(value, Mapping):
            return {
                self._mark(str(name), mark, free=False): self.marked(item, mark, key=str(name))
                for name, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.marked(item, mark, key=key) for item in value]
        return value

    def _mark(self, text: str, mark: str, *, free: bool) -> str:
        if not text:
            return text
        own = sorted({*self._wholes(text), *self._edges(text, free=free)})
        if not own:
            return text
        parts = (text[begin:end] for begin, end in itertools.pairwise([*own, len(text)]))
        return mark.join([text[: own[0]], *parts])

    def _wholes(self, text: str) -> Iterator[int]:
        """Yield the beginnings of control tokens' strings, overlapping ones too."""
        found = self._whole.search(text)
        while found is not None:
            yield found.start() + _spaces(found[0])
            found = self._whole.search(text, found.start() + 1)

    def _edges(self, text: str, *, free: bool) -> Iterator[int]:
        """Yield the beginnings of partial control tokens at either end, which text may complete.

        The ends are those that remain after a template strips white space.
        """
        size = self._longest
        if self._first.search(text if text[-1].isspace() else text[-size:]):
            stripped = text.rstrip()
            for n in range(1, min(len(stripped), size) + 1):
                if stripped[-n:] in self._heads:
                    yield len(stripped) - n + _spaces(stripped[-n:])
        if self._last.search(text if text[0].isspace() else text[:size]):
            begin = _spaces(text)
            for n in range(1, size):
                if text[begin : begin + n] in self._tails:
                    yield begin + _spaces(text[begin : begin + n])
        if free and len(text) < size and text.strip() and text.strip() in self._joined:
            yield _spaces(text)


def unmarked(text: str, mark: str) -> RenderedText:
    """Remove the marks from a rendered prompt."""
    parts = text.split(mark)
    ends = itertools.accumulate(map(len, parts[:-1]))
    return RenderedText(text="".join(parts), own=tuple(ends))


def _one_of(characters: set[str]) -> re.Pattern[str]:
    return re.compile("[" + "".join(map(re.escape, characters)) + "]") if characters else NOTHING


def _spaces(text: str) -> int:
    """Return the length of a text's leading white space; 0 where there is no other text."""
    return len(text) - len(text.lstrip()) if text.strip() else 0


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield str(name)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
