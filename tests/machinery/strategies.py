"""Hypothesis strategies: prompts that branch from common stems, workloads, pools and budgets."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from ninfer_pool.core.config import PoolConfig
from ninfer_pool.core.identity import Namespace
from ninfer_pool.core.policy import POLICIES
from ninfer_pool.core.prompt import KINDS, Prompt

SPACES = (
    Namespace(weights="a", kv_dtype="int8"),
    Namespace(weights="a", kv_dtype="int8", salt="tenant"),
    Namespace(weights="a", kv_dtype="bf16"),
)
STEMS = tuple(tuple(3 + (at * at + 7 * stem) % 5 for at in range(24)) for stem in range(2))
TOKENS = st.integers(min_value=0, max_value=2)


@st.composite
def token_lists(draw: st.DrawFn) -> list[int]:
    """A beginning of one of two stems, then a short branch over three tokens."""
    stem = draw(st.sampled_from(STEMS))
    head = stem[: draw(st.sampled_from((0, 4, 8, 9, 15, 16, 20, 24)))]
    return [*head, *draw(st.lists(TOKENS, min_size=1, max_size=9))]


@st.composite
def attributes(draw: st.DrawFn, count: int) -> dict[str, Any]:
    """Media, positions and token types for a prompt of ``count`` tokens; mostly none."""
    options: dict[str, Any] = {}
    if not draw(st.sampled_from((False, False, True))):
        return options
    begin = draw(st.integers(0, count - 1))
    end = draw(st.integers(begin + 1, count))
    if draw(st.booleans()):
        options["media"] = [(begin, end, draw(st.sampled_from(("x", "y", "x", "y", None))))]
    if draw(st.booleans()):
        axes = np.tile(np.arange(count, dtype=np.int32), (3, 1))
        axes[1, begin:] += np.int32(draw(st.integers(0, 1)))
        options["positions"] = axes
    if draw(st.booleans()):
        types = np.zeros(count, dtype=np.int32)
        types[begin:end] = draw(st.integers(0, 1))
        options["token_types"] = types
    return options


@st.composite
def boundaries(
    draw: st.DrawFn, count: int, media: list[tuple[int, int, str | None]]
) -> list[tuple[int, str]]:
    """Up to three declared boundaries, outside media."""
    places = st.lists(st.integers(1, count), max_size=3, unique=True)
    free = [at for at in draw(places) if not any(begin < at < end for begin, end, _ in media)]
    return [(at, draw(st.sampled_from(KINDS[:4]))) for at in sorted(free)]


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    """Prompts that often share beginnings, and sometimes differ in what tokens carry alone."""
    tokens = draw(token_lists())
    options = draw(attributes(len(tokens)))
    return Prompt(
        tokens,
        namespace=draw(st.sampled_from((SPACES[0], SPACES[0], SPACES[0], *SPACES))),
        boundaries=draw(boundaries(len(tokens), options.get("media", []))),
        **options,
    )


@st.composite
def configs(draw: st.DrawFn, *, tight: bool, clock: Any = None) -> PoolConfig:
    """Small pools: with room for all that a test could leave, or with hardly any."""
    image = draw(st.sampled_from((0, 16, 32)))
    pages = draw(st.integers(12, 40)) if tight else 20_000
    retained = draw(st.one_of(st.none(), st.integers(3, pages))) if tight else None
    return PoolConfig(
        num_pages=pages,
        page_bytes=16,
        image_bytes=image,
        page_tokens=4,
        grid=draw(st.sampled_from((8, 8, 16))),
        lanes=draw(st.integers(1, 3)),
        retained_bytes=None if retained is None else 16 * retained,
        max_entries=draw(st.sampled_from((None, 1, 2, 3))) if tight else None,
        policy=draw(st.sampled_from(sorted(POLICIES))),
        affinity=draw(st.sampled_from(("prefer", "prefer", "strict"))),
        end_logits=draw(st.booleans()),
        min_chunk=draw(st.sampled_from((0, 0, 3))),
        minimum_tokens=draw(st.sampled_from((0, 0, 5))),
        ghosts=draw(st.sampled_from((0, 3, 64))) if tight else 0,
        clock=clock,
    )


class Request(NamedTuple):
    """One request of a workload."""

    prompt: Prompt
    answer: tuple[int, ...]
    """Tokens that are decoded after the prompt."""
    options: dict[str, Any]
    """For `PrefixPool.acquire`."""


@st.composite
def workloads(draw: st.DrawFn, *, most: int = 12) -> list[Request]:
    """Up to ``most`` requests of a few conversations in turn.

    A conversation goes on from its last answer, asks the same again, or begins anew from an
    earlier point; each prompt declares where those before it ended, as a server does.
    """
    count = draw(st.integers(1, 4))
    talks = [draw(token_lists()) for _ in range(count)]
    spaces = [draw(st.sampled_from((SPACES[0], SPACES[0], *SPACES))) for _ in talks]
    ends: list[list[int]] = [[] for _ in talks]
    requests = []
    for _ in range(draw(st.integers(1, most))):
        at = draw(st.integers(0, count - 1))
        tokens = talks[at][: draw(st.sampled_from((None, None, None, len(talks[at]) // 2 + 1)))]
        declared = [(end, "turn") for end in ends[at] if end < len(tokens)]
        prompt = Prompt(tokens, namespace=spaces[at], boundaries=declared)
        answer = tuple(draw(st.lists(TOKENS, max_size=3)))
        options = {"pin": draw(st.integers(0, 7)) == 7, "priority": draw(st.integers(-1, 1))}
        requests.append(Request(prompt, answer, options))
        if draw(st.booleans()):
            ends[at] = sorted({*(end for end in ends[at] if end < len(tokens)), len(tokens)})
            talks[at] = [*tokens, *answer, *draw(st.lists(TOKENS, min_size=1, max_size=4))]
    return requests


@st.composite
def budgets(draw: st.DrawFn, config: PoolConfig) -> list[PoolConfig]:
    """The same pool with less and less room: pages, retained bytes and K shrink, never grow."""
    least = 1 + config.image_pages
    pages, kept, most = config.num_pages, config.retained_pages, config.max_entries
    found = []
    for _ in range(draw(st.integers(1, 4))):
        pages = draw(st.integers(least, pages))
        kept = draw(st.integers(least, min(kept, pages)))
        most = draw(st.one_of(st.none(), st.integers(1, 4))) if most is None else max(1, most - 1)
        changes = {"num_pages": pages, "retained_bytes": kept * config.page_bytes}
        found.append(config.replace(max_entries=most, **changes))
    return found
