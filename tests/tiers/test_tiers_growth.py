"""What is written, what it costs, what grows and what does not; and when a restore pays."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ninfer_pool import PoolConfig, PrefixPool
from ninfer_pool.tiers import ArrayPayload, Rates, Tiers, open_tiers
from ninfer_pool.tiers.memory import HostMemory
from ninfer_pool.tiers.parts import Image, Run
from tests.machinery.driver import SPACE, Driver
from tests.tiers.entries import tree_bytes
from tests.tiers.failing_files import UnsyncedFiles
from tests.tiers.shops import (
    ANSWER,
    ENTRY,
    PAGE,
    WatchedFiles,
    check,
    serve,
    shop,
    talk,
    told,
    where,
)
from tests.tiers.world import TieredDriver, audit_tiers

ROW_BYTES = 1024
IMAGE_BYTES = 30_000


def large(path: Path, **options: Any) -> tuple[Driver, Tiers]:
    """A pool whose rows and images are so large that headers do not matter; nothing is lost."""
    config = PoolConfig(
        num_pages=1500, page_bytes=16 * ROW_BYTES, image_bytes=IMAGE_BYTES, page_tokens=16, grid=512
    )
    driver = Driver(config, audits=False)
    slab = np.zeros((config.num_pages, config.page_bytes), dtype=np.uint8)
    payload = ArrayPayload(slab, layout="large", regions=((0, 1, ROW_BYTES),))
    tiers = open_tiers(
        driver.pool,
        payload,
        namespace=SPACE,
        disk_dir=path,
        disk_budget="1GiB",
        background=False,
        files=UnsyncedFiles(),
        **options,
    )
    return driver, tiers


def size_of(thing: Any, seen: set[int] | None = None) -> int:
    """Bytes of an object and all that it refers to, arrays and strings included."""
    seen = set() if seen is None else seen
    if id(thing) in seen or isinstance(thing, type) or callable(thing):
        return 0
    seen.add(id(thing))
    size = sys.getsizeof(thing)
    if isinstance(thing, dict):
        parts = [*thing.keys(), *thing.values()]
    elif isinstance(thing, (list, tuple, set, frozenset)):
        parts = list(thing)
    else:
        slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
        parts = [getattr(thing, name) for name in slots if hasattr(thing, name)]
        parts += [vars(thing)] if hasattr(thing, "__dict__") else []
    return size + sum(size_of(part, seen) for part in parts)


# -- written once ----------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0, 16, 5])
def test_a_hundred_turns_with_a_flush_each_write_their_kv_once(share: int, tmp_path: Path) -> None:
    """Turns of whole pages, of none, and of any length."""
    driver, tiers = large(tmp_path / "disk")
    chance, tokens, boundaries = random.Random(1), [*range(100, 148)], [(48, "system")]
    for _ in range(100):
        length = 16 if share == 16 else 3 if share == 5 else chance.randrange(1, 60)
        tokens += [chance.randrange(1000) for _ in range(length)]
        boundaries.append((len(tokens), "turn"))
        driver.serve(tokens, boundaries=boundaries, answer=[5] * (16 - length % 16))
        tokens += [5] * (16 - length % 16)
        assert tiers.flush() == 0
    [disk] = driver.pool.stats().tiers
    kv, images = len(tokens) * ROW_BYTES, disk.images * IMAGE_BYTES
    assert kv + images <= disk.stored_bytes <= 1.1 * (kv + images)
    assert disk.images <= 2 * 100 + 1
    [record] = tiers.shelves[0].records.values()
    runs = [part for part in record.parts if isinstance(part, Run)]
    assert sum(run.end - run.begin for run in runs) == len(tokens)
    assert tree_bytes(tmp_path / "disk") <= 1.1 * (kv + len(record.marks) * IMAGE_BYTES)
    tiers.close()


def test_without_a_flush_or_a_demotion_no_image_is_written(tmp_path: Path) -> None:
    driver, tiers = large(tmp_path / "disk")
    empty = driver.pool.stats().tiers[0].bytes
    tokens = talk(0)
    for turn in range(20):
        driver.serve(tokens, answer=[turn])
        tokens += [turn, 3]
        tiers.step()
    [disk] = driver.pool.stats().tiers
    assert (disk.images, disk.stored_bytes, disk.bytes) == (0, 0, empty)
    tiers.flush()
    assert driver.pool.stats().tiers[0].images <= 3
    tiers.close()


def test_a_thousand_turns_grow_nothing(tmp_path: Path) -> None:
    """Conversations come, go on for some turns and are left; budgets are what is used."""
    driver = shop(host=60, disk=tmp_path / "disk", disk_budget=60_000, audits=False)
    chance, chats, sizes = random.Random(2), [talk(n, 5) for n in range(6)], []
    for turn in range(1000):
        at = chance.randrange(6)
        if len(chats[at]) > 40 or chance.random() < 0.1:
            chats[at] = talk(10 + turn, 5)
        driver.serve(chats[at], answer=[turn % 50])
        chats[at] = [*chats[at], turn % 50, 7]
        driver.tiers.step()
        if turn % 40 == 0:
            driver.tiers.flush()
        if turn % 200 == 199:
            book = (
                driver.tiers.shelves,
                driver.tiers.down._drafts,
                driver.pool.state.catalog.roots,
            )
            sizes.append(size_of(book))
            for tier in driver.pool.stats().tiers:
                assert tier.bytes <= tier.budget_bytes
            check(driver, tmp_path / "disk")
    assert max(sizes[1:]) <= 1.3 * sizes[0]


# -- field cases -----------------------------------------------------------------------------


def test_field_32_the_budget_of_the_folder_holds_during_every_operation(tmp_path: Path) -> None:
    path, budget, looks = tmp_path / "disk", 12_000, 0

    def look() -> None:
        nonlocal looks
        looks += 1
        assert tree_bytes(path) <= budget

    driver = shop(disk=path, disk_budget=budget, files=WatchedFiles(look))
    for number in range(20):
        driver.serve(talk(number, 20 + number), boundaries=[(8, "system")], answer=ANSWER)
        driver.tiers.step(max_bytes=1)
    driver.tiers.flush()
    assert looks > 100
    check(driver, path)


def test_field_33_replacing_keeps_to_the_budget(tmp_path: Path) -> None:
    """The same conversation again and again, a turn longer each time."""
    path, budget = tmp_path / "disk", 8_000

    def look() -> None:
        assert tree_bytes(path) <= budget

    driver = shop(host=24, disk=path, disk_budget=budget, files=WatchedFiles(look))
    tokens = talk(0, 8)
    for turn in range(12):
        driver.serve(tokens, answer=[turn])
        tokens += [turn, 9]
        serve(driver, 50 + turn)
        driver.tiers.flush()
        for tier in driver.pool.stats().tiers:
            assert tier.bytes <= tier.budget_bytes
    assert driver.pool.stats().tiers[1].stored > 6


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_field_34_shared_bytes_count_once_and_clear_frees_all(kind: str, tmp_path: Path) -> None:
    """Eight branches of one system prompt: its pages and its image lie there once."""
    driver = shop(host=400) if kind == "host" else shop(disk=tmp_path / "disk")
    empty = driver.pool.stats().tiers[0].bytes
    stem = talk(0, 16)
    for last in range(8):
        driver.serve([*stem, last, 1, 2, 3], boundaries=[(16, "system")])
        serve(driver, 20 + last)  # each branch goes down
    driver.serve(talk(60, 120))
    shelf = driver.tiers.shelves[0]
    branches = [r for r in shelf.records.values() if shelf.sequence(r)[:4] == _bytes(stem[:1])]
    assert len(branches) == 8
    parts = {part for record in branches for part in record.parts}
    images = [part for part in parts if isinstance(part, Image)]
    rows = sum(part.end - part.begin for part in parts if isinstance(part, Run))
    assert (len(images), rows) == (1 + 8, 16 + 8 * 4)
    assert driver.pool.clear() > 8
    [tier] = driver.pool.stats().tiers
    assert (tier.bytes, tier.entries, tier.checkpoints) == (empty, 0, 0)
    check(driver)


def _bytes(tokens: list[int]) -> bytes:
    return np.array(tokens, dtype=np.int32).tobytes()


# -- persistence -----------------------------------------------------------------------------


def test_after_a_restart_every_checkpoint_is_there_with_its_entry(tmp_path: Path) -> None:
    driver = shop(disk=tmp_path / "disk")
    boundaries = [(6, "system"), (13, "history"), (20, "turn")]
    driver.serve(talk(0), answer=ANSWER, boundaries=boundaries)
    before = driver.pool.entries()[0]
    assert driver.tiers.flush() == 0
    driver.close()
    driver = shop(disk=tmp_path / "disk")
    [after] = driver.pool.entries()
    assert after.checkpoints == before.checkpoints == (*boundaries, (22, "frontier"))
    assert (after.key, after.tokens, after.tier) == (before.key, 22, "disk")
    for at, _ in boundaries:
        other = [*talk(0)[:at], 7777]
        assert driver.serve(other).start == at
    audit_tiers(driver)


def test_an_entry_that_grows_takes_its_checkpoints_below_along(tmp_path: Path) -> None:
    """Only its tip came back to the device; the system prompt's checkpoint lies below alone."""
    driver = shop(disk=tmp_path / "disk")
    driver.serve(talk(0), answer=ANSWER, boundaries=[(6, "system")])
    for turn in range(3):
        driver.tiers.flush()
        driver.close()
        driver = shop(disk=tmp_path / "disk")
        assert driver.serve([*told(0), *range(turn)]).start == 22 + turn
    driver.tiers.flush()
    [entry] = driver.pool.stats().tiers
    assert entry.entries == 1
    driver.close()
    driver = shop(disk=tmp_path / "disk")
    assert driver.serve([*talk(0)[:6], 7777]).start == 6


