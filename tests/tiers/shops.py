"""What the tests by hand share: small pools with tiers, conversations, and files that wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.tiers.entries import tree_bytes
from tests.tiers.failing_files import UnsyncedFiles
from tests.tiers.world import TieredDriver, config

PAGE = 32
ENTRY = 10 * PAGE
"""What a served `talk` takes: six pages and two images of two; the pool holds four of them."""


def talk(number: int, length: int = 20) -> list[int]:
    """A prompt that shares nothing with those of other numbers."""
    return [1000 * (number + 1) + at for at in range(length)]


ANSWER = (7, 8)


def told(number: int) -> list[int]:
    """A conversation that was served, and the user's next word: 22 tokens can be resumed."""
    return [*talk(number), *ANSWER, 9]


def shop(*, files: UnsyncedFiles | None = None, **options: Any) -> TieredDriver:
    """A pool of 40 pages with the tiers asked for; other options are `PoolConfig`'s."""
    names = ("host", "disk", "disk_budget", "background", "rates", "namespace", "audits")
    tiers = {name: options.pop(name) for name in names if name in options}
    return TieredDriver(config(grid=64, **options), files=files or UnsyncedFiles(), **tiers)


def serve(driver: TieredDriver, *numbers: int, **options: Any) -> list[str]:
    """Serve conversations from their beginning; returns the keys."""
    keys = [driver.serve(talk(number), answer=ANSWER, **options).key for number in numbers]
    assert None not in keys
    return keys  # type: ignore[return-value]


def where(driver: TieredDriver, *numbers: int) -> list[str | None]:
    """The tier that the next turn of each conversation would resume in; None: a miss."""
    found = [driver.pool.explain(driver.prompt(told(number))) for number in numbers]
    return [each.tier if each.resumable >= 22 else None for each in found]


def picture(driver: TieredDriver) -> Any:
    """Everything in the tiers that an answer or a victim could depend on."""
    tick = driver.pool.state.tick
    return [
        (
            shelf.name,
            [
                (r.entry.key, r.entry.used, r.entry.hits, r.pinned, r.entry.released)
                for r in shelf.order(tick)
            ],
            [
                (mark.position, mark.kind, mark.tick, mark.uses, mark.superseded)
                for record in shelf.records.values()
                for mark in record.marks
            ],
            shelf.medium.used,
            repr(shelf.traffic),
        )
        for shelf in driver.tiers.shelves
    ]


def check(driver: TieredDriver, folder: Path | None = None) -> None:
    """Count everything again, once nothing is on its way."""
    assert driver.tiers.down.worker.wait(30)
    driver.pool.check()
    assert not driver.tiers.down.every()
    for shelf in driver.tiers.shelves:
        shelf.check()
        assert (shelf.reserved, shelf.reading) == (0, [])
        if folder is not None and shelf.name == "disk":
            assert shelf.medium.used == tree_bytes(folder)


def step_until_stopped(driver: TieredDriver, files: GatedFiles) -> None:
    """Let the tiers work until a thread has come to the gate."""
    for _ in range(3000):
        if files.stopped.wait(0.01):
            return
        driver.tiers.step()
    raise AssertionError("no thread has come to the gate")


class GatedFiles(UnsyncedFiles):
    """Stops a thread that is not the main one at some calls, until it is let through."""

    def __init__(self, *calls: str, first: int = 0) -> None:
        self.calls: Sequence[str] = calls
        self.first = first
        """How many of these calls are let through before."""
        self.stopped = threading.Event()
        self.gate = threading.Event()

    def pass_gate(self, call: str) -> None:
        """Wait, where this call is to wait."""
        own = threading.current_thread() is threading.main_thread()
        if call in self.calls and not own:
            self.first -= 1
            if self.first < 0:
                self.stopped.set()
                assert self.gate.wait(30)

    def create(self, folder: int, name: str) -> int:
        self.pass_gate("create")
        return super().create(folder, name)

    def rename(self, folder: int, old: str, new: str) -> None:
        self.pass_gate("rename")
        super().rename(folder, old, new)

    def sync(self, descriptor: int) -> None:
        self.pass_gate("sync")
        super().sync(descriptor)

    def _preadv(self, file: int, views: Sequence[memoryview], offset: int) -> int:
        self.pass_gate("_preadv")
        return super()._preadv(file, views, offset)


class WatchedFiles(UnsyncedFiles):
    """Looks after every byte that is written or name that is changed."""

    def __init__(self, look: Callable[[], None]) -> None:
        self.look = look

    def _writev(self, file: int, views: Sequence[memoryview]) -> int:
        done = super()._writev(file, views)
        self.look()
        return done

    def rename(self, folder: int, old: str, new: str) -> None:
        super().rename(folder, old, new)
        self.look()
