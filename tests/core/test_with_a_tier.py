"""The pool's side of tiers, with a tier that is another pool's catalog."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ninfer_pool.core.config import PoolConfig
from ninfer_pool.core.entry import Checkpoint, PageTable
from ninfer_pool.core.hooks import TierHooks
from ninfer_pool.core.insertion import NewSequence, insert
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


def joined(tier: str | None, *, below: int = 20, timed: bool = True) -> tuple[Driver, OneTier]:
    config = CONFIG if timed else CONFIG.replace(clock=None)
    shop, other = Driver(config), Driver(config)
    shop.serve(range(10))
    other.serve(range(below))
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


def test_a_tier_that_holds_no_deeper_checkpoint_is_passed() -> None:
    shop, _ = joined(None, below=5)
    seen = shop.pool.explain(shop.prompt(range(20)))
    assert (seen.resumable, seen.tier) == (10, "device")
    assert shop.pool.lookup(shop.prompt(range(20))).deepest == 10


def test_without_a_clock_no_tier_expires() -> None:
    shop, hooks = joined("host", timed=False)
    assert shop.serve(range(12)).start == 10
    assert hooks.consumed == ["host"]


def test_a_fork_shares_the_stored_pieces_of_its_source() -> None:
    shop, _ = joined(None)
    (entry,) = shop.pool.state.catalog.entries.values()
    entry.tip.stored = SimpleNamespace(pieces=("a piece",))
    shop.serve(range(12))
    (entry,) = shop.pool.state.catalog.entries.values()
    assert entry.tip.table.known == (10, ("a piece",))


def test_an_inserted_checkpoint_keeps_its_deadline() -> None:
    shop = Driver(CONFIG)
    state, prompt = shop.pool.state, shop.prompt(range(8))
    units = state.ledger.take(2, images=1)
    checkpoint = Checkpoint(
        position=8,
        kind="turn",
        cuts=None,
        table=PageTable(units[:2].copy()),
        tail=-1,
        image=int(units[2]),
        lane=0,
    )
    checkpoint.expires = 5.0
    sequence = NewSequence(
        namespace=prompt.namespace,
        tokens=[prompt.buffer],
        attributes=(),
        prompt_tokens=8,
        priority=0,
    )
    inserted = insert(state, sequence, [checkpoint])
    state.ledger.unref_lease(units)
    assert inserted.standing == [checkpoint]
    state.expire(5.0)
    assert not state.catalog.entries
    shop.pool.check()


def test_a_lease_counts_the_pages_that_its_end_makes_free() -> None:
    shop = Driver(CONFIG)
    lease = shop.pool.acquire(shop.prompt(range(10)))
    assert lease is not None
    assert shop.pool.free_lanes == 0
    least, most = lease.releasable()
    before = shop.pool.freeable_bytes
    lease.release()
    assert least == most == (shop.pool.freeable_bytes - before) // CONFIG.page_bytes


def test_a_point_shortly_before_the_end_is_superseded_at_once() -> None:
    config = PoolConfig(num_pages=1024, page_bytes=16, image_bytes=16 * 64, page_tokens=4)
    shop = Driver(config)
    shop.serve(range(900), boundaries=[(300, "system")])
    (entry,) = shop.pool.entries()
    assert entry.superseded == (388,)
