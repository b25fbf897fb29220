"""What a thread is writing or reading, and requests that need it or wait for it."""

from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest

from ninfer_pool.tiers import ArrayPayload, Rates
from ninfer_pool.tiers.medium import SMALL_BYTES
from ninfer_pool.tiers.memory import HostMemory
from ninfer_pool.tiers.parts import Image
from tests.tiers.failing_files import UnsyncedFiles
from tests.tiers.shops import GatedFiles, check, serve, shop, step_until_stopped, talk, told, where
from tests.tiers.small_pool import disk, push_out, tail, world
from tests.tiers.world import audit_tiers, config


@pytest.mark.parametrize("host", [None, 40])
def test_a_prefetch_brings_it_nearer_and_says_so(host: int | None, tmp_path: Path) -> None:
    driver = shop(disk=tmp_path / "disk")
    serve(driver, *range(3))
    driver.tiers.flush()
    driver.close()
    files = GatedFiles("_preadv")
    driver = shop(host=host, disk=tmp_path / "disk", background=True, files=files)
    come: list[str] = []
    prompt = driver.prompt(told(1))
    assert driver.tiers.prefetch(prompt, notify=lambda: come.append("come"))
    assert files.stopped.wait(30)
    assert driver.tiers.prefetch(prompt)
    assert not driver.tiers.prefetch(driver.prompt(told(2)))  # one at a time
    assert not driver.tiers.prefetch(driver.prompt(talk(30)))
    assert come == []
    files.gate.set()
    assert driver.tiers.down.worker.wait(30)
    driver.tiers.down.worker.close()
    assert come == ["come"]
    assert not driver.tiers.prefetch(prompt)
    assert where(driver, 0, 1, 2) == ["disk", "host" if host else "disk", "disk"]
    assert driver.serve(told(1)).start == 22
    audit_tiers(driver)
    check(driver, tmp_path / "disk")


def test_a_request_can_wait_for_what_is_still_being_written(tmp_path: Path) -> None:
    """It lies nowhere yet; who asks for another conversation does not wait."""
    files = GatedFiles("create")
    driver = shop(disk=tmp_path / "disk", background=True, files=files)
    serve(driver, *range(5))
    step_until_stopped(driver, files)
    come: list[str] = []
    assert where(driver, 0) == [None]
    notify = partial(come.append, "come")
    for _ in range(3):  # as often as an engine looks, and told once
        assert driver.tiers.prefetch(driver.prompt(told(0)), notify=notify)
    assert not driver.tiers.prefetch(driver.prompt([*told(0)[:15], 1]))
    assert not driver.tiers.prefetch(driver.prompt(told(4)))
    assert come == []
    files.gate.set()
    assert driver.tiers.down.worker.wait(30)
    driver.tiers.down.worker.close()
    assert (come, where(driver, 0)) == (["come"], ["disk"])
    assert driver.serve(told(0)).start == 22
    check(driver, tmp_path / "disk")


def test_what_leaves_host_memory_while_it_is_written_is_written_once(tmp_path: Path) -> None:
    files = GatedFiles("create")
    driver = shop(host=20, disk=tmp_path / "disk", background=True, files=files)
    serve(driver, *range(5))
    step_until_stopped(driver, files)
    [draft] = driver.tiers.down.every()
    host, disk = driver.tiers.shelves
    host.make_room(host.medium.budget, tick=driver.pool.state.tick)
    assert draft.key not in host.keys
    files.gate.set()
    assert driver.tiers.down.worker.wait(30)
    assert draft.key in disk.keys
    assert disk.traffic.images == sum(len(record.marks) for record in disk.records.values())
    check(driver, tmp_path / "disk")


@pytest.mark.parametrize(
    ("prefill", "write", "stored"),
    [(None, 0.2, True), (None, 0.3, False), (22 / 0.5, 0.4, True), (22 / 0.5, 0.6, False),
     (22 / 9.0, 0.9, True), (22 / 9.0, 1.1, False), (22 / 0.01, 0.2, True)],
)  # fmt: skip
def test_a_request_waits_for_a_store_if_that_is_quicker_than_prefilling_again(
    prefill: float | None, write: float, tmp_path: Path, *, stored: bool
) -> None:
    """Up to a second, and a quarter in any case."""
    files = GatedFiles("create")
    rates = Rates(prefill_tokens_s=prefill, fixed=True)
    driver = shop(rates=rates, disk=tmp_path / "disk", background=True, files=files)
    [disk] = driver.tiers.shelves
    serve(driver, *range(5))
    step_until_stopped(driver, files)
    entry = driver.pool.state.catalog.order.victims(driver.pool.state.tick)
    key = next(iter(entry)).key
    disk.traffic.write_rate = (driver.pool.find(key)[0].bytes + SMALL_BYTES) / write
    serve(driver, *range(5, 7))
    found = driver.pool.find(key)
    assert (bool(found), disk.traffic.dropped > 0) == (stored, not stored)
    files.gate.set()
    driver.close()


def test_a_prefetch_of_what_is_damaged_is_counted_and_harmless(tmp_path: Path) -> None:
    driver = shop(disk=tmp_path / "disk")
    serve(driver, 0)
    driver.tiers.flush()
    driver.close()
    for file in (tmp_path / "disk").glob("*/images/*"):
        file.write_bytes(bytes(file.stat().st_size))
    driver = shop(host=40, disk=tmp_path / "disk", background=True)
    assert driver.tiers.prefetch(driver.prompt(told(0)))
    assert driver.tiers.down.worker.wait(30)
    assert sum(tier.failed for tier in driver.pool.stats().tiers) == 1
    assert driver.serve(told(0)).start == 0
    check(driver)
    driver.close()


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


SYSTEM = list(range(16))


def test_nobody_waits_for_what_brings_no_more_than_the_device_has(tmp_path: Path) -> None:
    """Every entry that is being written has the system prompt in common with the next chat."""
    files = GatedFiles("create")
    driver = shop(disk=tmp_path / "disk", background=True, files=files)

    def chat(number: int) -> list[int]:
        return [*SYSTEM, *range(1000 * number, 1000 * number + 6)]

    for number in range(1, 6):
        driver.serve(driver.prompt(chat(number), boundaries=[(16, "system")]), answer=(7, 8))
    step_until_stopped(driver, files)
    for number in range(6, 9):
        driver.serve(driver.prompt(chat(number), boundaries=[(16, "system")]), answer=(7, 8))
    assert driver.tiers.down.on_its_way()
    prompt = driver.prompt(chat(99)[:19], boundaries=[(16, "system")])
    assert driver.pool.explain(prompt).resumable == 16
    assert not driver.tiers.prefetch(prompt)
    files.gate.set()
    driver.close()
