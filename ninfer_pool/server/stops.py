"""Stop strings in a text that comes in stretches."""

from __future__ import annotations

from collections.abc import Sequence


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


class Stops:
    """Lets text through up to the first stop string.

    The first is the one that ends first, of these the longest: it depends on no text after it, so
    neither does what is let through. ``met`` is the stop string that the text ended before.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.met: str | None = None
        self._strings = tuple(strings)
        self._held = ""

    def push(self, text: str) -> str:
        """Return what is known to come before every stop string."""
        if not self._strings or self.met is not None:
            return "" if self.met is not None else text
        text = self._held + text
        found = [(text.find(string), string) for string in self._strings if string in text]
        if found:
            start, self.met = min(found, key=lambda each: (each[0] + len(each[1]), each[0]))
            self._held = ""
            return text[:start]
        cut = len(text) - held_back(text, self._strings)
        self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """Return what was held back, now that no more comes."""
        text, self._held = self._held, ""
        return text
