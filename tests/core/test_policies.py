"""Each policy takes the victims that its paper takes: checked one by one, through a real pool."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from ninfer_pool import (
    POLICIES,
    Lease,
    Namespace,
    Policy,
    PoolConfig,
    PrefixPool,
    Prompt,
)
from ninfer_pool.core.entry import Entry
from tests.core.policy_references import REFERENCES
from tests.core.shop import driver
from tests.machinery.driver import Driver

SPACE = Namespace(weights="sha256:1", kv_dtype="bf16")
PAGE_BYTES, IMAGE_PAGES, PAGE_TOKENS = 1024, 3, 64
REQUESTS, PROMPTS, ENTRIES = 10_000, 60, 24


def made_prompt(number: int, tokens: int) -> Prompt:
    """A prompt that shares nothing with those of other numbers; one checkpoint, at its end."""
    ids = range(1000 * number, 1000 * number + tokens)
    return Prompt(list(ids), namespace=SPACE, boundaries=[(tokens, "turn")])


def made_config(policy: str | Callable[[], Policy], **bounds: int) -> PoolConfig:
    return PoolConfig(
        num_pages=2000,
        page_bytes=PAGE_BYTES,
        image_bytes=IMAGE_PAGES * PAGE_BYTES,
        page_tokens=PAGE_TOKENS,
        lanes=4,
        policy=policy,
        events=64,
        retained_bytes=bounds.get("retained_bytes"),
        max_entries=bounds.get("max_entries"),
    )


def serve(pool: PrefixPool, prompt: Prompt, *, priority: int = 0) -> str:
    """Commit a prompt as an engine would; return its key."""
    lease = pool.acquire(prompt, priority=priority)
    assert isinstance(lease, Lease)
    with lease:
        for chunk in lease.chunks():
            lease.advance(prompt.tokens[chunk.begin : chunk.end])
            lease.checkpoint("turn", position=chunk.end)
        lease.commit()
    return pool.key(prompt)


class World:
    """Random requests to a pool, and to a reference that knows the bounds and the protected."""

    def __init__(self, policy: str, seed: int, **bounds: int) -> None:
        self.random = random.Random(seed)
        self.pool = PrefixPool(made_config(policy, **bounds))
        self.bounds = bounds
        self.reference = REFERENCES[policy]()
        lengths = [self.random.randint(1, 900) for _ in range(PROMPTS)]
        self.prompts = [made_prompt(x, tokens) for x, tokens in enumerate(lengths)]
        self.number = {self.pool.key(prompt): x for x, prompt in enumerate(self.prompts)}
        pages = [-(-tokens // PAGE_TOKENS) + IMAGE_PAGES for tokens in lengths]
        self.reference.sizes = {x: PAGE_BYTES * count for x, count in enumerate(pages)}
        self.reference.tokens = dict(enumerate(lengths))
        self.pinned: list[int] = []
        self.running: dict[int, Callable[[], None]] = {}
        self.commits = self.seen = self.declined = 0

    def step(self) -> tuple[list[int], list[int]]:
        """Make one request and some protection; return the victims expected, and those taken."""
        self.protect()
        x = min(int(self.random.expovariate(3.5 / PROMPTS)), PROMPTS - 1)
        serve(self.pool, self.prompts[x])
        self.commits += 1
        if x in self.reference.kept:
            self.reference.hit(x, self.commits)
        else:
            self.reference.insert(x, self.commits)
        return list(self.expected(x)), self.taken()

    def protect(self) -> None:
        """Now and then pin, unpin, start a request that resumes an entry, or abort one."""
        x = self.random.choice(self.reference.kept or [-1])
        chance = self.random.random()
        if chance < 0.02 and len(self.pinned) < 4 and x >= 0 and x not in self.pinned:
            self.pinned.append(x)
            assert self.pool.pin(self.pool.key(self.prompts[x]))
        elif chance < 0.04 and self.pinned:
            assert self.pool.unpin(self.pool.key(self.prompts[self.pinned.pop(0)]))
        elif chance < 0.1 and len(self.running) < 3 and x >= 0 and x not in self.running:
            lease = self.pool.acquire(self.prompts[x])
            assert isinstance(lease, Lease)
            assert lease.start == len(self.prompts[x])
            self.running[x] = lease.release
        elif chance < 0.16 and self.running:
            self.running.pop(next(iter(self.running)))()

    def expected(self, newest: int) -> Iterator[int]:
        protected = {newest, *self.pinned, *self.running}
        while self.over():
            for x in self.reference.candidates(self.commits):
                if x not in protected:
                    break
                self.declined += 1
            else:
                raise AssertionError("the reference knows no victim")
            self.reference.evict(x, self.commits)
            yield x

    def over(self) -> bool:
        kept = self.reference.kept
        if "max_entries" in self.bounds:
            return len(kept) > self.bounds["max_entries"]
        return sum(self.reference.sizes[x] for x in kept) > self.bounds["retained_bytes"]

    def taken(self) -> list[int]:
        events = self.pool.events(since=self.seen)
        self.seen += len(events)
        return [self.number[event.key] for event in events if event.kind == "evicted"]


BOUNDS = [
    pytest.param({"max_entries": ENTRIES}, id="entries"),
    pytest.param({"retained_bytes": ENTRIES * 10 * PAGE_BYTES}, id="bytes"),
]


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("policy", REFERENCES)
def test_victims_are_the_reference_s_one_by_one(policy: str, bounds: dict[str, int]) -> None:
    world = World(policy, seed=5, **bounds)
    evicted = 0
    for request in range(REQUESTS):
        expected, taken = world.step()
        assert taken == expected, f"request {request}"
        evicted += len(taken)
        if request % 500 == 0:
            world.pool.check()
    assert evicted > REQUESTS // 10
    assert world.declined > 100, "protection was never in the way"


@pytest.mark.parametrize("policy", POLICIES)
def test_the_lowest_priority_goes_first_and_what_is_released_before_all(policy: str) -> None:
    pool = PrefixPool(made_config(policy, max_entries=4))
    keys = [serve(pool, made_prompt(x, 100), priority=p) for x, p in enumerate((7, 0, 7, -1))]
    assert pool.release(keys[2])
    for x in range(4, 7):
        serve(pool, made_prompt(x, 100), priority=9)
    evicted = [event.key for event in pool.events() if event.kind == "evicted"]
    assert evicted == [keys[2], keys[3], keys[1]]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_takes_a_release_back(policy: str) -> None:
    pool = PrefixPool(made_config(policy, max_entries=2))
    first, second = (serve(pool, made_prompt(x, 100)) for x in range(2))
    assert pool.release(first)
    grown = Prompt([*made_prompt(0, 100).tokens.tolist(), 7], namespace=SPACE)
    again = serve(pool, grown)
    assert pool.release(second)
    serve(pool, made_prompt(2, 100))
    assert pool.find(again)
    assert not pool.find(second)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_victim_with_earlier_checkpoints_is_shortened_before_it_goes(policy: str) -> None:
    pool = PrefixPool(made_config(policy, retained_bytes=30 * PAGE_BYTES))
    marks = [(640, "system"), (1280, "turn")]
    long = Prompt(list(range(1280)), namespace=SPACE, boundaries=marks)
    serve(pool, long)  # 20 pages and two images
    for x, tokens, position in ((1, 640, 640), (2, 1700, 0)):
        serve(pool, made_prompt(2 * x, tokens))
        pool.check()
        assert pool.explain(long).resumable == position
    kinds = [event.kind for event in pool.events() if event.kind != "stored"]
    assert kinds[:2] == ["truncated", "evicted"]


@pytest.mark.parametrize("policy", POLICIES)
def test_where_all_others_are_pinned_the_newest_goes(policy: str) -> None:
    pool = PrefixPool(made_config(policy, max_entries=2))
    kept = [serve(pool, made_prompt(x, 100), priority=x) for x in range(2)]
    assert all(pool.pin(key) for key in kept)
    newest = serve(pool, made_prompt(2, 100))
    assert [bool(pool.find(key)) for key in (*kept, newest)] == [True, True, False]
    pool.check()


class Smallest(Policy):
    """A policy of one's own: the shortest entry goes first."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def on_insert(self, entry: Entry, tick: int) -> None:
        self.entries.append(entry)

    def on_remove(self, entry: Entry) -> None:
        self.entries.remove(entry)

    def victims(self, tick: int) -> Iterator[Entry]:
        return iter(sorted(self.entries, key=lambda entry: entry.tokens))


