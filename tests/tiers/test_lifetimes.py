"""Lifetimes below the device, and recency that moves only with a commit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tiers.failing_files import UnsyncedFiles
from tests.tiers.shops import PAGE, check, picture, serve, shop, talk, told, where
from tests.tiers.small_pool import tail
from tests.tiers.world import TieredDriver, config


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_what_is_over_leaves_its_tier(kind: str, tmp_path: Path) -> None:
    clock = Clock()
    tier: dict[str, Any] = {"host": 100} if kind == "host" else {"disk": tmp_path / "store"}
    driver = shop(policy="lru", clock=clock, **tier)
    serve(driver, 0, ttl_seconds=60.0)
    serve(driver, *range(1, 6))
    assert where(driver, 0) == [kind]
    before = driver.pool.stats().tiers[0]
    clock.now += 61
    driver.serve(talk(9))
    after = driver.pool.stats().tiers[0]
    assert where(driver, 0) == [None]
    assert all(
        entry.key != driver.pool.key(driver.prompt(talk(0))) for entry in driver.pool.entries()
    )
    assert after.bytes < before.bytes + 10 * PAGE * 4
    hops = driver.tiers.shelves[0].walk(driver.namespace, driver.prompt(talk(0)).buffer, ())
    assert all(upto == 0 for _, upto in hops)
    check(driver)
    driver.close()


def test_a_pool_without_a_clock_gives_up_what_it_cannot_offer_first(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    timed = shop(disk=folder, clock=Clock(), policy="lru")
    serve(timed, 0, 1, 2, ttl_seconds=1e6)
    assert timed.tiers.flush() == 0
    used = timed.pool.stats().tiers[0].bytes
    timed.close()
    driver = shop(disk=folder, disk_budget=used + 2000, policy="lru")
    assert driver.pool.stats().tiers[0].entries == 0
    serve(driver, *range(10, 16))
    driver.tiers.flush()
    stats = driver.pool.stats().tiers[0]
    assert stats.entries >= 2
    assert stats.bytes <= stats.budget_bytes
    driver.close()


def test_g6_a_restore_that_is_left_moves_no_recency_below(tmp_path: Path) -> None:
    driver = shop(host=100, disk=tmp_path / "store", policy="lru")
    serve(driver, *range(6))
    assert where(driver, 0) == ["host"]
    order = [record.entry.key for record in driver.tiers.shelves[0].order(0)]
    lease = driver.begin(told(0))
    assert lease is not None
    assert lease.explanation.tier == "host"
    lease.release()
    stood = [key for key in (r.entry.key for r in driver.tiers.shelves[0].order(0)) if key in order]
    assert stood == order
    assert driver.tiers.shelves[0].keys[order[0]]
    served = driver.serve(told(1), answer=[3])  # its entry goes on: used
    assert served.explanation.tier == "host"
    assert picture(driver)
    check(driver)
    driver.close()


def test_what_is_gone_before_its_time_is_not_remembered_until_then() -> None:
    driver = TieredDriver(
        config(num_pages=24, clock=lambda: 0.0), host=20, files=UnsyncedFiles(), audits=False
    )
    for number in range(1, 200):
        driver.serve(tail(number), ttl_seconds=1e6)
    [shelf] = driver.tiers.shelves
    assert shelf.traffic.stored > 150
    assert len(shelf._deadlines) < 2 * len(shelf.records) + 100
