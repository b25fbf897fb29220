"""G1 to G11 where there are tiers below the device, each as its own tests."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from ninfer_pool.tiers.memory import HostMemory
from tests.machinery.driver import SPACE
from tests.tiers.entries import tree_bytes
from tests.tiers.failing_files import CALLS, FailingFiles, UnsyncedFiles, failing
from tests.tiers.shops import (
    ANSWER,
    ENTRY,
    PAGE,
    GatedFiles,
    WatchedFiles,
    check,
    picture,
    serve,
    shop,
    talk,
    told,
    where,
)
from tests.tiers.world import TieredDriver, audit_tiers

KINDS = ("host", "disk")


def one_tier(kind: str, path: Path, *, entries: int = 100, **options: Any) -> TieredDriver:
    """A pool with one tier below it that has room for so many entries."""
    if kind == "host":
        return shop(host=entries * ENTRY // PAGE, **options)
    return shop(disk=path / "disk", disk_budget=300 + entries * 2100, **options)


# -- what goes where -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_device_has_no_room_for_goes_down_whole(kind: str, tmp_path: Path) -> None:
    driver = one_tier(kind, tmp_path)
    serve(driver, *range(8))
    assert driver.pool.stats().counters.evictions > 0
    assert where(driver, *range(8)) == [kind] * 4 + ["device"] * 4
    below = [entry for entry in driver.pool.entries() if entry.tier == kind]
    assert [entry.checkpoints for entry in below] == [((20, "turn"), (22, "frontier"))] * 4
    assert audit_tiers(driver) == 8
    [tier] = driver.pool.stats().tiers
    assert (tier.tier, tier.entries, tier.checkpoints, tier.images) == (kind, 4, 8, 8)


def test_from_host_it_goes_to_disk_before_it_is_evicted(tmp_path: Path) -> None:
    driver = shop(host=2 * ENTRY // PAGE, disk=tmp_path / "disk")
    serve(driver, *range(8))
    assert where(driver, *range(8)) == ["disk"] * 2 + ["host"] * 2 + ["device"] * 4
    audit_tiers(driver)
    check(driver, tmp_path / "disk")


@pytest.mark.parametrize("kind", KINDS)
def test_a_promotion_names_its_tier_everywhere(kind: str, tmp_path: Path) -> None:
    driver = one_tier(kind, tmp_path)
    serve(driver, *range(8))
    assert str(driver.pool.explain(driver.prompt(told(0)))).count(f"in the {kind} tier")
    served = driver.serve(told(0))
    assert (served.start, served.explanation.tier, served.reason) == (22, kind, "hit")
    [tier] = driver.pool.stats().tiers
    assert (tier.promoted, tier.promoted_bytes) == (1, 8 * PAGE)
    again = driver.serve([*told(0), 1])
    assert (again.start, again.explanation.tier) == (23, "device")
    assert driver.pool.stats().tiers[0].promoted == 1
    assert driver.serve(talk(50)).explanation.tier is None


def test_what_is_shared_with_the_device_is_not_moved_again(tmp_path: Path) -> None:
    """Branches of one long prompt, one of them below: only what it has alone comes back."""
    driver = shop(host=200, num_pages=60)
    stem = talk(0, 24)
    boundaries = [(24, "system")]
    first = [*stem, 1, 2, 3, 4, 5, 6]
    driver.serve(first, boundaries=boundaries)
    serve(driver, *range(1, 7))  # and out it goes, all of it
    driver.serve([*stem, 9], boundaries=boundaries)  # the stem comes back
    before = driver.pool.stats().tiers[0].promoted_bytes
    assert driver.serve([*first, 7], boundaries=boundaries).start == 30
    assert driver.pool.stats().tiers[0].promoted_bytes - before == (8 - 6 + 2) * PAGE


# -- G1, G2, G3, G4 --------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["default", "lru", "gdsf"])
@pytest.mark.parametrize("kind", KINDS)
def test_g1_nothing_goes_while_the_bytes_of_a_tier_suffice(
    kind: str, policy: str, tmp_path: Path
) -> None:
    driver = one_tier(kind, tmp_path, entries=30, policy=policy)
    serve(driver, *range(30))
    assert None not in where(driver, *range(30))
    for number in (3, 17, 0, 29, 8):
        assert driver.serve(told(number)).start == 22
    assert driver.pool.stats().tiers[0].dropped == 0


@pytest.mark.parametrize("kind", KINDS)
def test_g2_a_promotion_frees_what_it_needs_and_one_victim(kind: str, tmp_path: Path) -> None:
    driver = one_tier(kind, tmp_path)
    serve(driver, *range(12))
    for number in range(8):
        served = driver.serve(told(number))
        assert served.explanation.tier == kind
        assert 0 < served.evicted_bytes <= served.needed_bytes + served.victim_max_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_g3_full_tiers_take_what_is_new(kind: str, tmp_path: Path) -> None:
    driver = one_tier(kind, tmp_path, entries=3)
    for number in range(40):
        serve(driver, number)
        assert where(driver, number) == ["device"]
        if number >= 4:
            assert where(driver, number - 4) == [kind]
    assert where(driver, 0) == [None]


@pytest.mark.parametrize("kind", KINDS)
def test_g4_what_is_pinned_below_stays(kind: str, tmp_path: Path) -> None:
    driver = one_tier(kind, tmp_path, entries=3)
    first, *_ = serve(driver, *range(5))
    assert where(driver, 0) == [kind]
    assert driver.pool.pin(first)
    assert driver.pool.find(first)[0].pinned
    serve(driver, *range(5, 20))
    assert where(driver, 0) == [kind]
    assert driver.pool.unpin(first)
    assert not driver.pool.find(first)[0].pinned
    serve(driver, *range(20, 40))
    assert where(driver, 0) == [None]


@pytest.mark.parametrize("kind", KINDS)
def test_g4_where_nothing_may_go_the_answer_is_no(kind: str, tmp_path: Path) -> None:
    """Nothing is moved for a request that is refused, and later it is served."""
    driver = one_tier(kind, tmp_path)
    serve(driver, 0)
    pinned = serve(driver, 1, 2, 3, 4, pin=True)
    assert where(driver, 0) == [kind]
    before = picture(driver)
    assert driver.pool.acquire(driver.prompt(told(0))) is None
    assert driver.pool.last_refusal is not None
    assert driver.pool.last_refusal.reason == "no_room"
    assert picture(driver) == before
    driver.pool.unpin(pinned[0])
    assert driver.serve(told(0)).start == 22


# -- G5 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["runs", "images"])
def test_g5_a_flipped_bit_is_a_miss_and_is_counted_once(what: str, tmp_path: Path) -> None:
    driver = shop(disk=tmp_path / "disk")
    serve(driver, *range(8))
    for file in (tmp_path / "disk").glob(f"*/{what}/*"):
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw)
    served = driver.serve(told(0))
    assert (served.start, served.explanation.tier) == (0, None)
    assert driver.pool.stats().tiers[0].failed == 1
    check(driver)
    assert driver.serve([*told(0), 5]).explanation.tier == "device"


def test_g5_what_is_damaged_on_disk_is_served_from_what_is_left(tmp_path: Path) -> None:
    """The frontier's image is damaged: the request resumes at the turn before it or not at all,
    never from it."""
    driver = shop(disk=tmp_path / "disk")
    serve(driver, *range(8))
    disk = driver.tiers.shelves[0]
    [record] = disk.keys[driver.pool.entries()[0].key].values()
    file = next((tmp_path / "disk").glob(f"*/images/{disk.places[record.tip.stored.image].file}"))
    file.write_bytes(bytes(file.stat().st_size))
    assert driver.serve(told(0)).start in (0, 20)
    check(driver)


# -- G6, G7 ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_g6_a_request_that_needs_nothing_from_a_tier_leaves_it_alone(
    kind: str, tmp_path: Path
) -> None:
    driver = one_tier(kind, tmp_path)
    keys = serve(driver, *range(6))
    driver.pool.evict(keys[4])  # there is room
    before = picture(driver)
    lease = driver.begin(told(5))
    assert lease is not None
    lease.release()
    driver.audit()
    assert picture(driver) == before


@pytest.mark.parametrize("kind", KINDS)
def test_g7_looking_changes_nothing(kind: str, tmp_path: Path) -> None:
    driver = one_tier(kind, tmp_path)
    keys = serve(driver, *range(8))
    before, pool = picture(driver), driver.pool
    for number in range(9):
        prompt = driver.prompt(told(number))
        pool.lookup(prompt)
        str(pool.explain(prompt))
        pool.explain(prompt, exact=True)
    pool.stats()
    pool.entries()
    pool.entries(newest=6)
    assert [pool.find(key)[0].tier for key in keys] == [kind] * 4 + ["device"] * 4
    pool.check()
    assert picture(driver) == before


# -- G8 --------------------------------------------------------------------------------------


def day(driver: TieredDriver) -> None:
    """Conversations come, go down, come back and go on; every request is served."""
    serve(driver, *range(6))
    driver.tiers.step()
    driver.serve(told(0))
    driver.pool.evict(driver.pool.entries()[0].key)
    serve(driver, 7, 8)
    driver.serve(told(2), answer=[5])
    driver.tiers.flush()


@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_g8_a_disk_that_fails_at_every_call_in_turn_fails_no_request(
    tmp_path: Path, code: int, *, long_run: bool, lasting: bool
) -> None:
    files = FailingFiles(failing(code), at=-1, calls=tuple(CALLS))
    driver = shop(disk=tmp_path / "whole", files=files)
    first = files.count
    day(driver)
    last = files.count
    failed = 0
    for at in range(first, last, 1 if long_run else 23):
        path = tmp_path / str(at)
        files = FailingFiles(failing(code), at=at, calls=tuple(CALLS), lasting=lasting)
        driver = shop(disk=path, files=files)
        day(driver)
        files.calls = frozenset()
        failed += driver.pool.stats().tiers[0].failed
        check(driver, None if lasting else path)
        audit_tiers(driver)
        driver.close()
        again = shop(disk=path)
        assert audit_tiers(again) >= 0
        check(again, path)
        assert again.pool.stats().tiers[0].damaged == 0
        again.close()
    assert failed > 0


@pytest.mark.parametrize("call", ["write", "read", "commit"])
def test_g8_host_memory_that_fails_at_every_call_in_turn_fails_no_request(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(HostMemory, call)
    for at in range(1000):
        count = 0

        def failing_call(*args: Any, at: int = at, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == at + 1:
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            return right(*args, **options)

        monkeypatch.setattr(HostMemory, call, failing_call)
        driver = shop(host=40)
        day(driver)
        check(driver)
        audit_tiers(driver)
        [host] = driver.tiers.shelves
        assert isinstance(host.medium, HostMemory)
        host.medium.check(list(host.places.values()))
        if count <= at:
            break
    assert call == "read" or at > 3


# -- G9 --------------------------------------------------------------------------------------


def test_g9_every_byte_that_is_written_is_within_the_budget(tmp_path: Path) -> None:
    path, budget = tmp_path / "disk", 9_000
    most = 0

    def look() -> None:
        nonlocal most
        most = max(most, tree_bytes(path))

    driver = shop(host=20, disk=path, disk_budget=budget, files=WatchedFiles(look))
    for turn in range(3):
        serve(driver, *range(12))
        for number in range(0, 12, 5):
            driver.serve([*told(number), turn], answer=ANSWER)
            driver.tiers.step()
        driver.tiers.flush()
    assert budget / 2 < most <= budget
    check(driver, path)


def test_g9_an_entry_that_a_tier_is_too_small_for_is_left_out() -> None:
    """Nothing else goes for it."""
    driver = shop(host=20)
    serve(driver, *range(5))
    driver.serve(talk(9, 150))
    driver.pool.release(driver.pool.entries()[-1].key)  # so that it goes next
    before = picture(driver)[0][1]
    assert len(before) == 2
    driver.serve(talk(10, 4))
    [tier] = driver.pool.stats().tiers
    assert tier.dropped == 1
    assert picture(driver)[0][1] == before
    assert driver.pool.explain(driver.prompt([*talk(9, 150), 1])).resumable == 0
    check(driver)


# -- G10, G11 --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_g10_with_a_constant_for_a_hash_every_answer_is_right(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ninfer_pool.core.identity.xxh3_128", lambda *parts: bytes(16))
    driver = one_tier(kind, tmp_path)
    for number in (0, 1, 2, 3, 4, 5, 0, 1, 6, 7, 2):
        driver.serve(told(number), boundaries=[(20, "turn")])
    driver.tiers.flush()
    for number in range(9):
        assert where(driver, number)[0] in (None, kind, "device")
        driver.serve([*told(number), 4])


@pytest.mark.parametrize("written", range(5))
def test_g11_what_is_not_whole_is_not_offered(written: int, tmp_path: Path) -> None:
    """Two runs, two images and the manifest: each of its files is about to be made."""
    files = GatedFiles("create", first=written)
    driver = shop(disk=tmp_path / "disk", background=True, files=files)
    serve(driver, *range(4))
    assert driver.tiers.step()
    assert files.stopped.wait(30)
    disk = driver.tiers.shelves[0]
    assert (disk.records, disk.checkpoints) == ({}, 0)
    assert not disk.walk(SPACE, driver.prompt(told(0)).buffer, [])
    files.gate.set()
    assert driver.tiers.down.worker.wait(30)
    assert (len(disk.records), disk.checkpoints) == (1, 2)
    check(driver, tmp_path / "disk")
    driver.close()


def test_g11_what_was_aborted_leaves_no_trace(tmp_path: Path) -> None:
    """Cancelled halfway, then again: nothing of it is found, nor does it take any bytes."""
    driver = shop(disk=tmp_path / "disk", files=UnsyncedFiles())
    serve(driver, *range(4))
    empty = driver.pool.stats().tiers[0].bytes
    assert driver.tiers.step(max_bytes=1)
    assert driver.tiers.down.every()
    assert driver.pool.clear() == 4
    driver.tiers.step()
    check(driver, tmp_path / "disk")
    assert driver.pool.stats().tiers[0].bytes == empty
