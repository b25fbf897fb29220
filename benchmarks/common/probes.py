"""Calls to a filled pool, each with its right answer."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import TypeAlias

import numpy as np

from benchmarks.common.conversations import (
    ANSWER_TOKENS,
    SPACE,
    TURN_TOKENS,
    VOCABULARY,
    Conversations,
    FilledPool,
    Tokens,
    admitted,
    random_tokens,
    run,
)
from benchmarks.common.timing import Action, Floor
from ninfer_pool import PrefixPool, Prompt

STRANGE = VOCABULARY + 10_000_000


Target: TypeAlias = tuple[FilledPool, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Tokens to look up, and the bytes of the stored ones that they begin with."""

    tokens: Tokens
    stored: bytes

    @property
    def matched(self) -> int:
        """The number of stored tokens."""
        return len(self.stored) // 4


PROBES = ("resume", "branch", "new")


def probe(plan: Conversations, index: int, *, name: str) -> Probe:
    """Return a prompt that extends a stored conversation, or branches off it in the middle.

    ``new`` is as long and shares nothing.
    """
    path = plan.path(index)
    matched = {"resume": len(path), "branch": plan.middle, "new": 0}[name]
    added = TURN_TOKENS if name == "resume" else len(path) - matched
    begin = path[:matched]
    return Probe(tokens=then_new(begin, added), stored=begin.tobytes())


def then_new(begin: Tokens, count: int) -> Tokens:
    """Return `begin`, then `count` tokens of which the first occurs nowhere else."""
    tail = random_tokens(count, 3, count)
    tail[0] = STRANGE
    return np.concatenate([begin, tail])


def check_probe(target: Target, asked: Probe) -> None:
    """Confirm that a probe resumes at the right position.

    The stored conversation must be resumable at its end, the probe at the conversation's own
    deepest checkpoint at or before the branch.
    """
    world, index = target
    pool, path = world.pool, world.plan.path(index)
    _check_depth(world, path, len(path))
    own = pool.lookup(Prompt(path, namespace=SPACE))
    right = max((each.position for each in own if each.position <= asked.matched), default=0)
    prompt = Prompt(asked.tokens, namespace=SPACE)
    found = [each.position for each in pool.lookup(prompt)]
    matched = pool.explain(prompt).matched
    if found != sorted(found) or (max(found, default=0), matched) != (right, asked.matched):
        raise AssertionError(
            f"{world.plan.shape}: resumes at {found[-1:]} of {matched} matched tokens; right are "
            f"{right} of {asked.matched}"
        )


def repeated(
    targets: Sequence[Target], *, op: str, name: str, repeats: int
) -> Iterator[tuple[Action, Floor]]:
    """Yield the same call for each conversation in turn, again and again, each checked first.

    ``lookup`` repeats the same `Prompt`, as a scheduler does for a waiting request. The others
    take a new one each time, made before it is timed.
    """
    for target in set(targets):
        check_probe(target, probe(target[0].plan, target[1], name=name))
    asked = [
        (world.pool, Prompt(each.tokens, namespace=SPACE), Floor(each.tokens, stored=each.stored))
        for world, index in targets
        for each in [probe(world.plan, index, name=name)]
    ]
    for pool, prompt, floor in islice(cycle(asked), repeats):
        again = op == "lookup"
        if again:
            pool.lookup(prompt)
        use = prompt if again else Prompt(prompt.tokens, namespace=SPACE)
        yield partial(getattr(pool, op.removeprefix("first_")), use), floor


def turns(targets: Iterable[Target]) -> Iterator[tuple[Action, Floor]]:
    """Yield for each conversation one turn of `TURN_TOKENS`: its acquire and its commit.

    Each must resume at the end of the stored conversation, and then be stored itself.
    """
    for world, index in targets:
        path = world.plan.path(index)
        longer = then_new(path, TURN_TOKENS)
        prompt = Prompt(
            longer[:-ANSWER_TOKENS],
            namespace=SPACE,
            boundaries=_boundaries(world, len(longer) - ANSWER_TOKENS),
        )
        _check_depth(world, longer, len(path))
        floor = Floor(prompt.tokens, stored=path.tobytes())
        yield TimedTurn(world.pool, prompt, longer), floor
        _check_depth(world, longer, len(longer))


class TimedTurn:
    """One turn; the engine's calls between `acquire` and `commit` are not its cost."""

    def __init__(self, pool: PrefixPool, prompt: Prompt, path: Tokens) -> None:
        self._pool, self._prompt, self._path = pool, prompt, path
        self.excluded = 0

    def __call__(self) -> None:
        lease = admitted(self._pool, self._prompt, self._path)
        begin = time.perf_counter_ns()
        run(lease, self._path)
        self.excluded = time.perf_counter_ns() - begin
        lease.commit()


def evictions(targets: Iterable[Target]) -> Iterator[tuple[Action, Floor]]:
    """Yield for each conversation its eviction by key; it must be stored before and not after."""
    for world, index in targets:
        path = world.plan.path(index)
        _check_depth(world, path, len(path))
        yield partial(world.pool.evict, world.keys[index]), Floor(path, stored=path.tobytes())
        if _depth(world, path) > world.plan.system:
            raise AssertionError(f"{world.plan.shape}: evicted conversation {index} is still found")


def _boundaries(world: FilledPool, end: int) -> list[tuple[int, str]]:
    """Return the boundaries of a prompt, those of earlier turns among them."""
    system = [(world.plan.system, "system")] if world.plan.system else []
    return [*system, (world.plan.tokens - ANSWER_TOKENS, "turn"), (end, "turn")]


def _depth(world: FilledPool, tokens: Tokens) -> int:
    found = world.pool.lookup(Prompt(tokens, namespace=SPACE))
    return found[-1].position if found else 0


def _check_depth(world: FilledPool, tokens: Tokens, right: int) -> None:
    depth = _depth(world, tokens)
    if depth != right:
        raise AssertionError(
            f"{world.plan.shape}: resumes at {depth} of {len(tokens)}, not at {right}"
        )
