"""What a model writes, told apart as it comes: thoughts, answer, calls of tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any

from ninfer_pool.server.calls import Piece, Reasoning, Text
from ninfer_pool.server.stops import Stops, held_back
from ninfer_pool.server.tool_calls import CLOSE, OPEN, ToolCalls, unfinished

THINK, THOUGHT = "<think>", "</think>"
MAX_CLOSES = 16
"""Closing markers that a call may hold in its values before it is taken for text."""


class _At(Enum):
    START = auto()
    REASONING = auto()
    GAP = auto()
    ANSWER = auto()
    CALL = auto()


class OutputParser:
    """Tells the text of one answer apart, however it is cut up.

    Text is held back only while it might be the beginning of a marker, of a stop string or of a
    call. Joined, the pieces are all of the text but for the markers, the newlines between
    thoughts and answer, and what follows a stop string. What is no whole call stays text.

    Args:
        thinking: the answer begins among thoughts.
        tools: what may be called, as OpenAI describes tools.
        parse_tools: whether calls are read, where there are tools.
        stop: strings before which the text ends, wherever they stand.
        raw: only stop strings are looked for.
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
        self._stops = Stops(stop)
        self._thinking = thinking
        self._calls = ToolCalls(tools) if tools and parse_tools and not raw else None
        self._at = _At.ANSWER if raw else _At.START
        self._held = ""
        self._looked = 0  # how far into a call its end was looked for
        self._closes = 0
        self._pieces: list[Piece] = []

    @property
    def stop_string(self) -> str | None:
        """The stop string that was met, or None."""
        return self._stops.met

    def push(self, text: str) -> list[Piece]:
        """Return what is certain now that ``text`` has come."""
        self._held += self._stops.push(text)
        return self._settle(over=False)

    def finish(self) -> list[Piece]:
        """Return what was held back, now that no more comes."""
        self._held += self._stops.finish()
        return self._settle(over=True)

    def _settle(self, *, over: bool) -> list[Piece]:
        steps = {
            _At.START: self._start,
            _At.REASONING: self._reasoning,
            _At.GAP: self._gap,
            _At.ANSWER: self._answer,
            _At.CALL: self._call,
        }
        while steps[self._at](over=over):
            pass
        pieces, self._pieces = self._pieces, []
        return pieces

    # Each step takes what it can of the held text, and says whether another step is due.

    def _start(self, *, over: bool) -> bool:
        begun = self._held.lstrip()
        if THINK.startswith(begun) and begun != THINK and not over:
            return False
        if begun.startswith(THINK):
            self._held, self._at = begun[len(THINK) :], _At.REASONING
        else:
            self._at = _At.REASONING if self._thinking else _At.ANSWER
        return True

    def _reasoning(self, *, over: bool) -> bool:
        if self._take_to(THOUGHT, Reasoning, over=over):
            self._held, self._at = self._held[len(THOUGHT) :], _At.GAP
            return True
        return False

    def _gap(self, *, over: bool) -> bool:
        self._held = self._held.lstrip("\n")
        if self._held:
            self._at = _At.ANSWER
        return bool(self._held)

    def _answer(self, *, over: bool) -> bool:
        if self._calls is None:
            self._take(len(self._held), Text)
            return False
        if self._take_to(OPEN, Text, over=over):
            self._at, self._looked, self._closes = _At.CALL, len(OPEN), 0
            return True
        return False

    def _call(self, *, over: bool) -> bool:
        assert self._calls is not None
        end = self._held.find(CLOSE, self._looked)
        if end < 0:
            # An end that is half there is found when the rest has come.
            self._looked = max(self._looked, len(self._held) - len(CLOSE) + 1)
            return over and self._no_call()
        inner, self._looked = self._held[len(OPEN) : end], end + len(CLOSE)
        call = self._calls.read(inner)
        if call is not None:
            self._pieces.append(call)
            self._held, self._at = self._held[self._looked :], _At.ANSWER
            return True
        self._closes += 1
        if self._closes < MAX_CLOSES and unfinished(inner):
            return True
        return self._no_call()

    def _no_call(self) -> bool:
        """What was held since the opening marker is text, unless another call begins in it."""
        self._take(len(OPEN), Text)
        self._at = _At.ANSWER
        return True

    def _take_to(self, marker: str, kind: type[Reasoning | Text], *, over: bool) -> bool:
        """Take what comes before a marker, which is then what the held text begins with."""
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
