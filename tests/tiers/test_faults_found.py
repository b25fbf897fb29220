"""Faults that reviewers found in the tiers, each by the least that shows it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ninfer_pool.errors import StoreError
from ninfer_pool.testing import symbolic
from tests.machinery.driver import SPACE
from tests.tiers.entries import Talk, opened, tree_bytes
from tests.tiers.failing_files import UnsyncedFiles
from tests.tiers.shops import GatedFiles, check, serve, shop, step_until_stopped
from tests.tiers.world import TieredDriver

SYSTEM = list(range(16))


class LossyFiles(UnsyncedFiles):
    """A disk that can be told to fail when it is to make something last."""

    def __init__(self) -> None:
        self.fails = False
        self.syncs = 0
        self.before: Callable[[], None] = lambda: None
        self.fails_after = "/"
        """The end of a name; once a file has got such a name, it fails."""

    def rename(self, folder: int, old: str, new: str) -> None:
        super().rename(folder, old, new)
        self.fails = self.fails or new.endswith(self.fails_after)

    def sync(self, descriptor: int) -> None:
        if self.fails:
            self.syncs += 1
            self.before()
            raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("host", [None, 200])
@pytest.mark.parametrize("image_bytes", [0, None])
def test_a_branch_does_not_tell_a_run_that_it_left_halfway_its_own_tokens(
    image_bytes: int | None, host: int | None, tmp_path: Path
) -> None:
    """The branch is longer, and written first."""
    options: dict[str, Any] = {"num_pages": 400} | (
        {} if image_bytes is None else {"image_bytes": image_bytes}
    )
    driver = shop(disk=tmp_path / "disk", host=host, **options)
    first = list(range(100, 140))
    branch = [*first[:10], *range(500, 560)]
    for tokens in (first, branch, [*first, 7, 8, 9], [*branch, 7, 8, 9]):
        driver.serve(tokens, answer=(7, 8))
    assert driver.tiers.flush() == 0
    assert sum(tier.failed for tier in driver.pool.stats().tiers) == 0
    driver.close()
    again = shop(disk=tmp_path / "disk", **options)
    prompts = [again.prompt([*tokens, 7, 8, 9]) for tokens in (first, branch)]
    assert [again.pool.explain(each).resumable >= 40 for each in prompts] == [True, True]
    check(again, tmp_path / "disk")
    again.close()


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


def salted(driver: TieredDriver, salt: str, rest: list[int], answer: tuple[int, ...]) -> int:
    """Serve a tenant's conversation; return where it began."""
    space = replace(SPACE, salt=salt)
    prompt = driver.prompt([*SYSTEM, *rest], boundaries=[(16, "system")], namespace=space)
    return driver.serve(prompt, answer=answer).start


def test_files_that_two_tenants_share_hide_neither_s_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a real model's, the KV of equal tokens is equal whoever asks."""
    cell = symbolic.Cell(b"s" * 16, b"s" * 16)
    monkeypatch.setattr(symbolic, "seed", lambda space: cell)
    driver = shop(disk=tmp_path / "disk", num_pages=200)
    for number, salt in enumerate("ab"):
        salted(driver, salt, list(range(100 * number + 100, 100 * number + 112)), (7, 8))
    driver.tiers.flush()
    driver.close()
    again = shop(disk=tmp_path / "disk", num_pages=200)
    assert salted(again, "a", [500, 501, 502], ()) == 16
    assert salted(again, "a", [*range(100, 112), 7, 8, 9], ()) == 30
    again.close()


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


def test_a_manifest_that_is_withdrawn_and_then_fails_is_counted_once(tmp_path: Path) -> None:
    files = LossyFiles()
    folder = opened(tmp_path / "disk", files=files)
    Talk(2, 20).commit(folder)
    talk, wanted = Talk(1, 20), [True]
    record = talk.record(folder, talk.write(folder, 0, 20), 20)

    def withdraw() -> None:
        files.fails, wanted[0] = False, False
        folder.withdraw()

    files.fails_after, files.before = ".json", withdraw
    with pytest.raises(StoreError, match="Input/output error"):
        folder.commit(record, wanted=lambda: wanted[0])
    assert folder.bytes == tree_bytes(tmp_path / "disk")
    assert len(folder.records) == 1
    folder.close()


def test_what_the_start_measures_with_is_gone_where_the_disk_fails(tmp_path: Path) -> None:
    files = LossyFiles()
    files.fails_after = ".safetensors"
    driver = shop(disk=tmp_path / "disk", files=files, background=True)
    files.fails, files.fails_after = False, "/"
    assert list((tmp_path / "disk").glob("*/*/*.safetensors")) == []
    check(driver, tmp_path / "disk")
    driver.close()
