"""Ghosts: what is remembered of evicted entries, and for how long."""

from __future__ import annotations

from ninfer_pool import PoolConfig
from tests.core.shop import driver


def test_a_ghost_is_not_that_of_another_image() -> None:
    shop = driver()
    key = shop.serve(shop.prompt(range(20), media=[(4, 8, "cat")])).key
    assert key is not None
    assert shop.pool.evict(key)
    reasons = [
        shop.pool.explain(shop.prompt(range(20), media=[(4, 8, name)])).reason
        for name in ("cat", "dog")
    ]
    assert reasons == ["evicted", "no_entry"]


def test_a_ghost_that_is_forgotten_leaves_nothing_behind() -> None:
    shop = driver(ghosts=1, max_entries=1)
    for number in range(3):
        shop.serve(range(100 * number, 100 * number + 5 + number))
    reasons = [
        shop.pool.explain(shop.prompt(range(100 * number, 100 * number + 5 + number))).reason
        for number in range(3)
    ]
    assert reasons == ["no_entry", "evicted", "hit"]
    assert len(shop.pool.state.ghosts._counts) == 1


def test_as_many_ghosts_as_documented() -> None:
    assert PoolConfig(num_pages=9, page_bytes=16, image_bytes=16).ghosts == 1024


def test_few_ghosts_are_remembered() -> None:
    for ghosts, reasons in ((0, ["no_entry"] * 2), (1, ["no_entry", "evicted"])):
        shop = driver(ghosts=ghosts, max_entries=1)
        for number in range(3):
            shop.serve(range(100 * number, 100 * number + 5))
        prompts = [shop.prompt(range(100 * number, 100 * number + 5)) for number in range(2)]
        assert [shop.pool.explain(prompt).reason for prompt in prompts] == reasons
