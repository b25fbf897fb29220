"""Pages that several checkpoints share: each table is of one path, and each is counted once."""

from __future__ import annotations

from typing import Any

from tests.core.shop import begun, driver


def test_a_plain_resume_below_its_source_shares_no_table_with_it() -> None:
    """Resumed at 7 of 8, it wrote a page of its own where the source holds another."""
    shop = driver(image_bytes=0, end_logits=False)
    shop.serve(range(1, 9))
    shop.serve(range(1, 9), answer=[50, 51, 52])
    assert shop.depth([*range(1, 9), 50, 51, 52, 53]) == 11


def test_a_removed_source_is_recounted_as_its_lease_took_it() -> None:
    """Quarantined under another lease, its table then grew otherwise: `check` was wrong."""
    shop = driver(lanes=3)
    shop.serve(range(1, 17), boundaries=[(10, "system"), (16, "turn")])
    reader, breaker = begun(shop, range(1, 17)), begun(shop, range(1, 17))
    assert reader.start == breaker.start == 16
    breaker.quarantine()
    shop.serve([*range(1, 17), 7, 8, 9], boundaries=[(10, "system")])
    reader.release()
    shop.audit()


def test_a_table_is_of_one_path() -> None:
    """Checkpoints of one commit that lie before and past a fork share no table to grow."""
    shop = driver(grid=4, page_tokens=4)
    stem = list(range(1, 16))
    shop.serve([*stem, 40, 41, 42], boundaries=[(18, "turn")])
    shop.serve([*stem, 50, 51, 52], boundaries=[(8, "system"), (15, "junction")], read=False)
    shop.audit()
    tables: dict[Any, Any] = {}
    for root in shop.pool.state.catalog.roots.values():
        for node in root.subtree():
            for mark in node.checkpoints:
                assert tables.setdefault(mark.table, node) is node


def test_a_partly_filled_page_below_an_interned_one_is_that_page() -> None:
    """Else a commit held a page more than its budget had been asked for."""
    shop = driver(image_bytes=0, retained_bytes=4 * 16)
    shop.serve(range(1, 9), boundaries=[(6, "turn"), (8, "turn")])
    shop.serve(range(1, 9), boundaries=[(6, "system"), (8, "turn")], read=False, answer=range(8))
    assert shop.pool.stats().retained_bytes == 4 * 16


def test_a_tail_that_two_computations_made_keeps_the_pages_of_each() -> None:
    """Resumed before its end, generated alike and further, then parted from: two page tables."""
    shop = driver()
    stem = list(range(100, 103))
    ends = [[1, 2], [1, 2, 3, 4]]
    for end in ends:
        lease = begun(shop, stem, boundaries=[(3, "turn")], exact=True, reserve_tokens=4)
        shop.prefill(lease)
        shop.decode(lease, end)
        shop.finish(lease)
        shop.pool.check()
    shop.serve([*stem, 90, 91], boundaries=[(3, "turn"), (5, "turn")])
    shop.pool.check()
