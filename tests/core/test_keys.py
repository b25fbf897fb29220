"""Keys: the documented encoding, written out by hand."""

from __future__ import annotations

import struct

import pytest
import xxhash

from ninfer_pool import Namespace, PoolConfig, PrefixPool, Prompt

SPACE = Namespace(weights="w", kv_dtype="k", adapter="é", world_size=2, rank=1)


def encoded_space(*, grid: int, min_chunk: int) -> bytes:
    texts = b"".join(
        struct.pack("<I", len(raw)) + raw for raw in (b"w", b"k", b"", b"none", "é".encode())
    )
    numbers = struct.pack("<4q", 1, 2, grid, min_chunk)
    return b"NPns\x01" + texts + b"\xff\xff\xff\xff" + numbers


def test_a_key_is_the_hash_of_the_documented_encoding() -> None:
    space = xxhash.xxh3_128_digest(encoded_space(grid=64, min_chunk=3))
    payload = b"M" + struct.pack("<q", 2) + struct.pack("<I", 3) + b"cat"
    raw = b"NPky\x01" + struct.pack("<I", 16) + space
    raw += struct.pack("<Q3i", 12, 7, 8, 9)
    raw += struct.pack("<QQI", 1, 1, len(payload)) + payload
    pool = PrefixPool(PoolConfig(num_pages=9, page_bytes=8, image_bytes=8, grid=64, min_chunk=3))
    prompt = Prompt([7, 8, 9], namespace=SPACE, media=[(1, 3, "cat")])
    assert pool.key(prompt) == xxhash.xxh3_128_hexdigest(raw)


@pytest.mark.parametrize("changes", [{"grid": 128}, {"min_chunk": 2}])
def test_where_prefill_is_cut_is_part_of_the_identity(changes: dict[str, int]) -> None:
    config = PoolConfig(num_pages=9, page_bytes=8, image_bytes=8, grid=64)
    prompt = Prompt([1], namespace=SPACE)
    other = PrefixPool(config.replace(**changes))
    assert PrefixPool(config).key(prompt) != other.key(prompt)


def test_what_is_length_prefixed_cannot_run_together() -> None:
    one = Namespace(weights="ab", kv_dtype="c")
    two = Namespace(weights="a", kv_dtype="bc")
    assert one.digest(grid=64, min_chunk=0) != two.digest(grid=64, min_chunk=0)
