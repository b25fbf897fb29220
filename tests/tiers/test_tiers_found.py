"""Faults of the tiers that were found from outside, each as the smallest thing that shows it."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest

from ninfer_pool.errors import ConfigError, StoreError
from ninfer_pool.tiers import ArrayPayload, open_tiers
from ninfer_pool.tiers.memory import HostMemory
from ninfer_pool.tiers.parts import Image
from ninfer_pool.tiers.shelf import Shelf
from tests.machinery.driver import SPACE
from tests.tiers.entries import tree_bytes
from tests.tiers.failing_files import UnsyncedFiles
from tests.tiers.shops import GatedFiles
from tests.tiers.world import TieredDriver, audit_tiers, config

SYSTEM = list(range(16))
BOUNDARY = [(16, "system")]


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
    while key in driver.pool.retained.keys:
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


def test_a_fork_is_stored_though_what_shares_its_beginning_goes_for_it(tmp_path: Path) -> None:
    driver = world(tmp_path, num_pages=40)
    driver.serve(SYSTEM + tail(1), boundaries=BOUNDARY)
    driver.tiers.flush()
    disk(driver).medium.budget = disk(driver).medium.used + 3500  # type: ignore[misc]
    for number in range(2, 6):
        key = driver.serve(SYSTEM + tail(number), boundaries=BOUNDARY).key
        driver.tiers.flush()
        assert disk(driver).traffic.failed == 0
        assert key in disk(driver).keys
        audit_tiers(driver)
    settled(driver, tmp_path)


def test_a_fork_is_stored_though_what_shares_its_beginning_is_deleted(tmp_path: Path) -> None:
    files = GatedFiles("create")
    driver = world(tmp_path, files=files, background=True)
    first = driver.serve(SYSTEM + tail(1, 8), boundaries=BOUNDARY).key or ""
    driver.tiers.flush()
    second = driver.serve(SYSTEM + tail(2, 8), boundaries=BOUNDARY).key or ""
    push_out(driver, second)
    assert files.stopped.wait(30)
    assert driver.pool.evict(first)
    files.gate.set()
    driver.tiers.down.worker.wait()
    assert disk(driver).traffic.failed == 0
    assert [entry.tier for entry in driver.pool.find(second)] == ["disk"]
    settled(driver, tmp_path)


def test_a_flush_keeps_what_was_used_last(tmp_path: Path) -> None:
    driver = world(tmp_path, num_pages=200)
    keys = [driver.serve(tail(1, 20)).key]
    driver.tiers.flush()
    disk(driver).medium.budget = int(disk(driver).medium.used * 2.6)  # type: ignore[misc]
    keys += [driver.serve(tail(number, 20)).key for number in range(2, 9)]
    left = driver.tiers.flush()
    kept = [keys.index(key) for key in disk(driver).keys]
    assert kept == list(range(8 - len(kept), 8))
    assert left == 8 - len(kept)
    assert left < 8


def test_a_flush_waits_no_longer_than_it_may_for_what_is_being_written(tmp_path: Path) -> None:
    files = GatedFiles("create")
    driver = world(tmp_path, files=files, background=True)
    key = driver.serve(tail(1)).key or ""
    push_out(driver, key)
    assert driver.tiers.down.worker.busy
    left: list[int] = []
    waiting = Thread(target=lambda: left.append(driver.tiers.flush(seconds=0.0)))
    waiting.start()
    waiting.join(10)
    ended = list(left)
    files.gate.set()
    waiting.join()
    assert ended
    assert ended[0] > 0


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


def test_what_cannot_be_read_for_want_of_descriptors_is_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = UnsyncedFiles()
    driver = world(tmp_path, files=files)
    key = driver.serve(tail(1)).key or ""
    push_out(driver, key)

    def refused(folder: int, name: str) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(files, "open", refused)
        lease = driver.begin([*tail(1), 7])
        assert lease is not None
        assert lease.start == 0
        lease.release()
    assert driver.serve([*tail(1), 7]).start == 24


def test_two_threads_may_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = world(tmp_path, host=100, background=True)
    for number in range(1, 6):
        driver.serve(tail(number, 20))
    driver.tiers.flush()
    host, worker = driver.tiers.shelves[0], driver.tiers.down.worker
    for record in list(host.records.values()):
        host.remove(record)
    submit, began = worker.submit, Event()

    def slow(job: Any) -> None:
        if not began.is_set():  # between the decision and the job another thread has its turn
            began.set()
            other = Thread(target=driver.tiers.prefetch, args=(driver.prompt([*tail(2, 20), 9]),))
            other.start()
            other.join(0.2)
        submit(job)

    monkeypatch.setattr(worker, "submit", slow)
    assert driver.tiers.prefetch(driver.prompt([*tail(1, 20), 9]))
    worker.wait()
    assert not disk(driver).reading
    driver.close()


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


def test_deleting_one_tenants_entry_stops_nothing_of_anothers(tmp_path: Path) -> None:
    files = GatedFiles("create")
    driver = world(tmp_path, files=files, background=True)
    mine, theirs = (replace(SPACE, salt=salt) for salt in ("mine", "theirs"))
    kept = driver.serve(driver.prompt(tail(1), namespace=theirs)).key or ""
    push_out(driver, kept)
    deleted = driver.serve(driver.prompt(tail(1), namespace=mine)).key or ""
    assert driver.pool.evict(deleted)
    files.gate.set()
    driver.tiers.down.worker.wait()
    assert [entry.tier for entry in driver.pool.find(kept)] == ["disk"]
    driver.close()


def test_a_superseded_checkpoint_on_disk_stays_as_long_as_its_entry(tmp_path: Path) -> None:
    driver = world(tmp_path, num_pages=200)
    driver.serve(range(10))
    key = driver.serve(range(15)).key
    driver.tiers.flush()
    shelf = disk(driver)
    shelf.medium.budget = shelf.medium.used + 9000  # type: ignore[misc]
    for number in range(2, 20):
        driver.serve(range(15), retain=False)
        driver.serve(tail(number))
        driver.tiers.flush()
        for record in shelf.keys.get(key or "", {}).values():
            assert [kept.position for kept in record.marks] == [10, 15]
    settled(driver, tmp_path)


class _Slow(np.ndarray[Any, Any]):
    """Ids that take a while to be looked at."""

    look: Any = None

    def __len__(self) -> int:
        if self.look is not None:
            look, self.look = self.look, None
            look()
        return int(self.shape[0])


def test_host_pages_are_taken_while_others_are_given_back() -> None:
    slab = np.zeros((4, 32), dtype=np.uint8)
    memory = HostMemory(config(), ArrayPayload(slab, layout="x"), budget_bytes=32 * 64)
    given, taken = memory.take(Image()).view(_Slow), []
    taker = Thread(target=lambda: taken.append(memory.take(Image())))

    def look() -> None:
        taker.start()
        taker.join(0.2)

    given.look = look
    memory.free(given)
    taker.join()
    memory.check(taken)


@pytest.mark.parametrize(
    ("host", "lengths"),
    [(8, [(8, 20), (0, 18)]), (30, [(0, 11), (0, 27), (0, 14), (8, 25), (8, 27)])],
    ids=["too large for host memory", "two for the place of one on disk"],
)
def test_what_is_stored_ahead_of_time_comes_to_an_end(
    host: int, lengths: list[tuple[int, int]], tmp_path: Path
) -> None:
    driver = world(tmp_path, num_pages=20, host=host, disk_budget=5000)
    for number, (shared, count) in enumerate(lengths, 1):
        boundaries = [(shared, "system")] if shared else []
        driver.ask([*SYSTEM[:shared], *tail(number, count)], boundaries=boundaries)
        steps = 0
        while driver.tiers.step():
            steps += 1
            assert steps < 50, "an engine that has nothing else to do never rests, nor ends"
    settled(driver, tmp_path)


def test_what_is_gone_before_its_time_is_not_remembered_until_then() -> None:
    driver = TieredDriver(
        config(num_pages=24, clock=lambda: 0.0), host=20, files=UnsyncedFiles(), audits=False
    )
    for number in range(1, 200):
        driver.serve(tail(number), ttl_seconds=1e6)
    [shelf] = driver.tiers.shelves
    assert shelf.traffic.stored > 150
    assert len(shelf._deadlines) < 2 * len(shelf.records) + 100
