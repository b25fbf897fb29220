"""Killed at any call or moment: every committed entry is there, bit for bit, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ninfer_pool.tiers.disk.folder import Folder
from tests.tiers.crasher import live, talk_number
from tests.tiers.entries import opened, tree_bytes
from tests.tiers.failing_files import CALLS, FailingFiles, failing

ROOT = Path(__file__).resolve().parents[2]


def crash(kind: str, path: Path, *numbers: int) -> None:
    command = [sys.executable, "-m", "tests.tiers.crasher", kind, str(path), *map(str, numbers)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=600)


def told(log: Path) -> tuple[set[str], set[str], set[int]]:
    """What a log says: ids that must be there, those that may be, and talks that may be."""
    certain: set[str] = set()
    doubtful: set[str] = set()
    begun: set[int] = set()
    talk = 0
    for line in log.read_text().splitlines() if log.exists() else []:
        word, *rest = line.split()
        if word == "commit":
            talk = int(rest[0])
            begun.add(talk)
        elif word == "done":
            begun.discard(talk)
            certain.add(rest[0])
        elif word in ("remove", "gone"):
            certain.discard(rest[0])
            (doubtful.add if word == "remove" else doubtful.discard)(rest[0])
    return certain, doubtful, begun


def recovered(path: Path) -> int:
    """Open what a killed process left, see that it is right; returns how many entries there are."""
    certain, doubtful, begun = told(path.with_suffix(".log"))
    folder = opened(path)
    try:
        records = folder.records
        assert certain <= set(records), "a committed entry is lost"
        for name, record in records.items():
            assert name in certain | doubtful or record.used in begun, "offered, not committed"
            talk_number(record.used).check(folder, record)
        assert folder.damaged == 0, "what was committed or not was taken for damage"
        check_space(path, folder)
    finally:
        folder.close()
    return len(records)


def check_space(path: Path, folder: Folder) -> None:
    """There is no byte that no record needs."""
    files: dict[tuple[str, str], int] = {}
    for record in folder.records.values():
        files |= record.files()
    needed = sum(files.values()) + sum(map(folder.record_bytes, folder.records.values()))
    own = [path / "ninfer-pool.json", path / folder.fingerprint / "geometry.json"]
    assert tree_bytes(path) == folder.bytes == needed + sum(each.stat().st_size for each in own)


def test_killed_at_every_call_in_turn(tmp_path: Path) -> None:
    files = FailingFiles(failing(), at=-1, calls=tuple(CALLS))
    live(tmp_path / "whole", files, iter((1, 2)))
    assert recovered(tmp_path / "whole") > 0
    crash("calls", tmp_path, 0, files.count, 1)
    found = []
    for at in range(files.count):
        log = tmp_path / f"{at}.log"
        assert not log.exists() or "closed" not in log.read_text()
        found.append(recovered(tmp_path / str(at)))
    assert found[0] == 0
    assert found[-1] > 0


def test_killed_again_and_again_while_it_recovers(tmp_path: Path) -> None:
    files = FailingFiles(failing(), at=-1, calls=tuple(CALLS))
    live(tmp_path / "whole", files, iter((1, 2)))
    calls = (0, files.count, 29)
    crash("calls", tmp_path, *calls)
    crash("opening", tmp_path, *calls)
    assert sum(recovered(tmp_path / str(at)) for at in range(*calls)) > 0


@pytest.mark.parametrize("seed", [1, 2])
def test_killed_at_random_moments(
    tmp_path: Path, seed: int, request: pytest.FixtureRequest
) -> None:
    lives, rounds = (20, 20) if request.config.getoption("--long") else (12, 2)
    for turn in range(rounds):
        crash("kill", tmp_path, lives, 1000 * seed + turn)
        for number in range(4):
            recovered(tmp_path / str(number))
