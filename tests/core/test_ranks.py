"""A model over several ranks: each has a pool of its own, and all of them decide alike."""

from __future__ import annotations

import random
from typing import Any

from ninfer_pool import Lease, Namespace, PoolConfig, PrefixPool, Prompt


def decisions(rank: int, *, seed: int) -> list[Any]:
    """All that one rank's pool decided over the same calls."""
    space = Namespace(weights="w", kv_dtype="bf16", rank=rank, world_size=2)
    config = PoolConfig(num_pages=120, page_bytes=64, image_bytes=256, lanes=2, grid=32)
    pool, source = PrefixPool(config), random.Random(seed)
    seen: list[Any] = []
    stems = [[source.randrange(9) for _ in range(80)] for _ in range(4)]
    for _ in range(150):
        stem = source.choice(stems)
        tokens = stem[: source.randrange(1, 80)] + [source.randrange(9) for _ in range(20)]
        lease = pool.acquire(Prompt(tokens, namespace=space), reserve_tokens=4)
        if not isinstance(lease, Lease):
            seen.append(pool.last_refusal)
            continue
        seen += [lease.start, lease.lane, lease.pages.tolist(), lease.restore(), lease.explanation]
        for chunk in lease.chunks():
            lease.advance(tokens[chunk.begin : chunk.end])
            if chunk.checkpoint:
                seen.append(lease.checkpoint(chunk.checkpoint, position=chunk.end))
        if source.random() < 0.9:
            lease.commit()
        else:
            lease.release()
    seen += [(event.kind, event.positions, event.bytes) for event in pool.events()]
    return seen


def test_two_ranks_given_the_same_calls_make_the_same_decisions() -> None:
    for seed in range(3):
        first, second = (decisions(rank, seed=seed) for rank in range(2))
        assert len(first) > 500
        assert first == second


def test_ranks_share_no_key() -> None:
    spaces = [Namespace(weights="w", kv_dtype="bf16", rank=r, world_size=2) for r in range(2)]
    pool = PrefixPool(PoolConfig(num_pages=10, page_bytes=64, image_bytes=64))
    assert len({pool.key(Prompt([1, 2], namespace=space)) for space in spaces}) == 2
