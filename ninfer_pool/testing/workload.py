"""Random workloads against a `Host`: what Hypothesis draws, and how it is played."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from ninfer_pool.core.prompt import KINDS
from ninfer_pool.testing.host import Host, Running


class Begin(NamedTuple):
    """A request on one of two stems, or that follows something finished."""

    stem: int
    after: bool
    """Follow the ``stem``-th finished request instead."""
    head: int
    """Tokens of the stem; of a followed request: how many of its last to drop."""
    tail: tuple[int, ...]
    marks: tuple[tuple[int, str], ...]
    options: dict[str, Any]


class Act(NamedTuple):
    """Something done with one of the running requests."""

    what: str
    which: int
    tokens: tuple[int, ...]
    accepted: int


ACTS = (
    "step", "step", "decode", "draft", "draft", "publish", "finish", "finish", "cancel", "evict",
)  # fmt: skip


def edges(page: int) -> list[int]:
    """Return lengths next to the edges of the first pages."""
    return sorted({n * page + off for n in (1, 2, 3) for off in (-1, 0, 1)} - {0})


def begins(page: int) -> st.SearchStrategy[Begin]:
    """Draw requests; prompts share stems, and part next to page edges."""
    lengths = st.sampled_from(edges(page))
    kinds = st.sampled_from(KINDS[:-1])
    some = st.lists(st.tuples(lengths, kinds), max_size=2).map(lambda marks: tuple(sorted(marks)))
    # Prompts that declare the same boundaries are cut alike: what they share is exact.
    system = (page + 1, "system")
    usual: list[tuple[tuple[int, str], ...]] = [(system,), (system, (2 * page, "turn"))]
    options = st.fixed_dictionaries(
        {"reserve_tokens": st.sampled_from((0, 3))},
        optional={
            "exact": st.sampled_from((True, True, False)),
            "read": st.sampled_from((True, True, False)),
            "retain": st.sampled_from((True, True, False)),
            "claim": st.booleans(),
        },
    )
    return st.builds(
        Begin,
        stem=st.integers(0, 1),
        after=st.booleans(),
        head=lengths,
        tail=st.lists(st.integers(0, 2), max_size=3).map(tuple),
        marks=st.one_of(st.sampled_from(usual), some),
        options=options,
    )


def acts() -> st.SearchStrategy[Act]:
    """Draw what to do next with one of the running requests."""
    return st.builds(
        Act,
        what=st.sampled_from(ACTS),
        which=st.integers(0, 2),
        tokens=st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple),
        accepted=st.integers(0, 2),
    )


def workloads(page: int, *, most: int = 24) -> st.SearchStrategy[list[Begin | Act]]:
    """Draw what happens in one pool, for pages of ``page`` tokens."""
    return st.lists(st.one_of(begins(page), acts()), min_size=4, max_size=most)


class Player:
    """Plays a workload.

    Args:
        host: fresh. stems: two lists of tokens, longer than three pages.
        word: turns a small number into a token.
    """

    def __init__(
        self, host: Host, stems: Sequence[Sequence[int]], *, word: Callable[[int], int]
    ) -> None:
        self.host = host
        self.stems = stems
        self.word = word
        self.done: list[list[int]] = []
        """The tokens of finished requests."""

    def play(self, workload: Sequence[Begin | Act]) -> None:
        """Play all of it, finish the running requests, then request everything once more."""
        for action in workload:
            if isinstance(action, Begin):
                self.begin(action)
            elif self.host.running:
                self.act(self.host.running[action.which % len(self.host.running)], action)
        rest = list(self.host.running)
        for running in rest:
            self.prefill(running)
        for running in rest:
            running.decode([self.word(1)])
        for running in rest:
            self.finish(running)
        for number, tokens in enumerate(self.done[-4:]):
            again = self.ask([*tokens, self.word(0)][: len(tokens) + number % 2], {})
            if again is not None:
                self.prefill(again)
                again.decode([self.word(1)])
                self.finish(again)

    def begin(self, action: Begin) -> None:
        """Admit a request and restore its lane."""
        words = [self.word(number) for number in action.tail]
        if action.after and self.done:
            old = self.done[action.stem % len(self.done)]
            tokens = [*old[: max(1, len(old) - action.head % 3)], *words][: self.longest]
        else:
            tokens = [*self.stems[action.stem][: action.head], *words]
        marks = dict(mark for mark in action.marks if mark[0] <= len(tokens))
        self.ask(tokens, {**action.options, "boundaries": sorted(marks.items())})

    @property
    def longest(self) -> int:
        """How long prompts may grow."""
        return 5 * self.host.config.page_tokens

    def ask(self, tokens: Sequence[int], options: dict[str, Any]) -> Running | None:
        """Admit and restore; None: refused."""
        positions = None
        if getattr(self.host.raw, "takes_positions", False):
            positions = shifted(len(tokens), stem=tokens[0])
        running = self.host.begin(tokens, positions=positions, **options)
        if running is not None:
            running.restore()
        return running

    def act(self, running: Running, action: Act) -> None:
        """Do one thing with a running request."""
        words = [self.word(number) for number in action.tokens]
        if action.what == "step":
            running.step()
        elif action.what == "decode":
            self.prefill(running)
            running.decode(words)
        elif action.what == "draft":
            self.prefill(running)
            if not running.draft(words, accepted=min(action.accepted, len(words))):
                running.cancel()
        elif action.what == "publish":
            running.lease.publish()
        elif action.what == "finish":
            self.finish(running)
        elif action.what == "cancel":
            running.cancel()
        else:
            entries = self.host.pool.entries()
            if entries:
                self.host.pool.evict(entries[action.which % len(entries)].key)

    def prefill(self, running: Running) -> None:
        """Prefill the rest of the prompt."""
        while running.step():
            pass

    def finish(self, running: Running) -> None:
        """Prefill the rest and commit."""
        with running:
            self.prefill(running)
            running.finish()
        self.done.append(running.tokens)


def shifted(count: int, *, stem: int) -> Any:
    """Return positions (3, count) whose second axis jumps early, where the stem is odd."""
    positions = np.tile(np.arange(count, dtype=np.int32), (3, 1))
    if stem % 2:
        positions[1, 2:] += 5
    return positions
