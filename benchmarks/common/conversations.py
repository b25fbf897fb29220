"""Pools filled in a known shape, for the measurements in them.

Every conversation follows from its number, so none needs to be stored. Pages and images have
the bytes of the 27B model with INT8 KV; no slab is allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ninfer_pool import Lease, Namespace, PoolConfig, PrefixPool, Prompt

Tokens = NDArray[np.int32]

PAGE_TOKENS = 64
PAGE_BYTES = 2_297_856
IMAGE_BYTES = 153_954_304
VOCABULARY = 150_000
SYSTEM_TOKENS = 10_000
TURN_TOKENS = 500
ANSWER_TOKENS = 250
CHECKPOINTS = 4
SPARE_PAGES = 24
SPARE_IMAGES = 40
SHAPES = ("agent", "unrelated")
SPACE = Namespace(
    weights="sha256:bench", kv_dtype="int8-g64", rope="theta=1e7,max=262144", draft="mtp3"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """The conversations of a pool, of `tokens` tokens each.

    Of shape ``agent`` they share a system prompt; ``unrelated`` ones share nothing. ``marks`` are
    unrelated, with a checkpoint every few tokens. Of ``forks`` the first is whole; the others
    branch off it, each a little later.
    """

    shape: str
    tokens: int
    entries: int

    @property
    def system(self) -> int:
        """Leading tokens that all conversations share."""
        return min(SYSTEM_TOKENS, self.tokens // 2) if self.shape == "agent" else 0

    @property
    def middle(self) -> int:
        """The position halfway through a conversation's own tokens."""
        return (self.system + self.tokens) // 2

    @property
    def stored_tokens(self) -> int:
        """Tokens that a pool of one of `SHAPES` retains, shared ones once."""
        return self.system + self.entries * (self.tokens - self.system)

    def path(self, index: int) -> Tokens:
        """Return the tokens of one conversation; the first one of its own occurs nowhere else."""
        own = random_tokens(self.tokens - self.system, 1, index)
        own[0] = VOCABULARY + index
        return np.concatenate([random_tokens(self.system, 0), own])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FilledPool:
    """A filled pool; `keys[i]` names its conversation i."""

    plan: Conversations
    pool: PrefixPool
    keys: Sequence[str]


def random_tokens(count: int, *seed: int) -> Tokens:
    """Return `count` token ids that depend on the seed alone."""
    return np.random.default_rng(seed).integers(0, VOCABULARY, count, dtype=np.int32)


def filled(plan: Conversations) -> FilledPool:
    """Serve each conversation as one request, prompt and answer; O(all tokens)."""
    pages = plan.entries * (plan.tokens // PAGE_TOKENS + SPARE_PAGES)
    pool = _pool(pages, images=plan.entries * CHECKPOINTS)
    keys = [store(pool, plan.path(index), system=plan.system) for index in range(plan.entries)]
    return FilledPool(plan=plan, pool=pool, keys=keys)


def marked(*, tokens: int, marks: int) -> FilledPool:
    """Store conversations with a checkpoint every few tokens, `marks` of them in all."""
    entries = -(-marks // (tokens // 2))
    plan = Conversations(shape="marks", tokens=tokens, entries=entries)
    pool = _pool(entries * (tokens // PAGE_TOKENS + SPARE_PAGES) + marks, images=0)
    stops = _spread(tokens, marks // entries)
    keys = [store_stops(pool, plan.path(index), stops=stops) for index in range(entries)]
    return FilledPool(plan=plan, pool=pool, keys=keys)


def forked(*, tokens: int, forks: int) -> FilledPool:
    """Store one conversation, and `forks` others that branch off it at different positions."""
    plan = Conversations(shape="forks", tokens=tokens, entries=forks + 1)
    pool = _pool(tokens // PAGE_TOKENS + SPARE_PAGES + 8 * forks, images=0)
    path, stops = plan.path(0), _spread(tokens, forks + 1)
    keys = [store_stops(pool, path, stops=stops)]
    for index, stop in enumerate(stops[:-1]):
        own = random_tokens(PAGE_TOKENS, 2, index)
        own[0] = VOCABULARY + 1
        branch = np.concatenate([path[:stop], own])
        keys.append(store_stops(pool, branch, stops=[len(branch)]))
    return FilledPool(plan=plan, pool=pool, keys=keys)


def _spread(tokens: int, count: int) -> list[int]:
    """Return `count` positions at even distances, the last one the end."""
    positions: list[int] = np.linspace(0, tokens, count + 1).astype(int).tolist()
    return positions[1:]


def _pool(pages: int, *, images: int) -> PrefixPool:
    """Return a pool with room for everything; ``images=0`` stands for many small ones."""
    image_bytes = IMAGE_BYTES if images else PAGE_BYTES
    each = -(-image_bytes // PAGE_BYTES)
    config = PoolConfig(
        num_pages=pages + (images + SPARE_IMAGES) * each,
        page_bytes=PAGE_BYTES,
        image_bytes=image_bytes,
        lanes=2,
    )
    return PrefixPool(config)


def store(pool: PrefixPool, path: Tokens, *, system: int) -> str:
    """Serve a whole conversation as one request and retain it; return its key."""
    prompt_tokens = len(path) - ANSWER_TOKENS
    boundaries = [(system, "system"), (prompt_tokens, "turn")][0 if system else 1 :]
    prompt = Prompt(path[:prompt_tokens], namespace=SPACE, boundaries=boundaries)
    return turn(pool, prompt, path)


def turn(pool: PrefixPool, prompt: Prompt, path: Tokens) -> str:
    """Serve one request as an engine does: acquire, prefill by the cuts, decode, commit."""
    with admitted(pool, prompt, path) as lease:
        run(lease, path)
        return _key(lease)


def admitted(pool: PrefixPool, prompt: Prompt, path: Tokens) -> Lease:
    """Acquire a lease of a prompt with room for its answer, the rest of `path`."""
    lease = pool.acquire(prompt, reserve_tokens=len(path) - len(prompt))
    assert isinstance(lease, Lease)
    return lease


def run(lease: Lease, path: Tokens) -> None:
    """Make the calls of an engine between acquire and commit."""
    lease.restore()
    for chunk in lease.chunks():
        lease.advance(path[chunk.begin : chunk.end])
        if chunk.checkpoint:
            lease.checkpoint(chunk.checkpoint, position=chunk.end)
    lease.advance(path[len(lease.prompt) :])
    lease.checkpoint("frontier", position=len(path))


def store_stops(pool: PrefixPool, path: Tokens, *, stops: Sequence[int]) -> str:
    """Serve a prompt with a checkpoint at every stop, the last one its end."""
    lease = pool.acquire(Prompt(path, namespace=SPACE))
    assert isinstance(lease, Lease)
    with lease:
        lease.restore()
        for stop in stops:
            lease.advance(path[lease.frontier : stop])
            lease.checkpoint("grid", position=stop)
        return _key(lease)


def _key(lease: Lease) -> str:
    key = lease.commit()
    assert key is not None, "there was room, and nothing was retained"
    return key
