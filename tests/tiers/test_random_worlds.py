"""Random conversations over tiers: whatever happens, nothing wrong is resumed, nothing leaks.

Every restore is compared with a cold run cell by cell; after every step every checkpoint of
every tier is read back, and everything that is counted is counted again.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from ninfer_pool import Prompt
from ninfer_pool.core.lease import Lease
from ninfer_pool.errors import StoreError
from ninfer_pool.tiers import device
from ninfer_pool.tiers.disk_medium import DiskMedium
from ninfer_pool.tiers.memory import HostMemory
from tests.machinery.driver import SPACE, Served
from tests.tiers.entries import tree_bytes
from tests.tiers.failing_files import UnsyncedFiles
from tests.tiers.world import TieredDriver, audit_tiers, config

LONGEST = 44


@dataclass(frozen=True)
class Chat:
    """A conversation so far: what a later prompt of it begins with."""

    tokens: tuple[int, ...] = ()
    media: tuple[tuple[int, int, str | None], ...] = ()
    salt: str | None = None

    def cut(self, position: int) -> Chat:
        """Its beginning, with the media that lie wholly in it."""
        media = tuple(span for span in self.media if span[1] <= position)
        return replace(self, tokens=self.tokens[:position], media=media)

    def said(self, tokens: list[int]) -> Chat:
        """It with more tokens, as far as prompts go here."""
        return replace(self, tokens=self.tokens + tuple(tokens)).cut(LONGEST)


class World:
    """One pool with tiers, and what a seed does to it."""

    def __init__(self, seed: int, folder: Path, *, background: bool) -> None:
        self.random = random.Random(seed)
        self.folder = folder
        folder.mkdir()
        self.background = background
        self.now = 0.0
        self.chats: list[Chat] = []
        self.resumed: Counter[str | None] = Counter()
        self.held: tuple[Lease, Chat] | None = None
        pick = self.random.choice
        image = pick([59, 59, 59, 0])
        self.config = config(
            num_pages=pick([24, 40, 60]),
            lanes=pick([1, 2]),
            image_bytes=image,
            end_logits=bool(image),
            policy=pick(["default", "lru", "gdsf"]),
            retained_bytes=pick([None, None, 20 * 32]),
            max_entries=pick([None, None, 3]),
            minimum_tokens=pick([0, 0, 5]),
            clock=lambda: self.now,
        )
        kind = pick(["host", "disk", "both", "both"])
        self.host = None if kind == "disk" else pick([12, 30, 80])
        self.disk = None if kind == "host" else folder / "disk"
        self.disk_budget = pick([6_000, 20_000, 1 << 20])
        self.driver = self.open()

    def open(self) -> TieredDriver:
        """A process that starts, on what the folder holds."""
        return TieredDriver(
            self.config,
            host=self.host,
            disk=self.disk,
            disk_budget=self.disk_budget,
            background=self.background,
            files=UnsyncedFiles(),
        )

    def chat(self) -> Chat:
        """What the next prompt begins with."""
        pick, below = self.random.choice, self.random.randrange
        if self.chats and self.random.random() < 0.75:
            chat = pick(self.chats)
            if self.random.random() < 0.25:
                chat = chat.cut(below(1, len(chat.tokens) + 1))
        else:
            chat = Chat(tuple(range(8)) if below(2) else (), salt=pick([None, None, "a", "b"]))
        at = len(chat.tokens)
        chat = chat.said([below(50) for _ in range(below(0 if chat.tokens else 1, 9))])
        if at + 3 < len(chat.tokens) and below(4) == 0:
            span = (at + 1, at + 3, pick(["x", "y", None]))
            chat = replace(chat, media=(*chat.media, span))
        return chat

    def prompt(self, chat: Chat) -> Prompt:
        """A prompt of all of a chat, with boundaries somewhere."""
        inside = {at for begin, end, _ in chat.media for at in range(begin + 1, end)}
        places = [at for at in range(1, len(chat.tokens) + 1) if at not in inside]
        count = min(len(places), self.random.choice([0, 0, 1, 2]))
        boundaries = [
            (at, self.random.choice(["system", "turn", "history"]))
            for at in sorted(self.random.sample(places, count))
        ]
        return Prompt(
            list(chat.tokens),
            namespace=replace(SPACE, salt=chat.salt),
            media=chat.media,
            boundaries=boundaries,
        )

    def options(self) -> dict[str, Any]:
        """How a request is admitted."""
        chance = self.random.random
        found: dict[str, Any] = {"claim": chance() < 0.1, "exact": chance() < 0.1}
        if chance() < 0.05:
            found["pin"] = True
        if chance() < 0.15:
            found["ttl_seconds"] = self.random.choice([1.0, 5.0, 30.0])
        if chance() < 0.2:
            found["priority"] = self.random.choice([-1, 1])
        if chance() < 0.05:
            found["retain"] = False
        return found

    # -- what may happen -------------------------------------------------------------------

    def ask(self) -> None:
        """One request, whole; or one that stays open while others run."""
        chat, driver = self.chat(), self.driver
        options = self.options()
        answer = [self.random.randrange(50) for _ in range(self.random.randrange(8))]
        prompt = self.prompt(chat)
        if self.config.lanes > 1 and self.held is None and self.random.random() < 0.2:
            lease = driver.begin(prompt, reserve_tokens=0, **options)
            if lease is not None:
                driver.prefill(lease, chunks=self.random.choice([0, 1, None]))
                self.held = lease, chat
            return
        publish = self.random.random() < 0.1
        served: Served | None = driver.ask(prompt, answer=answer, publish=publish, **options)
        if served is not None:
            self.resumed[served.explanation.tier if served.start else None] += 1
            self.keep(chat.said(answer))

    def keep(self, chat: Chat) -> None:
        """Let later prompts go on from here."""
        self.chats = [*self.chats[-11:], chat]

    def end_held(self) -> None:
        """The open request ends: finished or given up."""
        if self.held is None:
            return
        (lease, chat), self.held = self.held, None
        with lease:
            if self.random.random() < 0.7:
                self.driver.prefill(lease)
                self.driver.finish(lease)
                self.keep(chat)

    def step(self) -> None:
        """The engine has a moment."""
        self.driver.tiers.step(max_bytes=self.random.choice([1, 64, 1 << 20]))

    def prefetch(self) -> None:
        """A request waits in a queue."""
        self.driver.tiers.prefetch(self.prompt(self.chat()))

    def flush(self) -> None:
        """Everything is written out."""
        self.end_held()
        self.driver.tiers.flush()

    def restart(self) -> None:
        """The process ends, cleanly or not, and another starts."""
        if self.random.random() < 0.7:
            self.flush()
        if self.held is not None:
            self.held[0].release()
            self.held = None
        self.driver.close()
        self.driver = self.open()

    def touch(self) -> None:
        """Somebody asks for something of one entry."""
        pool = self.driver.pool
        entries = pool.entries()
        if not entries:
            return
        entry = self.random.choice(entries)
        what = self.random.choice(["pin", "unpin", "release", "evict", "evict"])
        done = getattr(pool, what)(entry.key)
        if what == "evict" and done:
            self.driver.tiers.down.worker.wait()
            assert not pool.find(entry.key), "deleted, and still there"

    def clear(self) -> None:
        """Everything is deleted."""
        self.end_held()
        pool = self.driver.pool
        for entry in pool.entries():
            pool.unpin(entry.key)
        pool.clear()
        self.driver.tiers.down.worker.wait()
        assert not pool.entries()
        assert all(not (tier.entries or tier.checkpoints) for tier in pool.stats().tiers)

    def save_and_load(self) -> None:
        """An entry goes to a file and into another pool, with every checkpoint that is offered."""
        entries = self.driver.pool.entries()
        if not entries:
            return
        entry, path = self.random.choice(entries), self.folder / "one"
        self.driver.tiers.down.worker.wait()
        found = self.driver.pool.find(entry.key)
        if not found:
            return
        self.driver.pool.save(entry.key, path)
        other = TieredDriver(replace(self.config, retained_bytes=None, num_pages=200))
        try:
            key = other.pool.load(path)
        except StoreError as error:
            if "its time is over" in str(error):
                return
            raise
        assert key == entry.key
        other.audit()
        assert [each.key for each in other.pool.entries()] == [entry.key]

    def wait(self) -> None:
        """Time passes."""
        self.now += self.random.choice([0.1, 2.0, 10.0])

    # -- and what holds afterwards ----------------------------------------------------------

    def check(self) -> None:
        """Read everything back and count everything again."""
        driver = self.driver
        if self.random.random() < 0.5:
            driver.tiers.down.worker.wait()
        with driver.pool.state.lock:
            driver.pool.check()
            audit_tiers(driver)
            for tier in driver.pool.stats().tiers:
                assert 0 <= tier.bytes <= tier.budget_bytes
                assert (tier.failed, tier.damaged) == (0, 0)
            down = driver.tiers.down
            if down.every() or down.worker.busy:  # something is on its way
                return
            for shelf in driver.tiers.shelves:
                shelf.check()
                assert shelf.reserved == 0
                assert not shelf.reading
                if isinstance(shelf.medium, HostMemory):
                    shelf.medium.check(list(shelf.places.values()))
                elif isinstance(shelf.medium, DiskMedium) and self.disk is not None:
                    assert shelf.medium.used == tree_bytes(self.disk)

    def live(self, steps: int) -> None:
        """Let so many things happen."""
        happenings = [self.ask] * 12 + [self.step] * 4 + [self.wait, self.touch, self.end_held]
        if self.random.random() < 0.5:
            happenings += [self.clear]
        happenings += [self.save_and_load]
        if self.disk is not None:
            happenings += [self.flush, self.restart, self.prefetch]
        for _ in range(steps):
            self.random.choice(happenings)()
            self.check()
        self.end_held()
        self.driver.close()


@pytest.mark.parametrize("background", [False, True], ids=["at-once", "background"])
def test_random_conversations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, long_run: bool, background: bool
) -> None:
    """Everything at once, in worlds of all kinds and sizes, with runs of one page or of many."""
    resumed: Counter[str | None] = Counter()
    for seed in range(300) if long_run else (*range(9), 26):
        world = World(seed, tmp_path / str(seed), background=background)
        pages = (1, 3, 1000)[seed % 3]
        monkeypatch.setattr(device, "RUN_BYTES", pages * world.config.page_bytes)
        try:
            world.live(120 if long_run else 60)
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
        resumed += world.resumed
    assert min(resumed[tier] for tier in ("device", "host", "disk", None)) > 0
