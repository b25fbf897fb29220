"""Forks in the radix index: long labels, entries inside others, forks that lose their tip."""

from __future__ import annotations

import pytest

from ninfer_pool.core import radix as index
from tests.core.shop import driver

PAGE = 16


def test_an_entry_that_forks_inside_another_is_its_own_from_there() -> None:
    shop = driver()
    shop.serve(range(40))
    shop.serve([*range(20), 90, 91, 92, 93])
    infos = {entry.tokens: entry.bytes // PAGE for entry in shop.pool.entries()}
    assert infos[24] >= 1 + 2
    entries = shop.pool.state.catalog.entries.values()
    assert sorted(shop.pool.state.catalog.base(entry) for entry in entries) == [20, 20]


def test_plain_attention_retains_a_sibling_as_long_as_what_it_resumed_inside() -> None:
    shop = driver(image_bytes=0, end_logits=False)
    shop.serve([*range(20), 91, 7])
    shop.serve([*range(20), 92, 7])
    assert shop.depth([*range(20), 92, 7, 8]) == 22
    assert len(shop.pool.entries()) == 2


def test_a_fork_that_loses_its_tip_takes_over_the_forks_below() -> None:
    shop = driver()
    stem, branch = list(range(10)), list(range(30, 35))
    talks = [
        [*stem, 1, 2, 3],
        [*stem, *branch, 4, 5, 6],
        [*stem, *branch, 60, 61, 62, 63, 64],
        [*stem, *branch, 60, 61, 62, 7],
    ]
    keys = [shop.serve(talk).key for talk in talks]
    assert shop.pool.evict(keys[1] or "")
    shop.audit()
    assert [shop.depth(talk) for talk in talks] == [13, 15, 20, 19]
    assert shop.pool.evict(keys[2] or "")
    shop.audit()
    assert [shop.depth(talk) for talk in talks] == [13, 15, 18, 19]


def test_a_prefix_of_two_forks_is_retained_without_an_entry() -> None:
    shop = driver()
    stem = list(range(10))
    keys = [shop.serve([*stem, 50 + number]).key for number in range(3)]
    assert shop.pool.evict(keys[0] or "")
    shop.serve(stem[:8])
    assert shop.depth(stem[:8]) == 8
    assert sorted(entry.tokens for entry in shop.pool.entries()) == [11, 11]
    assert {p for entry in shop.pool.entries() for p, _ in entry.checkpoints} == {8, 10, 11}


@pytest.mark.parametrize("at", [0, 1, 7, 8, 9, 15, 16, 38, 39, 40])
def test_long_labels_are_compared_chunk_by_chunk(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "CHUNK", 32)
    shop = driver()
    shop.serve(range(40))
    other = [*range(at), *range(900, 910)]
    assert shop.pool.explain(shop.prompt(other)).matched == at
    shop.serve(other)
    assert shop.depth(range(40)) == 40
