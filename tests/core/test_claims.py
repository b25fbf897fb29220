"""A claim goes on in the pages of the checkpoint that it consumes."""

from __future__ import annotations

from tests.core.shop import begun, driver


def test_a_claim_does_not_write_a_page_that_its_publisher_still_writes() -> None:
    shop = driver(lanes=2)
    first = begun(shop, range(22), reserve_tokens=8)
    shop.prefill(first)
    first.publish()
    second = begun(shop, [*range(22), 5], claim=True)
    assert not second.claimed
    shop.prefill(second)
    shop.decode(first, [1, 2])
    shop.finish(second)
    shop.finish(first)
    shop.audit()


def test_a_claim_goes_on_in_place() -> None:
    shop = driver()
    shop.serve(range(22))
    lease = begun(shop, [*range(22), 5], claim=True)
    assert lease.claimed
    assert len(lease.restore()) == 1
    shop.prefill(lease)
    shop.finish(lease)
    shop.audit()


def test_a_claim_of_whole_pages_copies_nothing() -> None:
    shop = driver()
    shop.serve(range(20))
    assert begun(shop, [*range(20), 5], claim=True).claimed
