"""What can be asked of one entry, wherever it lies; and whose entries they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from ninfer_pool.errors import StoreError
from ninfer_pool.tiers import Rates
from ninfer_pool.tiers.memory import HostMemory
from tests.machinery.driver import SPACE
from tests.tiers.entries import tree_bytes
from tests.tiers.shops import (
    ANSWER,
    ENTRY,
    PAGE,
    GatedFiles,
    check,
    picture,
    serve,
    shop,
    step_until_stopped,
    talk,
    told,
    where,
)
from tests.tiers.world import TieredDriver, audit_tiers

TWO = 2 * ENTRY // PAGE


def both(path: Path) -> tuple[TieredDriver, list[str]]:
    """Two conversations on disk alone, two in host memory, four on the device; their keys."""
    driver = shop(host=TWO, disk=path)
    keys = serve(driver, *range(8))
    assert where(driver, *range(8)) == ["disk"] * 2 + ["host"] * 2 + ["device"] * 4
    return driver, keys


def test_entries_are_told_once_each_with_their_highest_tier(tmp_path: Path) -> None:
    driver, keys = both(tmp_path / "disk")
    driver.tiers.flush()
    entries = driver.pool.entries()
    assert [entry.key for entry in entries] == keys
    assert [entry.tier for entry in entries] == ["disk"] * 2 + ["host"] * 2 + ["device"] * 4
    assert [entry.key for entry in driver.pool.entries(newest=5)] == keys[3:]
    salted = driver.pool.entries(where=lambda space: space.salt is not None)
    assert salted == []
    for entry in entries:
        [found] = driver.pool.find(entry.key)
        assert (found.tier, found.tokens, found.checkpoints) == (
            entry.tier, 22, ((20, "turn"), (22, "frontier")),
        )  # fmt: skip


@pytest.mark.parametrize("number", [0, 2, 7])
def test_evict_reaches_every_tier(number: int, tmp_path: Path) -> None:
    driver, keys = both(tmp_path / "disk")
    driver.tiers.flush()
    assert driver.pool.evict(keys[number])
    assert not driver.pool.evict(keys[number])
    assert not driver.pool.find(keys[number])
    assert where(driver, number) == [None]
    assert all(keys[number] not in shelf.keys for shelf in driver.tiers.shelves)
    rest = [each for each in range(8) if each != number]
    assert None not in where(driver, *rest)
    check(driver, tmp_path / "disk")
    driver.close()
    again = shop(host=TWO, disk=tmp_path / "disk")
    assert where(again, number, *rest) == [None] + ["disk"] * 7


def test_a_conversation_cut_short_above_is_deleted_whole_by_its_key_below(tmp_path: Path) -> None:
    """Its beginning was left on the device under another key; it does not bring it back."""
    driver = shop(disk=tmp_path / "disk")
    boundaries = [(12, "system")]
    key = driver.serve(talk(0), answer=ANSWER, boundaries=boundaries).key
    assert key is not None
    serve(driver, 1, 2, 3)
    assert key not in driver.pool.state.catalog.keys
    assert [entry.tokens for entry in driver.pool.entries() if entry.tier == "device"][:1] == [20]
    assert driver.pool.evict(key)
    assert driver.pool.explain(driver.prompt(told(0))).resumable == 0
    serve(driver, *range(4, 12))
    driver.tiers.flush()
    assert driver.pool.explain(driver.prompt(told(0))).resumable == 0


def test_clear_reaches_every_tier(tmp_path: Path) -> None:
    driver, _ = both(tmp_path / "disk")
    assert driver.pool.clear() == 8
    assert driver.pool.entries() == []
    assert where(driver, *range(8)) == [None] * 8
    host, disk = driver.pool.stats().tiers
    assert (host.bytes, host.checkpoints, disk.checkpoints) == (0, 0, 0)
    assert not [file for name in ("runs", "images", "entries") for file in _files(tmp_path, name)]
    check(driver, tmp_path / "disk")
    serve(driver, *range(8))
    assert where(driver, 0) == ["disk"]


def _files(path: Path, folder: str) -> list[Path]:
    return list((path / "disk").glob(f"*/{folder}/*"))


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_released_entry_goes_first_from_its_tier(kind: str, tmp_path: Path) -> None:
    tiers: dict[str, Any] = {"disk": tmp_path / "disk", "disk_budget": 11_500}
    driver = shop(**({"host": 4 * ENTRY // PAGE} if kind == "host" else tiers))
    keys = serve(driver, *range(7))
    assert where(driver, 0, 1, 2) == [kind] * 3
    assert driver.pool.release(keys[2])
    assert driver.pool.find(keys[2])[0].released
    serve(driver, *range(7, 9))
    assert where(driver, 2) == [None]
    assert kind in where(driver, 0, 1)


def test_verbs_of_a_key_that_nothing_lies_under(tmp_path: Path) -> None:
    driver, keys = both(tmp_path / "disk")
    before = picture(driver)
    for key in ("0" * 32, keys[0][:-1], ""):
        pool = driver.pool
        assert not any((pool.pin(key), pool.unpin(key), pool.release(key), pool.evict(key)))
        assert pool.find(key) == []
    assert picture(driver) == before


# -- no resurrection -------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["evict", "clear"])
@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("call", ["create", "sync"])
@pytest.mark.parametrize("written", range(5))
def test_what_is_deleted_while_it_is_written_does_not_come_back(
    written: int, call: str, verb: str, tmp_path: Path, *, host: bool
) -> None:
    """Neither in this process nor in the next, be this one killed at once; each of its files is
    being made, or waited for."""
    files = GatedFiles(call, first=written)
    driver = shop(host=40 if host else None, disk=tmp_path / "disk", background=True, files=files)
    keys = serve(driver, *range(7 if host else 4))
    step_until_stopped(driver, files)
    [draft] = driver.tiers.down.every()
    assert draft.key == keys[0]
    if verb == "evict":
        assert driver.pool.evict(keys[0])
    else:
        driver.pool.clear()
    assert where(driver, 0) == [None]
    copytree(tmp_path / "disk", tmp_path / "killed")
    killed = shop(disk=tmp_path / "killed")
    assert where(killed, 0) == [None]
    killed.close()
    files.gate.set()
    assert driver.tiers.down.worker.wait(30)
    assert where(driver, 0) == [None]
    assert not driver.pool.find(keys[0])
    assert sum(tier.failed for tier in driver.pool.stats().tiers) == 0
    check(driver, tmp_path / "disk")
    driver.close()
    again = shop(disk=tmp_path / "disk")
    assert where(again, 0) == [None]
    again.close()


def test_what_is_deleted_while_it_is_fetched_does_not_come_back(tmp_path: Path) -> None:
    driver = shop(disk=tmp_path / "disk")
    keys = serve(driver, *range(3))
    driver.tiers.flush()
    driver.close()
    files = GatedFiles("_preadv")
    driver = shop(host=40, disk=tmp_path / "disk", background=True, files=files)
    assert driver.tiers.prefetch(driver.prompt(told(1)))
    assert files.stopped.wait(30)
    assert driver.pool.evict(keys[1])
    files.gate.set()
    assert driver.tiers.down.worker.wait(30)
    assert where(driver, 0, 1, 2) == ["disk", None, "disk"]
    check(driver, tmp_path / "disk")
    driver.close()


def test_what_is_deleted_before_its_thread_begins_does_not_come_back(tmp_path: Path) -> None:
    """The worker has been told, and has not done anything yet."""
    driver = shop(disk=tmp_path / "disk", background=True)
    keys = serve(driver, *range(4))
    with driver.pool.state.lock:
        assert driver.tiers.step()
        driver.pool.evict(keys[0])
    assert driver.tiers.down.worker.wait(30)
    assert where(driver, 0) == [None]
    check(driver, tmp_path / "disk")
    driver.close()


# -- what is on its way ----------------------------------------------------------------------


def test_what_expires_halfway_is_not_stored_with_pages_of_another(tmp_path: Path) -> None:
    """Begun, then some of its checkpoints are over, their pages go to others, then it leaves."""
    now = 0.0
    driver = shop(disk=tmp_path / "disk", clock=lambda: now)
    serve(driver, 0, ttl_seconds=5.0)
    key = driver.serve(told(0)).key
    serve(driver, 1, 2)
    driver.serve(talk(9, 4))
    assert driver.tiers.step(max_bytes=1)
    [draft] = driver.tiers.down.every()
    assert draft.key == key
    now = 10.0
    driver.serve(talk(10, 4))
    driver.serve(talk(11, 4))
    serve(driver, *range(3, 9))
    audit_tiers(driver)
    check(driver, tmp_path / "disk")


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_part_that_two_entries_store_at_once_lies_there_once(kind: str, tmp_path: Path) -> None:
    """A branch leaves while the entry that it parted from is stored piece by piece."""
    driver = shop(host=200) if kind == "host" else shop(disk=tmp_path / "disk")
    stem, boundaries = talk(0, 16), [(16, "system")]
    first = driver.serve([*stem, 1, 2, 3], boundaries=boundaries).key
    serve(driver, 1, 2)
    driver.serve(talk(8, 4))
    driver.serve(talk(9, 4))
    assert driver.tiers.step(max_bytes=1)
    [draft] = driver.tiers.down.every()
    assert draft.key == first
    branch = driver.serve([*stem, 5, 6, 7], boundaries=boundaries)
    assert (branch.start, branch.key is None) == (16, False)
    driver.pool.release(str(branch.key))
    driver.serve(talk(20, 4))
    assert driver.tiers.down.every() == [draft]
    assert driver.pool.find(str(branch.key))[0].tier == kind
    while driver.tiers.step():
        pass
    audit_tiers(driver)
    check(driver, tmp_path / "disk")
    [tier], [shelf] = driver.pool.stats().tiers, driver.tiers.shelves
    assert tier.stored_bytes == sum(map(shelf.medium.size, shelf.places))
    if isinstance(shelf.medium, HostMemory):
        shelf.medium.check(list(shelf.places.values()))


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_what_came_from_a_tier_is_not_written_to_it_again(kind: str, tmp_path: Path) -> None:
    """Up and down and up: each run and each image was written once."""
    driver = shop(host=200) if kind == "host" else shop(disk=tmp_path / "disk")
    for turn in range(3):
        for number in range(8):
            driver.serve(told(number), retain=turn == 0)
    [tier], [shelf] = driver.pool.stats().tiers, driver.tiers.shelves
    assert tier.promoted > 8
    assert tier.stored_bytes == sum(map(shelf.medium.size, shelf.places))


# -- whose they are --------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["salt", "adapter"])
def test_salts_and_adapters_keep_to_themselves_in_every_tier(field: str, tmp_path: Path) -> None:
    """The same tokens under two tenants, or two adapters, and none; also after a restart."""
    named: list[dict[str, Any]] = [{field: name} for name in ("one", "two")]
    spaces = [SPACE, *(replace(SPACE, **fields) for fields in named)]
    driver = shop(host=TWO, disk=tmp_path / "disk")
    for space in spaces[:2]:
        driver.serve(driver.prompt(talk(0), namespace=space), answer=ANSWER)
    serve(driver, *range(1, 9))
    for _ in range(2):
        tiers = [
            driver.pool.explain(driver.prompt(told(0), namespace=space)).tier for space in spaces
        ]
        assert tiers == ["disk", "disk", None]
        third = driver.pool.explain(driver.prompt(told(0), namespace=spaces[2]))
        assert third.matched == 0
        driver.tiers.flush()
        driver.close()
        driver = shop(host=TWO, disk=tmp_path / "disk")
    served = driver.serve(driver.prompt(told(0), namespace=spaces[1]))
    assert (served.start, served.explanation.tier) == (22, "disk")
    audit_tiers(driver)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weights", "sha256:2"), ("kv_dtype", "bf16"), ("rope", "theta=2"), ("draft", "mtp1"),
        ("world_size", 2),
    ],
)  # fmt: skip
def test_another_models_folder_is_left_alone_and_gives_nothing(
    field: str, value: object, tmp_path: Path
) -> None:
    """Until its bytes are needed: then whole entries of it go."""
    driver = shop(disk=tmp_path / "disk")
    serve(driver, *range(3))
    driver.tiers.flush()
    driver.close()
    size = tree_bytes(tmp_path / "disk")
    other = replace(SPACE, **{field: value})  # type: ignore[arg-type]
    own: dict[str, Any] = {
        "disk": tmp_path / "disk",
        "disk_budget": size + 4_000,
        "namespace": other,
    }
    driver = shop(**own)
    prompt = driver.prompt(told(0))
    assert driver.pool.explain(prompt).tier is None
    driver.close()
    again = shop(disk=tmp_path / "disk")
    assert where(again, 0, 1, 2) == ["disk"] * 3
    again.close()
    driver = shop(**own)
    serve(driver, *range(3))
    driver.tiers.flush()
    assert tree_bytes(tmp_path / "disk") <= size + 4_000
    assert len(driver.pool.stats().tiers) == 1
    assert driver.pool.stats().tiers[0].entries >= 2
    driver.close()
    again = shop(disk=tmp_path / "disk")
    left = where(again, 0, 1, 2)
    assert None in left
    assert audit_tiers(again) == 2 * left.count("disk")


def test_entries_of_another_model_in_the_same_pool_do_not_go_to_disk(tmp_path: Path) -> None:
    driver = shop(disk=tmp_path / "disk")
    other = replace(SPACE, weights="sha256:2")
    for number in range(8):
        driver.serve(driver.prompt(talk(number), namespace=other), answer=ANSWER)
    [tier] = driver.pool.stats().tiers
    assert (tier.entries, tier.failed) == (0, 0)
    assert driver.pool.stats().counters.evictions > 0
    check(driver, tmp_path / "disk")


# -- folders ---------------------------------------------------------------------------------


def test_one_folder_has_one_pool(tmp_path: Path) -> None:
    driver = shop(disk=tmp_path / "disk")
    with pytest.raises(StoreError, match="in use"):
        shop(disk=tmp_path / "disk")
    driver.close()
    driver.close()
    shop(disk=tmp_path / "disk").close()


def test_a_pool_goes_on_without_its_tiers(tmp_path: Path) -> None:
    driver, _ = both(tmp_path / "disk")
    driver.close()
    assert where(driver, 0, 7) == [None, "device"]
    assert driver.pool.stats().tiers == ()
    serve(driver, *range(8))
    driver.audit()
    again = shop(disk=tmp_path / "disk", rates=Rates())
    assert where(again, 0, 1) == ["disk"] * 2


def test_deleting_one_of_two_conversations_leaves_the_other(tmp_path: Path) -> None:
    """Which parts from it before its end, is longer, and the only other one in the tier."""
    driver = shop(disk=tmp_path / "disk")
    [first] = serve(driver, 0)
    driver.tiers.flush()
    second = driver.serve(talk(1, 28), answer=ANSWER).key
    driver.tiers.flush()
    assert driver.pool.evict(first)
    assert list(driver.tiers.shelves[0].keys) == [second]
    check(driver)
