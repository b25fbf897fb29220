"""Forks, tenants and branches that share files: each is stored, found and deleted by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ninfer_pool.testing import symbolic
from tests.machinery.driver import SPACE
from tests.tiers.shops import GatedFiles, check, shop
from tests.tiers.small_pool import disk, push_out, settled, tail, world
from tests.tiers.world import TieredDriver, audit_tiers

SYSTEM = list(range(16))


BOUNDARY = [(16, "system")]


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
