"""A pool killed at any call or moment: what was flushed resumes, what was deleted does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ninfer_pool.tiers.disk_medium import DiskMedium
from tests.tiers.failing_files import CALLS, FailingFiles, UnsyncedFiles, failing
from tests.tiers.pool_crasher import BUDGET, NAME, live, talk_of
from tests.tiers.test_disk_crash import check_space
from tests.tiers.toy_world import ToyDriver

ROOT = Path(__file__).resolve().parents[2]


def crash(kind: str, path: Path, *numbers: int) -> None:
    command = [sys.executable, "-m", "tests.tiers.pool_crasher", kind, str(path)]
    subprocess.run([*command, *map(str, numbers)], cwd=ROOT, check=True, timeout=600)


def told(log: Path) -> tuple[dict[int, int], set[int]]:
    """What a log says: how deep conversations must resume, and which must be gone."""
    kept: dict[int, int] = {}
    gone: set[int] = set()
    for line in log.read_text().splitlines() if log.exists() else []:
        word, *rest = line.split()
        if word == "kept":
            kept[int(rest[0])] = int(rest[1])
        elif word == "evict":
            kept.pop(int(rest[0]), None)
        elif word == "gone":
            gone.add(int(rest[0]))
    return kept, gone


def recovered(path: Path) -> int:
    """Open what a killed process left, and see that it is right; returns how much was certain."""
    kept, gone = told(path.with_suffix(".log"))
    driver = ToyDriver(
        num_pages=60, disk_dir=path, disk_budget=BUDGET, background=False, files=UnsyncedFiles()
    )
    try:
        disk = driver.tiers.shelves[-1]
        assert isinstance(disk.medium, DiskMedium)
        driver.audit(disk)
        assert driver.pool.stats().tiers[-1].damaged == 0
        assert driver.pool.stats().tiers[-1].failed == 0
        check_space(path, disk.medium.folder)
        for number in gone:
            found = driver.pool.explain(driver.prompt(talk_of(number)))
            assert found.resumable < NAME, f"{number} was deleted, and is back"
        for number, depth in kept.items():
            told_by = driver.pool.explain(driver.prompt(talk_of(number)))
            start, _ = driver.serve(talk_of(number))
            assert start == depth, f"{number} resumes at {start}, was kept at {depth}"
            assert told_by.tier == "disk"
        driver.pool.check()
        check_space(path, disk.medium.folder)
    finally:
        driver.tiers.close()
    return len(kept)


def test_killed_at_every_call_in_turn(tmp_path: Path, *, long_run: bool) -> None:
    files = FailingFiles(failing(), at=-1, calls=tuple(CALLS))
    live(tmp_path / "whole", files, range(1, 5), background=False)
    assert recovered(tmp_path / "whole") == 2
    step = 1 if long_run else 17
    crash("calls", tmp_path, 0, files.count, step)
    found = [recovered(tmp_path / str(at)) for at in range(0, files.count, step)]
    assert found[0] == 0
    assert found[-1] > 0


@pytest.mark.parametrize("seed", [1, 2])
def test_killed_at_random_moments(tmp_path: Path, seed: int, *, long_run: bool) -> None:
    certain = 0
    for turn in range(20 if long_run else 1):
        crash("kill", tmp_path, 12, 1000 * seed + turn)
        certain += sum(recovered(tmp_path / str(number)) for number in range(4))
    assert certain > 0
