"""Lanes: where state cannot move, and siblings that are waited for."""

from __future__ import annotations

from ninfer_pool import Pending
from tests.core.shop import begun, driver


def test_a_pending_position_can_be_resumed() -> None:
    """Where images yield no logits the prompt's very end is nothing to wait for."""
    shop = driver(lanes=2, end_logits=False)
    begun(shop, range(20))
    pending = shop.pool.acquire(shop.prompt(range(20)), wait_for_shared=True)
    assert isinstance(pending, Pending)
    assert pending.position == 19


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