def test_right_after_reopening_nothing_is_taken_and_everything_is_free(tmp_path: Path) -> None:
    """The first requests after it use every page, and harm nothing that lies below."""
    driver = shop(host=40, disk=tmp_path / "disk")
    serve(driver, *range(8))
    driver.tiers.flush()
    driver.close()
    driver = shop(host=40, disk=tmp_path / "disk")
    stats = driver.pool.stats()
    assert (stats.pages_free, stats.retained_bytes, stats.entries) == (40, 0, 0)
    host, disk = stats.tiers
    assert (host.bytes, disk.entries, disk.checkpoints) == (0, 8, 16)
    assert disk.bytes == tree_bytes(tmp_path / "disk")
    driver.serve(talk(30, 150))
    serve(driver, *range(40, 44))
    for number in range(8):
        assert driver.serve(told(number)).start == 22
    check(driver, tmp_path / "disk")


def test_the_order_of_use_outlives_the_process(tmp_path: Path) -> None:
    """What was used last before a restart goes last after it."""
    driver = shop(disk=tmp_path / "disk", disk_budget=30_000)
    serve(driver, *range(6))
    driver.serve(told(0))
    driver.tiers.flush()
    size = driver.pool.stats().tiers[0].bytes
    driver.close()
    driver = shop(disk=tmp_path / "disk", disk_budget=size + 5_000)
    serve(driver, *range(20, 27))
    left = [number for number, tier in enumerate(where(driver, *range(6))) if tier]
    assert left == [0, *range(7 - len(left), 6)]
    assert 1 < len(left) < 6


