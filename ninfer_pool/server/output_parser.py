"""Splits the text of a model, as it is generated, into reasoning, answer and calls of tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ninfer_pool.runner.stops import StopFilter, held_back
from ninfer_pool.server.chat_request import Piece, Reasoning, Text
from ninfer_pool.server.tool_calls import CLOSE, OPEN, ToolCalls, unfinished

THINK, THOUGHT = "<think>", "</think>"
MAX_CLOSES = 16
"""Closing markers within a call's values before the call counts as text."""


class _Step(Protocol):
    """Takes all it can of the held text; returns whether another step is due."""

    def __call__(self, *, over: bool) -> bool: ...


class OutputParser:
    """Splits the text of one answer; the result does not depend on how the text is cut up.

    Text is held back only while it may begin a marker, a stop string or a call. The pieces add up
    to the whole text without the markers, the newlines after reasoning, and all text from a stop
    string on. An incomplete or invalid call stays text.

    Args:
        thinking: the text begins with reasoning.
        tools: the tools that may be called, as OpenAI describes them.
        parse_tools: whether calls are parsed, where there are tools.
        stop: strings before which the text ends, anywhere in it.
        raw: only stop strings are searched for.
    """

    def __init__(
        self,
        *,
        thinking: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        parse_tools: bool = True,
        stop: Sequence[str] = (),
        raw: bool = False,
    ) -> None:
        self._stops = StopFilter(stop)
        self._thinking = thinking
        self._calls = ToolCalls(tools) if tools and parse_tools and not raw else None
        self._step: _Step = self._answer if raw else self._start
        self._held = ""
        self._searched = 0  # up to here no end of the call was found
        self._closes = 0
        self._pieces: list[Piece] = []

    @property
    def stop_string(self) -> str | None:
        """The stop string that was met, or None."""
        return self._stops.met

    def push(self, text: str) -> list[Piece]:
        """Return the pieces that are certain once ``text`` is appended."""
        self._held += self._stops.push(text)
        return self._settle(over=False)

    def finish(self) -> list[Piece]:
        """Return the text held back, at the end."""
        self._held += self._stops.finish()
        return self._settle(over=True)

    def _settle(self, *, over: bool) -> list[Piece]:
        while self._step(over=over):
            pass
        pieces, self._pieces = self._pieces, []
        return pieces

    def _start(self, *, over: bool) -> bool:
        begun = self._held.lstrip()
        if THINK.startswith(begun) and begun != THINK and not over:
            return False
        if begun.startswith(THINK):
            self._held, self._step = begun[len(THINK) :], self._reasoning
        else:
            self._step = self._reasoning if self._thinking else self._answer
        return True

    def _reasoning(self, *, over: bool) -> bool:
        if self._take_to(THOUGHT, Reasoning, over=over):
            self._held, self._step = self._held[len(THOUGHT) :], self._gap
            return True
        return False

    def _gap(self, *, over: bool) -> bool:
        self._held = self._held.lstrip("\n")
        if self._held:
            self._step = self._answer
        return bool(self._held)

    def _answer(self, *, over: bool) -> bool:
        if self._calls is None:
            self._take(len(self._held), Text)
            return False
        if self._take_to(OPEN, Text, over=over):
            self._step, self._searched, self._closes = self._call, len(OPEN), 0
            return True
        return False

    def _call(self, *, over: bool) -> bool:
        assert self._calls is not None
        end = self._held.find(CLOSE, self._searched)
        if end < 0:
            # An end of which half is held is found with the other half.
            self._searched = max(self._searched, len(self._held) - len(CLOSE) + 1)
            return over and self._no_call()
        inner, self._searched = self._held[len(OPEN) : end], end + len(CLOSE)
        call = self._calls.read(inner)
        if call is not None:
            self._pieces.append(call)
            self._held, self._step = self._held[self._searched :], self._answer
            return True
        self._closes += 1
        if self._closes < MAX_CLOSES and unfinished(inner):
            return True
        return self._no_call()

    def _no_call(self) -> bool:
        """Take the opening marker as text; another call may begin in the rest."""
        self._take(len(OPEN), Text)
        self._step = self._answer
        return True

    def _take_to(self, marker: str, kind: type[Reasoning | Text], *, over: bool) -> bool:
        """Take the text before a marker; the held text then begins with the marker."""
        at = self._held.find(marker)
        if at >= 0:
            self._take(at, kind)
            return True
        back = 0 if over else held_back(self._held, [marker])
        self._take(len(self._held) - back, kind)
        return False

    def _take(self, count: int, kind: type[Reasoning | Text]) -> None:
        if count:
            self._pieces.append(kind(self._held[:count]))
            self._held = self._held[count:]
