"""A pool that has no tiers: it says so, and everything else is as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from ninfer_pool import PoolConfig
from ninfer_pool.core.hooks import TierHooks
from ninfer_pool.core.lookup import LookupFilter, find
from ninfer_pool.core.results import EvictionCost
from ninfer_pool.errors import ConfigError
from tests.machinery.driver import Driver


def test_files_need_a_way_to_the_pages(tmp_path: Path) -> None:
    driver = Driver(PoolConfig(num_pages=64, page_bytes=16, image_bytes=16, page_tokens=4))
    key = driver.serve(range(10)).key
    assert key is not None
    with pytest.raises(ConfigError, match="open_tiers"):
        driver.pool.save(key, tmp_path / "file")
    with pytest.raises(ConfigError, match="open_tiers"):
        driver.pool.load(tmp_path / "file")
    assert not list(tmp_path.iterdir())


def test_there_is_nothing_below() -> None:
    driver = Driver(PoolConfig(num_pages=64, page_bytes=16, image_bytes=16, page_tokens=4))
    key = driver.serve(range(10)).key
    assert key is not None
    below = driver.pool.state.hooks
    assert isinstance(below, TierHooks)
    entry = next(iter(driver.pool.state.catalog.entries.values()))
    below.on_evict(entry, entry.tip)
    below.on_branch(entry.tip)
    below.on_consume(entry.tip, "host")
    below.expire(0.0)
    below.remove(entry)
    found = find(driver.pool.state.catalog, driver.prompt(range(10)), None, LookupFilter())
    cost = EvictionCost()
    assert below.promote(found, LookupFilter(), reserve_tokens=0, cost=cost) is None
    assert driver.pool.stats().tiers == ()
    assert [each.tier for each in driver.pool.entries()] == ["device"]
    told = driver.pool.explain(driver.prompt(range(10)))
    assert (told.resumable, told.tier) == (10, "device")
    assert driver.pool.explain(driver.prompt(range(50, 60))).tier is None
    assert driver.pool.find("0" * 32) == []
    assert not any(verb("0" * 32) for verb in (driver.pool.pin, driver.pool.unpin))
    assert not any(verb("0" * 32) for verb in (driver.pool.release, driver.pool.evict))
    assert driver.pool.clear() == 1
