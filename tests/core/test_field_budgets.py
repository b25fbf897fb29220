"""Budgets that other engines did not keep to; the numbers are those of the reports."""

from __future__ import annotations

from tests.core.field_world import ALL, IMAGE, PAGE, Chat, begun, driver, talk


def test_field_19_every_skipped_capture_is_counted() -> None:
    shop = driver(pages=12)
    shop.serve(talk(0), boundaries=[(8, "system"), (20, "turn"), (24, "history")])
    counters = shop.pool.stats().counters
    assert counters.captures_skipped > 0
    assert counters.captures_skipped == counters.skipped_no_room + counters.skipped_media


def test_field_31_the_donor_may_go() -> None:
    shop = driver()
    key = shop.serve(talk(0), boundaries=[(24, "system")]).key
    child = [*talk(0, 24), 1, 2, 3]
    shop.serve(child, boundaries=[(24, "system")])
    assert key is not None
    assert shop.pool.evict(key)
    shop.audit()
    assert shop.serve([*child, 4]).start == 27


def test_field_32_the_budget_holds_during_every_operation() -> None:
    shop = driver(pages=200, retained_bytes=30 * PAGE)
    for number in range(30):
        lease = begun(shop, talk(number, 20 + number), boundaries=[(8, "system")])
        for _ in range(3):
            shop.prefill(lease, chunks=1, publish=True)
            assert shop.pool.stats().retained_bytes <= 30 * PAGE
        shop.finish(lease)
        assert shop.pool.stats().retained_bytes <= 30 * PAGE
        shop.audit()


def test_field_33_replacing_keeps_to_the_budget() -> None:
    shop = driver(pages=200, retained_bytes=30 * PAGE)
    for number in range(12):
        shop.serve(talk(0), answer=[number, number, 1])
        assert shop.pool.stats().retained_bytes <= 30 * PAGE
    assert len(shop.pool.entries()) == 1


def test_field_34_shared_bytes_count_once_and_clear_frees_all() -> None:
    shop = driver()
    for last in range(8):
        shop.serve([*talk(0), last], boundaries=[(40, "system")])
    pages = shop.pool.stats().retained_bytes // PAGE
    assert pages == 10 + IMAGE + 8 * (1 + IMAGE)
    assert shop.pool.clear() == 8
    assert shop.pool.stats().retained_bytes == 0
    assert shop.pool.stats().pages_free == ALL


def test_field_35_a_full_pool_takes_new_entries() -> None:
    shop = driver(pages=40)
    for number in range(40):
        shop.serve(talk(number, 30))
        assert shop.serve([*talk(number, 30), 1]).start == 30


def test_field_36_two_passes_over_many_prefixes() -> None:
    shop = driver(pages=39 * 14)
    for number in range(39):
        assert shop.serve(talk(number)).start == 0
    for number in range(39):
        assert shop.serve(talk(number)).start == 40
    assert shop.pool.stats().counters.evictions == 0


def test_field_38_the_frontier_moves_as_long_as_there_are_bytes() -> None:
    shop = driver(pages=200, retained_bytes=80 * PAGE)
    chat = Chat(shop, 0)
    assert [chat.turn() for _ in range(20)][1:] == [6] * 19


def test_field_39_everything_pinned_is_a_no() -> None:
    shop = driver(pages=12)
    shop.serve(talk(0), pin=True)
    assert shop.ask(talk(1)) is None
    assert shop.ask(talk(0)) is not None
