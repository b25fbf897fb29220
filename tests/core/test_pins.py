"""Pinned and leased checkpoints stay (G4), also where entries grow, fork or are quarantined."""

from __future__ import annotations

import pytest

from tests.core.shop import begun, driver


def test_a_pinned_entry_grows_after_its_inherited_tip_was_quarantined() -> None:
    shop = driver()
    first = shop.serve(range(1, 9)).key
    assert shop.pool.pin(str(first))
    shop.serve(range(1, 13))
    begun(shop, range(1, 13)).quarantine()
    shop.serve(range(1, 16))
    (entry,) = shop.pool.entries()
    assert (entry.pinned, entry.tokens) == (True, 15)


def test_what_is_pinned_anew_is_kept_though_it_was_inherited_before() -> None:
    shop = driver(num_pages=40)
    shop.pool.pin(str(shop.serve(range(1, 9)).key))
    grown = str(shop.serve(range(1, 13)).key)
    assert shop.pool.unpin(grown)
    assert shop.pool.pin(grown)
    shop.serve(range(1, 16))
    (entry,) = shop.pool.entries()
    assert 12 not in entry.superseded
    assert shop.pool.state.catalog.entries[0].pinned is not None
    assert 12 in {mark.position for mark in shop.pool.state.catalog.entries[0].pinned}


def test_dropping_what_was_just_committed_leaves_what_another_pin_protects() -> None:
    """With K = 1 and a pinned entry, a revived tail that the pin covers goes back (G4)."""
    shop = driver(max_entries=1, grid=5, image_bytes=16)
    first = [0, 3, 2, 4, 0, 2, 0, 0, 3, 3, 2, 4]
    shop.serve(first[:3], answer=first[3:], pin=True)
    shop.serve(first[:4], answer=[1, 0, 4, 2, 2, 4])
    shop.serve([*first, 7])
    assert shop.depth(first) == 12
    begun(shop, [0, 3, 2, 4, 0, 3]).release()
    shop.audit()


@pytest.mark.parametrize("image_bytes", [0, 32])
def test_a_pin_moves_to_what_is_left_when_its_tip_is_quarantined(image_bytes: int) -> None:
    """The entry went on saying that it was pinned, and nothing of it was."""
    shop = driver(image_bytes=image_bytes, lanes=2)
    shop.serve(range(1, 10), pin=True)
    below = begun(shop, range(1, 6))  # a checkpoint below the pinned tip, made after the pin
    shop.prefill(below)
    shop.engine.execute(below.checkpoint("turn", position=below.frontier))
    below.publish()
    below.release()
    begun(shop, range(1, 10)).quarantine()
    (entry,) = shop.pool.entries()
    assert entry.pinned
    assert not shop.pool.evict(entry.key)
    assert shop.pool.unpin(entry.key)
    assert shop.pool.evict(entry.key)
    shop.pool.check()


def test_pinning_a_full_hit_pins_what_was_hit() -> None:
    shop = driver()
    key = shop.serve(range(20)).key
    lease = begun(shop, range(20), pin=True)
    assert lease.commit() == key
    assert [entry.pinned for entry in shop.pool.entries()] == [True]


def test_pinning_what_was_published_before() -> None:
    shop = driver()
    shop.serve(range(20), publish=True, pin=True)
    assert [entry.pinned for entry in shop.pool.entries()] == [True]


def test_the_last_to_go_is_sought_past_an_entry_that_is_wholly_protected() -> None:
    shop = driver(num_pages=24, lanes=2)
    key = shop.serve(range(40, 44)).key
    assert shop.pool.pin(key or "")
    shop.serve(range(12), boundaries=[(4, "system")])
    reader = begun(shop, range(12))
    while shop.depth(range(4)):
        free = shop.pool.stats().pages_free
        other = begun(shop, range(50, 50 + 4 * (free - 1)))
        other.release()
    assert (shop.depth(range(12)), shop.depth(range(40, 44))) == (12, 4)
    reader.release()


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
    assert repr(next(iter(shop.pool.state.catalog.entries.values())))


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
