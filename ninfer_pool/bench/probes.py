"""The questions asked of a filled pool, each with its right answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from ninfer_pool import Prompt
from ninfer_pool.bench.timing import Action, Floor
from ninfer_pool.bench.worlds import (
    ANSWER_TOKENS,
    SPACE,
    TURN_TOKENS,
    VOCABULARY,
    Plan,
    Tokens,
    World,
    random_tokens,
    turn,
)

STRANGE = VOCABULARY + 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Tokens to look up, and how many of them are stored."""

    name: str
    tokens: Tokens
    matched: int


def probes(plan: Plan) -> list[Probe]:
    """Extends a stored entry; parts from it halfway through what is its own; is unrelated."""
    path, middle = plan.path(plan.probed), plan.middle
    return [
        Probe(name="resume", tokens=then_new(path, TURN_TOKENS), matched=len(path)),
        Probe(
            name="branch",
            tokens=then_new(path[:middle], len(path) - middle),
            matched=middle,
        ),
        Probe(name="new", tokens=then_new(path[:0], len(path)), matched=0),
    ]


def then_new(begin: Tokens, count: int) -> Tokens:
    """`begin`, then `count` tokens of which the first occurs nowhere else."""
    tail = random_tokens(count, 3, count)
    tail[0] = STRANGE
    return np.concatenate([begin, tail])


def check_probe(world: World, probe: Probe) -> None:
    """The gate: a wrong answer is not worth timing.

    The stored entry must be resumable at its end, and the probe at the entry's own deepest
    position at or before the parting.
    """
    pool, path = world.pool, world.plan.path(world.plan.probed)
    _check_depth(world, path, len(path))
    own = pool.lookup(Prompt(path, namespace=SPACE))
    right = max((each.position for each in own if each.position <= probe.matched), default=0)
    prompt = Prompt(probe.tokens, namespace=SPACE)
    found = [each.position for each in pool.lookup(prompt)]
    matched = pool.explain(prompt).matched
    if found != sorted(found) or (max(found, default=0), matched) != (right, probe.matched):
        raise AssertionError(
            f"{world.plan.shape} {probe.name}: resumes at {found[-1:]} of {matched} matched "
            f"tokens; right are {right} of {probe.matched}"
        )


def turns(worlds: Iterable[tuple[World, int]]) -> Iterator[tuple[Action, Floor]]:
    """For each conversation one turn that adds `TURN_TOKENS`: acquire, checkpoints, commit.

    Checked around each: it resumes at the end of what is stored, and then is stored itself.
    """
    for world, index in worlds:
        path = world.plan.path(index)
        longer = then_new(path, TURN_TOKENS)
        prompt = Prompt(
            longer[:-ANSWER_TOKENS],
            namespace=SPACE,
            boundaries=_boundaries(world, len(longer) - ANSWER_TOKENS),
        )
        _check_depth(world, longer, len(path))
        yield partial(turn, world.pool, prompt, longer), Floor(prompt.tokens, matched=len(path))
        _check_depth(world, longer, len(longer))


def evictions(worlds: Iterable[tuple[World, int]]) -> Iterator[tuple[Action, Floor]]:
    """For each conversation its eviction by key; checked to be there before, and not after."""
    for world, index in worlds:
        path = world.plan.path(index)
        _check_depth(world, path, len(path))
        yield partial(world.pool.evict, world.keys[index]), Floor(path, matched=len(path))
        if _depth(world, path) > world.plan.system:
            raise AssertionError(f"{world.plan.shape}: evicted conversation {index} is still found")


def _boundaries(world: World, end: int) -> list[tuple[int, str]]:
    """Every turn's boundaries are declared again in each later prompt."""
    system = [(world.plan.system, "system")] if world.plan.system else []
    return [*system, (world.plan.tokens - ANSWER_TOKENS, "turn"), (end, "turn")]


def _depth(world: World, tokens: Tokens) -> int:
    found = world.pool.lookup(Prompt(tokens, namespace=SPACE))
    return found[-1].position if found else 0


def _check_depth(world: World, tokens: Tokens, right: int) -> None:
    depth = _depth(world, tokens)
    if depth != right:
        raise AssertionError(
            f"{world.plan.shape}: resumes at {depth} of {len(tokens)}, not at {right}"
        )
