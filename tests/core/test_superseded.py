"""Superseded checkpoints: the first to be evicted, removed with their entry, revived by a hit."""

from __future__ import annotations

import pytest

from tests.core.shop import begun, driver, generate
from tests.machinery.driver import Driver


def with_a_superseded_tail(shop: Driver) -> list[int]:
    """Leave checkpoints at 20, 24 and 28, then let a sequence part at 20; return the first."""
    first = list(range(20))
    lease = begun(shop, first, reserve_tokens=8)
    shop.prefill(lease)
    for _ in range(2):
        shop.decode(lease, [70, 71, 72, 73])
        shop.engine.execute(lease.checkpoint("frontier", position=lease.frontier))
    lease.commit()
    shop.serve([*first, 9, 9, 9])
    return [*first, 70, 71, 72, 73, 70, 71, 72, 73]


def test_a_superseded_tail_that_is_consumed_is_an_entry_again() -> None:
    shop = driver()
    tail = with_a_superseded_tail(shop)
    assert len(shop.pool.entries()) == 1
    assert shop.serve(tail, retain=False).start == 28
    assert sorted(entry.tokens for entry in shop.pool.entries()) == [23, 28]
    shop.pool.clear()
    assert shop.pool.stats().checkpoints == 0


def test_a_revived_tail_counts_in_k() -> None:
    shop = driver(max_entries=1)
    tail = with_a_superseded_tail(shop)
    shop.serve([*tail, 5])
    assert [entry.tokens for entry in shop.pool.entries()] == [29]


def test_a_revived_tail_gives_way_where_all_others_are_pinned() -> None:
    shop = driver(max_entries=1)
    tail = with_a_superseded_tail(shop)
    (entry,) = shop.pool.entries()
    assert shop.pool.pin(entry.key)
    shop.serve([*tail, 5])
    assert [entry.tokens for entry in shop.pool.entries()] == [23]


def test_a_growing_entry_leaves_the_table_of_a_tail_past_the_parting_alone() -> None:
    shop = driver()
    tail = with_a_superseded_tail(shop)
    begun(shop, [*tail[:20], 9, 9, 9]).quarantine()
    shop.audit()
    assert shop.serve([*tail[:26], 5, 5]).start == 24
    assert shop.serve(tail).start == 28


PROMPT = list(range(20))


FIRST = [70, 71, 72, 73, 74, 75, 76, 77]


def answered_thrice(shop: Driver) -> list[int]:
    """Answer one prompt three times, parting at 22; return the first, now superseded, whole."""
    generate(shop, PROMPT, FIRST[:4], FIRST[4:])
    generate(shop, PROMPT, [70, 71, 9, 9])
    generate(shop, PROMPT, [70, 71, 8, 8])
    return PROMPT + FIRST


def test_the_tails_between_two_checkpoints_go_with_the_deeper_one() -> None:
    shop = driver()
    answered_thrice(shop)
    (entry,) = shop.pool.entries()
    assert shop.pool.evict(entry.key)
    shop.audit()
    assert shop.pool.stats().checkpoints == 0


def test_a_dead_tail_beside_a_revived_one_goes_with_it() -> None:
    shop = driver()
    first = answered_thrice(shop)
    assert shop.serve(first, retain=False).start == 28
    last, revived = sorted(shop.pool.entries(), key=lambda entry: entry.tokens)
    assert shop.pool.evict(last.key)
    shop.audit()
    assert shop.pool.evict(revived.key)
    shop.audit()
    assert shop.pool.stats().checkpoints == 0


@pytest.mark.parametrize("events", [0, 99])
def test_a_tail_goes_first_whether_or_not_events_are_kept(events: int) -> None:
    shop = driver(events=events, retained_bytes=16 * 24)
    answered_thrice(shop)
    gone = shop.pool.key(shop.prompt([*PROMPT, *FIRST[:4]]))
    shop.serve(range(100, 124))
    shop.serve(range(200, 208))
    assert shop.depth(PROMPT) == 20
    told = {event.key for event in shop.pool.events() if event.kind == "evicted"}
    assert (gone in told) == bool(events)


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
