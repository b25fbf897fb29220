"""Stop strings: found in new tokens, where they end a request, and cut off its text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ninfer_pool.errors import ModelError, PromptError
from ninfer_pool.runner.tokenizer import Tokenizer

SLACK = 8
"""Tokens decoded beyond a string's bytes: halves of characters, tokens without text."""


def find_stop(text: str, strings: Sequence[str]) -> tuple[int, str] | None:
    """Return where the first of the strings begins and which it is, or None.

    The first is the one that ends first, of these the longest: no later text changes it.

    >>> find_stop("so far, so good", ["good", "far, so"])
    (3, 'far, so')
    """
    found = [(text.find(string), string) for string in strings if string in text]
    return min(found, key=lambda each: (each[0] + len(each[1]), each[0]), default=None)


def held_back(text: str, markers: Sequence[str]) -> int:
    """Return how much of the end of ``text`` might be the beginning of a marker. O(markers).

    >>> held_back("so far <thi", ["</think>", "<think>"])
    4
    """
    longest = min(len(text), max(map(len, markers), default=1) - 1)
    for count in range(longest, 0, -1):
        end = text[len(text) - count :]
        if any(len(marker) > count and marker.startswith(end) for marker in markers):
            return count
    return 0


class StopStrings:
    """Strings that end a request, found across tokens.

    Raises:
        PromptError: no list of strings, or an empty one among them.
        ModelError: no tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer | None, strings: Iterable[str]) -> None:
        if tokenizer is None:
            raise ModelError("stop_strings: no tokenizer; needs a folder with tokenizer.json")
        if isinstance(strings, str) or not isinstance(strings, Sequence):
            raise PromptError(f"stop_strings: {strings!r}; needs a list of strings")
        for index, text in enumerate(strings):
            if not isinstance(text, str) or not text:
                raise PromptError(f"stop_strings[{index}]: {text!r}; needs a string, not empty")
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        self._window = max(len(text.encode()) for text in strings) + SLACK

    def completed(self, tokens: Sequence[int], new: Sequence[int] = ()) -> bool:
        """Return whether the text of the last tokens contains a string. O(window)."""
        text = self._tokenizer.decode([*tokens[-self._window :], *new])
        return find_stop(text, self._strings) is not None


class StopFilter:
    """Passes a growing text on, up to the first stop string.

    ``met`` is the stop string that the text ended before, or None.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.met: str | None = None
        self._strings = tuple(strings)
        self._held = ""

    def push(self, text: str) -> str:
        """Return the text that certainly precedes every stop string."""
        if not self._strings or self.met is not None:
            return "" if self.met is not None else text
        text = self._held + text
        found = find_stop(text, self._strings)
        if found is not None:
            start, self.met = found
            self._held = ""
            return text[:start]
        cut = len(text) - held_back(text, self._strings)
        self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """Return the text that was held back, at the end."""
        text, self._held = self._held, ""
        return text
