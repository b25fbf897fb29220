"""Flushing and steps between requests: what is stored, in which order, and that they end."""

from __future__ import annotations

from pathlib import Path
from threading import Thread

import pytest

from tests.tiers.failing_files import LossyFiles
from tests.tiers.shops import GatedFiles, serve, shop
from tests.tiers.small_pool import disk, push_out, settled, tail, world


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


SYSTEM = list(range(16))


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


@pytest.mark.parametrize("background", [False, True])
def test_steps_come_to_an_end_on_a_disk_that_makes_nothing_last(
    tmp_path: Path, *, background: bool
) -> None:
    files = LossyFiles()
    driver = shop(disk=tmp_path / "disk", files=files, background=background)
    keys = serve(driver, 0, 1, 2)
    driver.tiers.flush()
    files.fails = True
    driver.pool.evict(keys[0])
    for _ in range(20):
        driver.tiers.step()
        assert driver.tiers.down.worker.wait(30)
    assert not driver.tiers.step()
    assert files.syncs == 1
    driver.close()
