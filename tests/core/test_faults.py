"""Faults that an engine, a client or a bug could bring in: each is refused, missed or seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ninfer_pool import Namespace, PrefixPool
from ninfer_pool.testing.symbolic import EngineFault
from tests.core.shop import begun, driver
from tests.machinery.driver import Driver

AXES = np.tile(np.arange(20, dtype=np.int32), (3, 1))
TYPES = np.zeros(20, dtype=np.int32)


def changed(array: Any, *, at: int) -> Any:
    array = array.copy()
    array[..., at] += 1
    return array


FIELDS = ("weights", "kv_dtype", "rope", "draft", "adapter", "salt")


@pytest.mark.parametrize("field", FIELDS)
def test_identity_every_field_of_the_namespace_counts(field: str) -> None:
    shop = driver()
    shop.serve(range(20))
    base: dict[str, Any] = {"weights": "sha256:1", "kv_dtype": "int8", field: "other"}
    assert shop.depth(range(20), namespace=Namespace(**base)) == 0


@pytest.mark.parametrize(
    "other",
    [
        {"media": [(4, 8, "y")], "positions": AXES, "token_types": TYPES},
        {"media": [(4, 9, "x")], "positions": AXES, "token_types": TYPES},
        {"media": [(4, 8, "x")], "positions": changed(AXES, at=5), "token_types": TYPES},
        {"media": [(4, 8, "x")], "positions": AXES, "token_types": changed(TYPES, at=6)},
        {"media": [(4, 8, None)], "positions": AXES, "token_types": TYPES},
        {},
    ],
)
def test_identity_what_tokens_carry_counts(other: dict[str, Any]) -> None:
    shop = driver()
    first = {"media": [(4, 8, "x")], "positions": AXES, "token_types": TYPES}
    shop.serve(shop.prompt(range(20), **first))
    assert shop.depth(range(20), **first) == 20
    assert shop.depth(range(20), **other) == 0


def test_identity_no_checkpoint_inside_a_media_span() -> None:
    shop = driver()
    lease = begun(shop, shop.prompt(range(20), media=[(4, 8, "x")]))
    part = lease.prompt.tokens[:6]
    lease.advance(part)
    shop.engine.prefill(part, lease.pages, 0, lease.lane)
    assert lease.checkpoint("turn", position=6) == []
    assert shop.pool.stats().counters.skipped_media == 1


def test_identity_position_0_is_no_hit() -> None:
    shop = driver()
    shop.serve(range(20))
    done = shop.serve([99, *range(20)])
    assert (done.start, done.reuse) == (0, "full_reset")


def test_bundle_the_state_is_one_past_the_key() -> None:
    """The engine wrote one token more than it told: it is caught where it states its position."""
    shop = driver()
    lease = begun(shop, range(20), reserve_tokens=4)
    shop.prefill(lease)
    shop.engine.step(5, lease.pages, lease.lane)
    assert lease.checkpoint("frontier", position=shop.engine.position(lease.lane)) == []
    assert lease.commit() is None
    assert shop.depth(range(20)) == 0


def test_bundle_a_tail_past_the_frontier_is_not_kept() -> None:
    shop = driver()
    lease = begun(shop, range(20), reserve_tokens=8)
    shop.prefill(lease)
    shop.decode(lease, [1, 2, 3])
    shop.engine.execute(lease.checkpoint("frontier", position=23))
    lease.truncate(21)
    shop.engine.roll_back(lease.lane, 21)
    shop.finish(lease)
    assert [m.position for m in shop.pool.lookup(shop.prompt([*range(20), 1, 2, 3]))] == [20, 21]
    shop.audit()


def test_lifetime_an_older_request_finishes_after_a_newer() -> None:
    shop = driver(lanes=2)
    shop.serve(range(20))
    old = begun(shop, [*range(20), 1, 2], reserve_tokens=4)
    new = begun(shop, [*range(20), 1, 2, 3, 4])
    shop.prefill(new)
    shop.finish(new)
    shop.prefill(old)
    shop.decode(old, [9])
    shop.finish(old)
    shop.audit()
    assert shop.depth([*range(20), 1, 2, 3, 4]) == 24
    assert shop.depth([*range(20), 1, 2, 9]) == 23


def test_lifetime_two_writers_do_not_share_a_page() -> None:
    shop = driver(lanes=2)
    shop.serve(range(22))
    leases = [begun(shop, [*range(22), last], reserve_tokens=4) for last in (1, 2)]
    for lease in leases:
        shop.prefill(lease)
        shop.decode(lease, [7, 8])
    for lease in leases:
        shop.finish(lease)
    shop.audit()
    assert [shop.depth([*range(22), last, 7, 8]) for last in (1, 2)] == [25, 25]


def test_lifetime_a_source_that_is_quarantined_under_a_reader() -> None:
    shop = driver(lanes=2)
    shop.serve(range(22))
    reader = begun(shop, [*range(22), 1], pin=True)
    begun(shop, range(22)).quarantine()
    shop.audit()
    shop.prefill(reader)
    shop.finish(reader)
    shop.audit()
    assert shop.depth([*range(22), 1]) == 23


def test_lifetime_a_pinned_checkpoint_can_be_quarantined() -> None:
    shop = driver()
    shop.serve(range(22), boundaries=[(8, "system")], pin=True)
    begun(shop, range(22)).quarantine()
    shop.audit()
    assert shop.depth(range(22)) == 8
    begun(shop, range(9)).quarantine()
    shop.audit()
    assert shop.pool.stats().checkpoints == 0


def test_accounting_one_refused_admission_does_not_refuse_for_ever() -> None:
    shop = driver(num_pages=12)
    key = shop.serve(range(20), pin=True).key
    assert shop.ask(range(50, 70)) is not None
    assert shop.ask(range(50, 80)) is None
    assert key is not None
    assert shop.pool.unpin(key)
    assert shop.ask(range(50, 80)) is not None


def test_accounting_a_hit_given_up_for_want_of_room_is_not_reported_as_reused() -> None:
    shop = driver(num_pages=14)
    shop.serve(range(22))
    done = shop.serve(range(52))
    assert (done.start, done.prefilled, done.reason) == (0, 52, "no_room")
    counters = shop.pool.stats().counters
    assert (counters.input_tokens, counters.reused_tokens) == (74, 0)


def break_held(pool: PrefixPool) -> None:
    pool.state.ledger.checkpoint_refs[0] += 1


def break_leased(pool: PrefixPool) -> None:
    pool.state.ledger.lease_refs[0] += 1


def break_guards(pool: PrefixPool) -> None:
    next(iter(pool.state.catalog.entries.values())).tip.refs += 1


def break_count(pool: PrefixPool) -> None:
    pool.state.catalog.checkpoints += 1


def break_spares(pool: PrefixPool) -> None:
    next(iter(pool.state.catalog.entries.values())).tip.superseded = True


def break_label(pool: PrefixPool) -> None:
    next(iter(pool.state.catalog.roots.values())).tokens += b"\x00\x00\x00\x00"


def break_retained(pool: PrefixPool) -> None:
    pool.state.ledger.retained += 1


@pytest.mark.parametrize(
    "fault",
    [
        break_held,
        break_leased,
        break_guards,
        break_count,
        break_spares,
        break_label,
        break_retained,
    ],
)
def test_accounting_a_wrong_count_is_seen(fault: Callable[[PrefixPool], None]) -> None:
    shop = driver()
    shop.serve(range(20))
    fault(shop.pool)
    with pytest.raises(AssertionError):
        shop.pool.check()


def sibling_image(shop: Driver) -> None:
    """The tip loads the image of the checkpoint before it."""
    entry = next(iter(shop.pool.state.catalog.entries.values()))
    before = next(m for m in entry.tip.anchor.checkpoints if m is not entry.tip)
    entry.tip.image = before.image


def recycled_page(shop: Driver) -> None:
    """A page under the checkpoint was given to somebody else."""
    entry = next(iter(shop.pool.state.catalog.entries.values()))
    entry.tip.table.ids[0] = entry.tip.table.ids[1]


def image_page_with_kv(shop: Driver) -> None:
    """A page of the image was overwritten."""
    entry = next(iter(shop.pool.state.catalog.entries.values()))
    image = shop.pool.state.ledger.pages_of_image(entry.tip.image)
    shop.engine.poison(image[:1].tolist())


@pytest.mark.parametrize("fault", [sibling_image, recycled_page, image_page_with_kv])
def test_bundle_the_symbolic_engine_sees(fault: Callable[[Driver], None]) -> None:
    shop = driver()
    shop.serve(range(20), boundaries=[(8, "system")])
    fault(shop)
    with pytest.raises(EngineFault):
        shop.begin(range(20))
