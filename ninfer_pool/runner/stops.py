"""Strings that end a request as soon as its text holds one."""

from __future__ import annotations

from collections.abc import Sequence

from ninfer_pool.errors import PromptError
from ninfer_pool.runner.tokenizer import Tokenizer

SLACK = 8
"""Tokens looked back upon beyond a string's bytes: halves of characters, tokens without text."""


class StopStrings:
    """Finds strings in a text that grows by a token at a time, also across tokens.

    Raises:
        PromptError: a string that is empty or no text.
    """

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str]) -> None:
        check_stop_strings(strings)
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        self._window = max(len(text.encode()) for text in strings) + SLACK

    def end(self, tokens: Sequence[int], new: Sequence[int] = ()) -> bool:
        """Say whether a text holds one; asked after each token, the last of these. O(window)."""
        text = self._tokenizer.decode([*tokens[-self._window :], *new])
        return any(string in text for string in self._strings)


def check_stop_strings(strings: object) -> None:
    """Say no to what is no sequence of strings.

    Raises:
        PromptError: names the string.
    """
    if isinstance(strings, str) or not isinstance(strings, Sequence):
        raise PromptError(f"stop_strings: {strings!r}; needs a list of strings")
    for index, text in enumerate(strings):
        if not isinstance(text, str) or not text:
            raise PromptError(f"stop_strings[{index}]: {text!r}; needs a string that is not empty")
