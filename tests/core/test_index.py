"""The radix index and what hangs on it: long comparisons, tails of tails, pins that move."""

from __future__ import annotations

from typing import Any

import pytest

from ninfer_pool import Lease, PoolConfig
from ninfer_pool.core import radix as index
from tests.machinery.driver import Driver


def driver(**changes: Any) -> Driver:
    config = PoolConfig(num_pages=400, page_bytes=16, image_bytes=32, page_tokens=4, grid=64)
    return Driver(config.replace(**changes))


def begun(shop: Driver, tokens: Any, **options: Any) -> Lease:
    lease = shop.begin(tokens, **options)
    assert lease is not None
    return lease


def generate(shop: Driver, tokens: list[int], *stretches: list[int]) -> None:
    """Serve a prompt and take a checkpoint after each stretch of the answer."""
    lease = begun(shop, tokens, reserve_tokens=sum(map(len, stretches)))
    shop.prefill(lease)
    for stretch in stretches:
        shop.decode(lease, stretch)
        shop.engine.execute(lease.checkpoint("frontier", position=lease.frontier))
    lease.commit()
    shop.audit()


@pytest.mark.parametrize("at", [0, 1, 7, 8, 9, 15, 16, 38, 39, 40])
def test_long_labels_are_compared_chunk_by_chunk(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "CHUNK", 32)
    shop = driver()
    shop.serve(range(40))
    other = [*range(at), *range(900, 910)]
    assert shop.pool.explain(shop.prompt(other)).matched == at
    shop.serve(other)
    assert shop.depth(range(40)) == 40


def test_a_tail_that_has_tails_of_its_own_goes_whole() -> None:
    shop = driver()
    generate(shop, [1, 2, 3, 4], [5], [6], [7, 8])
    generate(shop, [1, 2, 3, 4, 5, 6], [9])
    assert shop.serve([1, 2, 3, 4], answer=[50, 51]).start == 4
    assert len(shop.pool.entries()) >= 1
    for entry in shop.pool.entries():
        assert shop.pool.evict(entry.key)
        shop.audit()
    shop.pool.clear()
    assert shop.pool.stats().checkpoints == 0


def test_dead_tails_go_with_the_entry_that_they_hang_on() -> None:
    shop = driver()
    generate(shop, [1, 2, 3, 4], [5], [6])
    shop.serve([1, 2, 3, 4, 5, 7, 7])
    assert shop.pool.stats().superseded >= 1
    (entry,) = shop.pool.entries()
    assert shop.pool.evict(entry.key)
    shop.audit()
    assert shop.pool.stats().checkpoints == 0


def test_a_tail_moves_with_the_forks_that_leave_it() -> None:
    shop = driver()
    generate(shop, [1, 2, 3, 4], [5], [6], [7], [8])
    generate(shop, [1, 2, 3, 4], [5, 60], [61])
    generate(shop, [1, 2, 3, 4], [50, 60], [61])
    assert shop.depth([1, 2, 3, 4, 5, 60, 61]) == 7
    assert shop.depth([1, 2, 3, 4, 5, 6, 7, 8]) == 8


def test_a_pin_moves_on_with_its_entry() -> None:
    shop = driver(retained_bytes=16 * 20)
    key = shop.serve(range(8)).key
    assert key is not None
    assert shop.pool.pin(key)
    assert shop.pool.pin(key)
    shop.serve(range(10))
    shop.serve(range(12))
    (entry,) = shop.pool.entries()
    assert entry.pinned
    for number in range(1, 6):
        shop.serve(range(100 * number, 100 * number + 9))
    assert shop.depth(range(12)) == 12
    assert shop.depth(range(8)) == 8
    assert shop.pool.unpin(entry.key)
    assert not shop.pool.unpin(entry.key)
    assert repr(next(iter(shop.pool.retained.entries.values())))


def test_what_lies_before_a_protected_tip_is_the_last_thing_to_go() -> None:
    shop = driver(num_pages=16, lanes=2)
    shop.serve(range(12), boundaries=[(4, "system")])
    reader = begun(shop, range(12))
    other = begun(shop, range(50, 74))
    shop.audit()
    assert shop.depth(range(12)) == 12
    assert shop.depth(range(4)) == 0
    reader.release()
    other.release()


def test_nothing_is_chosen_where_nothing_fits() -> None:
    shop = driver(num_pages=40, retained_bytes=16 * 5)
    assert shop.serve(range(20)).key is None
    assert shop.pool.stats().checkpoints == 0
    assert shop.pool.stats().counters.captures_skipped == 1


def test_few_ghosts_are_remembered() -> None:
    for ghosts, reasons in ((0, ["no_entry"] * 2), (1, ["no_entry", "evicted"])):
        shop = driver(ghosts=ghosts, max_entries=1)
        for number in range(3):
            shop.serve(range(100 * number, 100 * number + 5))
        prompts = [shop.prompt(range(100 * number, 100 * number + 5)) for number in range(2)]
        assert [shop.pool.explain(prompt).reason for prompt in prompts] == reasons


def test_checkpoints_of_one_position_and_other_cuts_stand_side_by_side() -> None:
    shop = driver()
    one = [(12, "turn")]
    two = [(5, "system"), (12, "turn")]
    shop.serve(range(12), boundaries=one)
    shop.serve(range(12), boundaries=two, read=False)
    for declared in (one, two):
        assert shop.serve(range(13), boundaries=declared, exact=True).start == 12
    shop.serve(range(12), boundaries=two, read=False)
    assert shop.pool.stats().counters.interned_pages > 0
    shop.audit()
