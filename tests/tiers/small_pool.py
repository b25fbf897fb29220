"""A pool of about three entries above a folder, and what presses its entries out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ninfer_pool.tiers.shelf import Shelf
from tests.tiers.entries import tree_bytes
from tests.tiers.failing_files import UnsyncedFiles
from tests.tiers.world import TieredDriver, audit_tiers, config


def tail(number: int, count: int = 24) -> list[int]:
    """Token ids that nobody else uses."""
    return list(range(1000 * number, 1000 * number + count))


def world(path: Path, **options: Any) -> TieredDriver:
    """A pool of about three entries above a folder."""
    options = {"files": UnsyncedFiles(), **options}
    pages = options.pop("num_pages", 24)
    return TieredDriver(config(num_pages=pages), disk=path / "disk", audits=False, **options)


def disk(driver: TieredDriver) -> Shelf:
    """The lowest tier."""
    return driver.tiers.shelves[-1]


def push_out(driver: TieredDriver, key: str) -> None:
    """Serve strangers until an entry has left the device."""
    number = 50
    while key in driver.pool.state.catalog.keys:
        driver.serve(tail(number))
        number += 1


def settled(driver: TieredDriver, path: Path) -> None:
    """Every count is right, and nothing is left once all is deleted."""
    driver.tiers.down.worker.wait()
    driver.pool.check()
    audit_tiers(driver)
    shelf = disk(driver)
    assert shelf.medium.used == tree_bytes(path / "disk")
    driver.pool.clear()
    assert (shelf.reserved, shelf.places, shelf.users) == (0, {}, {})
    assert not list((path / "disk").glob("*/[ir]*s/*"))
