"""Hypothesis strategies: prompts that branch from common stems, and pools of every kind."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from ninfer_pool.config import PoolConfig
from ninfer_pool.namespace import Namespace
from ninfer_pool.policy import POLICIES
from ninfer_pool.prompt import KINDS, Prompt

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
