"""What is on its way between tiers, who may call whom back, and files that must stay files."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ninfer_pool.errors import ConfigError, RoomError, StoreError
from ninfer_pool.tiers import open_tiers
from ninfer_pool.tiers.disk_medium import DiskMedium
from ninfer_pool.tiers.parts import Image
from tests.machinery.driver import SPACE
from tests.tiers.failing_files import UnsyncedFiles
from tests.tiers.shops import GatedFiles, check, serve, shop, step_until_stopped, told, where
from tests.tiers.small_pool import push_out, tail, world
from tests.tiers.world import TieredDriver, config


class Given:
    """A source of one part: bytes that a test made."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def rows(self, part: Any) -> Any:
        return self._rows

    def fill(self, part: Any, into: Any) -> None:
        raise AssertionError("nothing is filled from here")


def medium_of(driver: TieredDriver) -> DiskMedium:
    medium = driver.tiers.shelves[-1].medium
    assert isinstance(medium, DiskMedium)
    return medium


def test_parts_of_the_same_bytes_each_hold_their_file(tmp_path: Path) -> None:
    """One is given up: the other's file is still there to be named."""
    driver = shop(disk=tmp_path / "store")
    medium, config = medium_of(driver), driver.pool.config
    rows = np.ones((config.image_pages, config.page_bytes), dtype=np.uint8)
    one, other = (medium.write(Image(), Given(rows)) for _ in range(2))
    assert one == other
    medium.free(one)
    into = list(np.zeros_like(rows))
    medium.read(Image(), other, into, tokens=b"", upto=0)
    assert into[0].tolist() == rows[0].tolist()
    size = medium.used
    medium.free(other)
    assert medium.used < size
    driver.close()


def test_a_part_in_use_keeps_its_file_when_the_last_entry_that_names_it_goes(
    tmp_path: Path,
) -> None:
    driver = shop(disk=tmp_path / "store", policy="lru")
    [key] = serve(driver, 0)
    driver.tiers.flush()
    [shelf] = driver.tiers.shelves
    [record] = shelf.records.values()
    part = record.tip.stored.image
    shelf.hold([part])
    place = shelf.places[part]
    shelf.remove(record)
    config = driver.pool.config
    into = list(np.zeros((config.image_pages, config.page_bytes), dtype=np.uint8))
    shelf.medium.read(part, place, into, tokens=b"", upto=0)
    shelf.drop([part])
    with pytest.raises(StoreError):
        shelf.medium.read(part, place, into, tokens=b"", upto=0)
    assert key is not None
    check(driver)
    driver.close()