def test_a_policy_of_one_s_own_decides_who_goes() -> None:
    pool = PrefixPool(made_config(Smallest, max_entries=2))
    lengths = (300, 200, 400, 100, 350)
    keys = [serve(pool, made_prompt(x, tokens)) for x, tokens in enumerate(lengths)]
    evicted = [event.key for event in pool.events() if event.kind == "evicted"]
    assert evicted == [keys[1], keys[0], keys[3]], "the newest stays even where it is the smallest"


def test_a_use_that_ends_in_another_entry_is_told_to_the_policy() -> None:
    """A plain request that parted inside an entry consumed it: the least recent one goes."""
    shop = driver(image_bytes=0, policy="lru", max_entries=2)
    used = shop.serve(range(1, 9)).key
    idle = shop.serve(range(21, 29)).key
    shop.serve([1, 2, 3, 4, 5, 90, 91])
    assert shop.pool.find(str(used))
    assert not shop.pool.find(str(idle))


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_entry_is_offered_once_under_pressure_too(policy: str) -> None:
    shop = Driver(driver(max_entries=4, policy=policy).pool.config, audits=False)
    for _ in range(6):
        for number in range(6):
            shop.serve(range(100 * number, 100 * number + 9))
    state = shop.pool.state
    offered = [entry.identity for entry in state.catalog.order.victims(state.tick)]
    assert sorted(offered) == sorted(state.catalog.entries)


PROMPT = list(range(20))


def test_one_commit_uses_an_entry_once() -> None:
    shop = driver()
    shop.serve(PROMPT)
    shop.serve([*PROMPT, 5])
    assert [entry.hits for entry in shop.pool.entries()] == [1]
