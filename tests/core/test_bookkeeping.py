"""What the pool's own memory costs: bytes a retained token, an entry, a checkpoint."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from ninfer_pool import (
    Lease,
    Namespace,
    PoolConfig,
    PrefixPool,
    Prompt,
)
from tests.core.shop import driver

SPACE = Namespace(weights="sha256:1", kv_dtype="bf16")
TOKEN, ENTRY, CHECKPOINT = 6, 2048, 256
"""Bytes allowed for each."""


def made() -> PrefixPool:
    return PrefixPool(PoolConfig(num_pages=8192, page_bytes=4096, image_bytes=8192, ghosts=0))


def serve(pool: PrefixPool, tokens: np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
    lease = pool.acquire(Prompt(tokens, namespace=SPACE))
    assert isinstance(lease, Lease)
    with lease:
        for chunk in lease.chunks():
            lease.advance(tokens[chunk.begin : chunk.end])
            if chunk.checkpoint:
                lease.checkpoint(chunk.checkpoint, position=chunk.end)
        lease.checkpoint("frontier", position=lease.frontier)
        lease.commit()


def held(pool: PrefixPool, before: int) -> tuple[int, int]:
    """Bytes held since `before`, and bytes allowed for what is retained.

    Tokens count once where sequences share them: what the index's paths hold.
    """
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] - before
    roots = pool.state.catalog.roots.values()
    tokens = sum(path.end - path.start for root in roots for path in root.subtree())
    stats = pool.stats()
    allowed = TOKEN * tokens + ENTRY * stats.entries + CHECKPOINT * stats.checkpoints
    return used, allowed


def long_conversation() -> tuple[int, int]:
    """One conversation of 60 turns, 1,000 tokens each."""
    tokens = np.random.default_rng(1).integers(0, 50_000, 60_000).astype(np.int32)
    pool = made()
    before = tracemalloc.get_traced_memory()[0]
    for turn in range(1, 61):
        serve(pool, tokens[: 1000 * turn].copy())
    used, allowed = held(pool, before)
    assert pool.lookup(Prompt(tokens, namespace=SPACE)).deepest == 60_000
    return used, allowed


def unrelated_entries() -> tuple[int, int]:
    """32 entries that share nothing."""
    rng = np.random.default_rng(2)
    pool = made()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(32):
        serve(pool, rng.integers(0, 50_000, 4096).astype(np.int32))
    used, allowed = held(pool, before)
    assert pool.stats().entries == 32
    return used, allowed


@pytest.mark.parametrize("shape", ["long_conversation", "unrelated_entries"])
def test_bookkeeping_stays_within_its_bytes(shape: str) -> None:
    """In a process of its own: a coverage tool's own memory would be counted too."""
    root = Path(__file__).parents[2]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    answer = subprocess.run(
        [sys.executable, "-m", "tests.core.test_bookkeeping", shape],
        cwd=root,
        env=plain,
        capture_output=True,
        text=True,
        check=True,
    )
    used, allowed = map(int, answer.stdout.split())
    assert 0 < used <= allowed


if __name__ == "__main__":
    tracemalloc.start()
    print(*globals()[sys.argv[1]]())


def test_a_namespace_of_which_nothing_is_left_is_forgotten() -> None:
    shop = driver()
    for number in range(5):
        space = Namespace(weights="w", kv_dtype="k", salt=f"tenant {number}")
        shop.pool.key(shop.prompt(range(20), namespace=space))
        shop.serve(shop.prompt(range(20), namespace=space))
        shop.pool.clear()
    assert not shop.pool.state.catalog.roots
    assert not shop.pool.state.catalog._digests


PROMPT = list(range(20))


def test_asking_for_a_key_leaves_nothing_behind() -> None:
    shop = driver()
    shop.pool.key(shop.prompt(PROMPT))
    assert not shop.pool.state.catalog._digests