def test_a_smaller_budget_after_a_restart_is_kept_at_once(tmp_path: Path) -> None:
    driver = shop(disk=tmp_path / "disk")
    serve(driver, *range(8))
    driver.tiers.flush()
    driver.close()
    driver = shop(disk=tmp_path / "disk", disk_budget=9_000)
    assert tree_bytes(tmp_path / "disk") <= 9_000
    left = where(driver, *range(8))
    assert left[-1] == "disk"
    assert left[0] is None
    check(driver, tmp_path / "disk")


def test_a_flush_without_time_says_what_is_left(tmp_path: Path) -> None:
    driver = shop(host=2 * ENTRY // PAGE, disk=tmp_path / "disk")
    serve(driver, *range(6))
    assert where(driver, *range(6)) == ["host"] * 2 + ["device"] * 4
    assert driver.tiers.flush(seconds=0) == 6
    assert driver.pool.stats().tiers[1].entries == 0
    assert driver.tiers.flush() == 0
    assert driver.tiers.flush(seconds=0) == 0
    assert driver.pool.stats().tiers[1].entries == 6
    nothing = shop(host=20)
    serve(nothing, 0)
    assert nothing.tiers.flush() == 0


# -- when it pays ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["host", "disk"])
@pytest.mark.parametrize("pays", [True, False])
def test_the_planner_takes_what_is_quicker(kind: str, tmp_path: Path, *, pays: bool) -> None:
    """8 pages at these rates take 2 s; prefilling 22 tokens takes 22 / rate."""
    rates = Rates(
        prefill_tokens_s=10.0 if pays else 12.0, bytes_s={kind: 8 * PAGE / 2.0}, fixed=True
    )
    tiers: dict[str, Any] = {"host": 100} if kind == "host" else {"disk": tmp_path / "disk"}
    driver = shop(rates=rates, **tiers)
    serve(driver, *range(8))
    assert where(driver, 0) == [kind if pays else None]
    served = driver.serve(told(0))
    assert (served.start, served.explanation.tier) == ((22, kind) if pays else (0, None))
    assert driver.pool.stats().tiers[0].promoted == pays
    assert rates.prefill_tokens_s == (10.0 if pays else 12.0)


def test_a_restore_is_counted_from_what_the_device_has(tmp_path: Path) -> None:
    """Two tokens more are not worth an image; all twenty-two are."""
    rates = Rates(prefill_tokens_s=10.0, bytes_s={"host": 8 * PAGE / 2.0}, fixed=True)
    driver = shop(rates=rates, host=100, policy="lru", num_pages=42)
    serve(driver, *range(4))
    driver.serve(talk(4, 4))
    prompts = [driver.prompt(told(number)) for number in range(4)]
    [cut] = [prompt for prompt in prompts if driver.pool.explain(prompt).resumable == 20]
    assert driver.pool.explain(cut).tier == "device"
    assert len(driver.tiers.shelves[0].records) == 1
    assert driver.serve(cut).start == 20
    assert driver.pool.stats().tiers[0].promoted == 0


def test_a_tier_takes_no_memory_as_it_works(tmp_path: Path) -> None:
    """All of the host tier's bytes are there from the start, and stay the same ones."""
    driver: TieredDriver = shop(host=30)
    [shelf] = driver.tiers.shelves
    assert isinstance(shelf.medium, HostMemory)
    slab = shelf.medium._slab
    assert slab is not None
    assert slab.nbytes == shelf.medium.budget == 30 * PAGE
    serve(driver, *range(30))
    assert shelf.medium._slab is slab
    assert isinstance(driver.pool, PrefixPool)
