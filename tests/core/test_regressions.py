"""Every fault that was found in the core and mended, by what went wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ninfer_pool import Lease, Namespace, Pending, PoolConfig
from tests.machinery.driver import Driver

PAGE = 16


def driver(**changes: Any) -> Driver:
    config = PoolConfig(num_pages=400, page_bytes=PAGE, image_bytes=32, page_tokens=4, grid=64)
    return Driver(config.replace(**changes))


def begun(shop: Driver, tokens: Any, **options: Any) -> Lease:
    lease = shop.begin(tokens, **options)
    assert lease is not None
    return lease


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


def test_a_pending_position_can_be_resumed() -> None:
    """Where images yield no logits the prompt's very end is nothing to wait for."""
    shop = driver(lanes=2, end_logits=False)
    begun(shop, range(20))
    pending = shop.pool.acquire(shop.prompt(range(20)), wait_for_shared=True)
    assert isinstance(pending, Pending)
    assert pending.position == 19


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


@pytest.mark.parametrize("field", ["positions", "token_types"])
def test_the_attribute_that_differs_is_named_behind_one_that_does_not(field: str) -> None:
    shop = driver()
    axes = np.tile(np.arange(20, dtype=np.int32), (3, 1))
    types = np.zeros(20, dtype=np.int32)
    shop.serve(shop.prompt(range(20), media=[(4, 8, "x")], positions=axes, token_types=types))
    axes, types = axes.copy(), types.copy()
    if field == "positions":
        axes[1, 4:8] += 1
    else:
        types[4:8] = 1
    other = shop.prompt(range(20), media=[(4, 8, "x")], positions=axes, token_types=types)
    assert shop.pool.explain(other).reason == f"identity:{field}"


def test_an_expired_checkpoint_says_so() -> None:
    now = [0.0]
    shop = driver(clock=lambda: now[0])
    shop.serve(range(20), ttl_seconds=5)
    now[0] = 4.0
    assert shop.depth(range(20)) == 20
    now[0] = 6.0
    assert shop.depth(range(20)) == 0
    shop.serve(range(40, 50))
    seen = shop.pool.explain(shop.prompt(range(20)))
    assert (seen.reason, seen.evicted_tick) == ("evicted", None)
    assert "a longer ttl_seconds" in seen.helps
    assert shop.pool.stats().counters.expired == 1


def test_the_longest_life_asked_for_counts() -> None:
    now = [0.0]
    shop = driver(clock=lambda: now[0])
    prompt = shop.prompt(range(20), boundaries=[(20, "turn")])
    shop.serve(prompt, ttl_seconds=5)
    shop.serve(prompt, read=False)
    now[0] = 9.0
    assert shop.depth(range(20)) == 20
    shop.serve(range(60, 70), ttl_seconds=5)
    reader = begun(shop, range(60, 70))
    now[0] = 20.0
    assert shop.pool.acquire(shop.prompt(range(90, 99))) is None
    reader.release()
    shop.serve(range(90, 99))
    assert shop.depth(range(60, 70)) == 0


def test_a_lane_asked_for_is_not_refused_for_ever_where_state_cannot_move() -> None:
    shop = driver(lanes=2, affinity="strict")
    shop.serve(range(20), lane=0)
    assert shop.serve(range(20), lane=1).start == 0
    assert shop.serve(range(20), lane=1).start == 20
    assert shop.serve(range(20), lane=0).start == 20


def test_where_state_cannot_move_a_busy_home_lane_is_waited_for() -> None:
    shop = driver(lanes=2, affinity="strict")
    shop.serve(range(20), lane=0)
    busy = begun(shop, range(50, 60), lane=0)
    assert shop.begin(range(20)) is None
    assert shop.pool.last_refusal is not None
    assert shop.pool.last_refusal.reason == "home_lane_busy"
    busy.release()
    assert begun(shop, range(20)).lane == 0


def test_a_namespace_of_which_nothing_is_left_is_forgotten() -> None:
    shop = driver()
    for number in range(5):
        space = Namespace(weights="w", kv_dtype="k", salt=f"tenant {number}")
        shop.pool.key(shop.prompt(range(20), namespace=space))
        shop.serve(shop.prompt(range(20), namespace=space))
        shop.pool.clear()
    assert not shop.pool.retained.roots
    assert not shop.pool.retained._digests


def test_an_entry_that_forks_inside_another_is_its_own_from_there() -> None:
    shop = driver()
    shop.serve(range(40))
    shop.serve([*range(20), 90, 91, 92, 93])
    infos = {entry.tokens: entry.bytes // PAGE for entry in shop.pool.entries()}
    assert infos[24] >= 1 + 2
    entries = shop.pool.retained.entries.values()
    assert sorted(shop.pool.retained.base(entry) for entry in entries) == [20, 20]


def test_plain_attention_retains_a_sibling_as_long_as_what_it_resumed_inside() -> None:
    shop = driver(image_bytes=0, end_logits=False)
    shop.serve([*range(20), 91, 7])
    shop.serve([*range(20), 92, 7])
    assert shop.depth([*range(20), 92, 7, 8]) == 22
    assert len(shop.pool.entries()) == 2