def test_a_folder_that_was_opened_again_gives_all_its_bytes_back(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    driver = shop(disk=folder)
    serve(driver, 0, 1, 2)
    driver.tiers.flush()
    driver.close()
    empty = shop(disk=tmp_path / "other")
    least = empty.pool.stats().tiers[0].bytes
    empty.close()
    again = shop(disk=folder)
    assert again.pool.clear() == 3
    assert again.pool.stats().tiers[0].bytes == least
    again.close()


def test_what_is_on_its_way_to_disk_is_told_and_can_be_deleted(tmp_path: Path) -> None:
    files = GatedFiles("create")
    driver = shop(disk=tmp_path / "store", background=True, files=files, policy="lru")
    keys = serve(driver, *range(4))
    step_until_stopped(driver, files)
    driver.serve(range(30_000, 30_030))
    driver.serve(range(40_000, 40_030))
    assert keys[0] not in driver.pool.state.catalog.keys
    [told_of] = driver.pool.find(keys[0])
    assert (told_of.tier, told_of.tokens, told_of.key) == ("disk", 22, keys[0])
    assert keys[0] in [entry.key for entry in driver.pool.entries()]
    assert driver.pool.evict(keys[0])
    assert driver.pool.find(keys[0]) == []
    files.gate.set()
    assert driver.tiers.down.worker.wait(30)
    assert where(driver, 0) == [None]
    driver.close()
    again = shop(disk=tmp_path / "store")
    assert where(again, 0) == [None]
    again.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_caller_whose_notice_fails_stops_nobody(tmp_path: Path) -> None:
    first = shop(disk=tmp_path / "store")
    serve(first, 0, 1)
    first.tiers.flush()
    first.close()
    driver = shop(disk=tmp_path / "store", host=40, background=True)

    def wrong() -> None:
        raise ValueError("the caller's own")

    assert driver.tiers.prefetch(driver.prompt(told(0)), notify=wrong)
    assert driver.tiers.down.worker.wait(30)
    assert driver.tiers.prefetch(driver.prompt(told(1)))
    assert driver.tiers.down.worker.wait(30)
    assert where(driver, 0, 1) == ["host", "host"]
    driver.close()


def test_nothing_is_done_once_it_is_closed(tmp_path: Path) -> None:
    driver = shop(disk=tmp_path / "store", host=100)
    serve(driver, *range(4))
    assert driver.tiers.step(max_bytes=1)
    driver.close()
    assert not driver.tiers.step()
    assert [shelf.reserved for shelf in driver.tiers.shelves] == [0, 0]
    serve(driver, *range(4, 8))
    driver.pool.check()


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_what_was_pinned_below_is_pinned_where_it_comes_back(kind: str, tmp_path: Path) -> None:
    tier: dict[str, Any] = {"host": 100} if kind == "host" else {"disk": tmp_path / "store"}
    driver = shop(policy="lru", **tier)
    keys = serve(driver, *range(6))
    assert where(driver, 0) == [kind]
    assert driver.pool.pin(keys[0])
    served = driver.serve(told(0))
    assert served.explanation.tier == kind
    assert served.key is not None
    assert [entry.pinned for entry in driver.pool.find(served.key)] == [True]
    serve(driver, *range(10, 20))
    assert where(driver, 0) == ["device"]
    driver.close()


def test_saving_replaces_files_and_nothing_else(tmp_path: Path) -> None:
    driver = shop()
    [key] = serve(driver, 0)
    pipe, folder = tmp_path / "pipe", tmp_path / "folder"
    os.mkfifo(pipe)
    folder.mkdir()
    for path in (pipe, folder):
        with pytest.raises(StoreError, match="needs a path that is free"):
            driver.pool.save(key, path)
    assert pipe.is_fifo()
    assert folder.is_dir()
    there = tmp_path / "there"
    there.write_text("before")
    assert driver.pool.save(key, there) == there.stat().st_size
    driver.close()


def test_a_file_for_which_there_is_no_room_now_is_told_apart(tmp_path: Path) -> None:
    driver = shop()
    [key] = serve(driver, 0)
    driver.pool.save(key, tmp_path / "file")
    small = shop(num_pages=8)
    with pytest.raises(StoreError, match="the pool holds") as never:
        small.pool.load(tmp_path / "file")
    assert not isinstance(never.value, RoomError)
    busy = shop(num_pages=12)
    lease = busy.begin(range(500, 520))
    assert lease is not None
    with pytest.raises(RoomError, match="no room now"):
        busy.pool.load(tmp_path / "file")
    lease.release()
    assert busy.pool.load(tmp_path / "file") == key
    for each in (driver, small, busy):
        each.close()


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_g4_what_is_pinned_below_is_not_deleted(kind: str, tmp_path: Path) -> None:
    driver = TieredDriver(
        config(num_pages=24),
        host=100 if kind == "host" else None,
        disk=tmp_path / "disk" if kind == "disk" else None,
        files=UnsyncedFiles(),
    )
    key = driver.serve(tail(1)).key or ""
    push_out(driver, key)
    assert driver.pool.pin(key)
    assert not driver.pool.evict(key)
    others = len(driver.pool.entries()) - 1
    assert driver.pool.clear() == others
    assert [entry.tier for entry in driver.pool.find(key)] == [kind]
    assert driver.pool.unpin(key)
    assert driver.pool.evict(key)
    assert not driver.pool.find(key)


def test_a_folder_is_free_again_where_its_pool_had_tiers_already(tmp_path: Path) -> None:
    driver = world(tmp_path)
    other = tmp_path / "other"
    with pytest.raises(ConfigError, match="it has tiers already"):
        open_tiers(
            driver.pool, driver.payload, namespace=SPACE, disk_dir=other, disk_budget=1 << 20
        )
    TieredDriver(config(), disk=other).close()


@pytest.mark.parametrize("field", ["weights", "kv_dtype", "rope", "draft"])
def test_a_file_of_another_model_is_not_loaded(field: str, tmp_path: Path) -> None:
    driver = TieredDriver(config())
    driver.pool.save(driver.serve(tail(1)).key or "", tmp_path / "one")
    changes: dict[str, Any] = {field: "another"}
    other = TieredDriver(config(), namespace=replace(SPACE, **changes))
    with pytest.raises(StoreError, match=field):
        other.pool.load(tmp_path / "one")
