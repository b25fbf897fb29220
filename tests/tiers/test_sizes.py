"""Entries that are too large for a tier, and what is stored of them once."""

from __future__ import annotations

from pathlib import Path

from ninfer_pool.tiers.device import compose
from tests.tiers.shops import check, serve, shop, told, where


def drained(driver: object, most: int = 50) -> int:
    """How many steps there was something to do."""
    steps = 0
    while driver.tiers.step() and steps < most:  # type: ignore[attr-defined]
        steps += 1
    return steps


def test_what_is_too_large_for_host_memory_goes_to_disk_and_only_once(tmp_path: Path) -> None:
    driver = shop(host=8, disk=tmp_path / "store", policy="lru")  # an entry takes ten pages
    serve(driver, *range(4))
    assert drained(driver) < 50
    host, disk = driver.pool.stats().tiers
    assert host.entries == 0
    written = (disk.stored, disk.stored_bytes)
    assert written[0]
    assert drained(driver) == 0
    serve(driver, *range(4, 10))
    assert drained(driver) < 50
    assert where(driver, 0, 1) == ["disk", "disk"]
    again = driver.pool.stats().tiers[1]
    assert again.stored == again.entries  # each was written once
    check(driver, tmp_path / "store")
    driver.close()


def test_what_is_cut_short_on_the_device_does_not_take_the_place_of_all_of_it(
    tmp_path: Path,
) -> None:
    """Its runs end where the whole one does; the short one would fit host memory."""
    driver = shop(host=8, disk=tmp_path / "store", policy="lru")
    for number in range(10):
        serve(driver, number)
        for entry in driver.pool.state.catalog.entries.values():
            compose(driver.pool.state, [entry.tip])
    assert drained(driver) < 50
    assert where(driver, 0, 1) == ["disk", "disk"]
    disk = driver.pool.stats().tiers[1]
    assert disk.stored == disk.entries
    check(driver, tmp_path / "store")
    driver.close()


def test_a_conversation_that_outgrew_host_memory_is_not_lost(tmp_path: Path) -> None:
    driver = shop(host=11, disk=tmp_path / "store", policy="lru")
    serve(driver, 0, 1, 2, 3)
    longer = [*told(0), *range(500, 522)]
    driver.serve(longer, answer=[1, 2])
    serve(driver, *range(4, 9))
    found = driver.pool.explain(driver.prompt([*longer, 1, 2, 3]))
    assert (found.resumable, found.tier) == (len(longer) + 2, "disk")
    check(driver, tmp_path / "store")
    driver.close()
