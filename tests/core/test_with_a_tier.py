"""The pool's side of tiers, with a tier that is another pool's catalog."""

from __future__ import annotations

from typing import Any

from ninfer_pool.core.config import PoolConfig
from ninfer_pool.core.hooks import TierHooks
from tests.machinery.driver import Driver

CONFIG = PoolConfig(num_pages=64, page_bytes=16, image_bytes=16, page_tokens=4, clock=lambda: 1.0)


class OneTier(TierHooks):
    """A tier that is searched, and reports a promotion where ``tier`` names one."""

    name = "host"

    def __init__(self, shop: Driver, other: Driver, *, tier: str | None) -> None:
        self.config = shop.pool.config
        self.roots = other.pool.state.catalog.roots
        self.catalog = shop.pool.state.catalog
        self.tier = tier
        self.consumed: list[str] = []
        self.searchable = (self,)

    def cheaper_than_prefill(self, position: int, *, above: int) -> bool:
        return True

    def promote(self, *_: Any, **__: Any) -> str | None:
        self.catalog.version += self.tier is not None
        return self.tier

    def on_consume(self, source: Any, tier: str) -> None:
        self.consumed.append(tier)


def joined(tier: str | None) -> tuple[Driver, OneTier]:
    shop, other = Driver(CONFIG), Driver(CONFIG)
    shop.serve(range(10))
    other.serve(range(20))
    hooks = OneTier(shop, other, tier=tier)
    shop.pool.state.hooks = hooks
    return shop, hooks


def test_a_lookup_searches_tiers() -> None:
    shop, _ = joined(None)
    seen = shop.pool.explain(shop.prompt(range(20)))
    assert (seen.resumable, seen.tier) == (20, "host")
    assert [match.position for match in shop.pool.lookup(shop.prompt(range(20)))] == [10, 20]


def test_without_a_promotion_the_device_s_checkpoint_is_resumed() -> None:
    shop, hooks = joined(None)
    assert shop.serve(range(12)).start == 10
    assert hooks.consumed == []


def test_a_commit_of_a_promoted_checkpoint_is_reported() -> None:
    shop, hooks = joined("host")
    assert shop.serve(range(12)).start == 10
    assert hooks.consumed == ["host"]


def test_without_a_free_lane_nothing_is_promoted() -> None:
    shop, hooks = joined("host")
    lease = shop.pool.acquire(shop.prompt(range(50, 60)))
    assert lease is not None
    version = hooks.catalog.version
    assert shop.pool.acquire(shop.prompt(range(12))) is None
    assert hooks.catalog.version == version
    lease.release()
