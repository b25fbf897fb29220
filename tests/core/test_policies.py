"""Each policy takes the victims that its paper takes: checked one by one, through a real pool."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest

from ninfer_pool import POLICIES, ConfigError, Namespace, Policy, PoolConfig, PrefixPool, Prompt
from ninfer_pool.entry import Checkpoint, Entry, Table
from ninfer_pool.lease import Lease
from ninfer_pool.policy import Ranked
from ninfer_pool.policy.marconi import Marconi
from ninfer_pool.policy.s3fifo import S3Fifo

SPACE = Namespace(weights="sha256:1", kv_dtype="bf16")
PAGE_BYTES, IMAGE_PAGES, PAGE_TOKENS = 1024, 3, 64
REQUESTS, PROMPTS, ENTRIES = 10_000, 60, 24


# -- references, straight from the papers, in plain lists ----------------------------------


class Reference:
    """What a policy should do, by the number of the prompt; sizes in bytes."""

    def __init__(self) -> None:
        self.kept: list[int] = []
        """Oldest first."""
        self.tokens: dict[int, int] = {}
        self.sizes: dict[int, int] = {}

    def insert(self, x: int, now: int) -> None:
        self.kept.append(x)

    def hit(self, x: int, now: int) -> None:
        pass

    def candidates(self, now: int) -> Iterator[int]:
        """Victims in their order; the first one that nothing protects is then evicted."""
        raise NotImplementedError

    def evict(self, x: int, now: int) -> None:
        self.kept.remove(x)


class FifoReference(Reference):
    def candidates(self, now: int) -> Iterator[int]:
        return iter(self.kept)


class LruReference(FifoReference):
    def hit(self, x: int, now: int) -> None:
        self.kept.remove(x)
        self.kept.append(x)


class GdsfReference(Reference):
    """Cherkasova 1998: priority = clock + frequency x cost / size; clock = that of the victim."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = 0.0
        self.frequency: dict[int, int] = {}
        self.priority: dict[int, float] = {}

    def insert(self, x: int, now: int) -> None:
        super().insert(x, now)
        self.frequency[x] = 0
        self.hit(x, now)

    def hit(self, x: int, now: int) -> None:
        self.frequency[x] += 1
        self.priority[x] = self.clock + self.frequency[x] * self.tokens[x] / self.sizes[x]

    def candidates(self, now: int) -> Iterator[int]:
        return iter(sorted(self.kept, key=lambda x: self.priority[x]))

    def evict(self, x: int, now: int) -> None:
        super().evict(x, now)
        self.clock = max(self.clock, self.priority[x])


class MarconiReference(Reference):
    """Pan et al. 2025, equations 1 and 2, both terms normalised over all that is kept."""

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.alpha = alpha
        self.last_used: dict[int, int] = {}

    def insert(self, x: int, now: int) -> None:
        super().insert(x, now)
        self.last_used[x] = now

    def hit(self, x: int, now: int) -> None:
        self.last_used[x] = now

    def candidates(self, now: int) -> Iterator[int]:
        recency = {x: 1 / (now + 1 - self.last_used[x]) for x in self.kept}
        flops = {x: self.tokens[x] * (1 + self.tokens[x] / 274_000) for x in self.kept}
        efficiency = {x: flops[x] / self.sizes[x] for x in self.kept}
        newest, oldest = max(recency.values()), min(recency.values())
        most, least = max(efficiency.values()), min(efficiency.values())

        def utility(x: int) -> float:
            recent = (recency[x] - oldest) / (newest - oldest)
            return recent + self.alpha * (efficiency[x] - least) / (most - least)

        return iter(sorted(self.kept, key=utility))


class S3FifoReference(Reference):
    """Yang et al. 2023, algorithm 1. Heads are at the end of a list, tails at its beginning.

    A victim that the pool declines goes to the head; G holds when its members left S.
    """

    def __init__(self) -> None:
        super().__init__()
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghost: list[int] = []
        self.left: dict[int, int] = {}
        self.freq: dict[int, int] = {}

    def insert(self, x: int, now: int) -> None:
        super().insert(x, now)
        self.freq[x] = 0
        if x in self.left and self.left[x] in self.ghost:
            self.ghost.remove(self.left[x])
            self.main.append(x)
        else:
            self.small.append(x)

    def hit(self, x: int, now: int) -> None:
        self.freq[x] = min(self.freq[x] + 1, 3)

    def space(self, queue: list[int]) -> int:
        return sum(self.sizes[x] for x in queue)

    def candidates(self, now: int) -> Iterator[int]:
        tried: list[int] = []
        while self.space(self.small) >= 0.1 * self.space(self.kept) and self.small:
            tail = self.small[0]
            if self.freq[tail] > 1:
                self.freq[tail] = 0
                self.main.append(self.small.pop(0))
            elif tail in tried:
                break
            else:
                yield tail
                tried.append(self.small.pop(0))
                self.small.append(tail)
        while not set(self.main) <= set(tried):
            tail = self.main[0]
            if tail not in tried and self.freq[tail] > 0:
                self.freq[tail] -= 1
            elif tail not in tried:
                yield tail
                tried.append(tail)
            self.main.append(self.main.pop(0))
        yield from (x for x in self.small if x not in tried)

    def evict(self, x: int, now: int) -> None:
        self.left[x] = now
        if x in self.small:
            self.ghost = [*self.ghost, now][-int(0.9 * len(self.kept)) :]
            self.small.remove(x)
        else:
            self.main.remove(x)
        super().evict(x, now)


REFERENCES: dict[str, Callable[[], Reference]] = {
    "lru": LruReference,
    "fifo": FifoReference,
    "gdsf": GdsfReference,
    "marconi": partial(MarconiReference, Marconi().alpha),
    "s3fifo": S3FifoReference,
}


# -- one world, two accounts of it ---------------------------------------------------------


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


# -- policies by hand ----------------------------------------------------------------------


class Smallest(Policy):
    """A policy of one's own: the shortest entry goes first."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def added(self, entry: Entry, tick: int) -> None:
        self.entries.append(entry)

    def removed(self, entry: Entry) -> None:
        self.entries.remove(entry)

    def order(self, tick: int) -> Iterator[Entry]:
        return iter(sorted(self.entries, key=lambda entry: entry.tokens))


def test_a_policy_of_one_s_own_decides_who_goes() -> None:
    pool = PrefixPool(made_config(Smallest, max_entries=2))
    lengths = (300, 200, 400, 100, 350)
    keys = [serve(pool, made_prompt(x, tokens)) for x, tokens in enumerate(lengths)]
    evicted = [event.key for event in pool.events() if event.kind == "evicted"]
    assert evicted == [keys[1], keys[0], keys[3]], "the newest stays even where it is the smallest"


def test_a_policy_must_say_in_what_order() -> None:
    entry = made_entry(0)
    policy = Policy()
    policy.added(entry, 1)
    policy.used(entry, 2)
    policy.shortened(entry, 3)
    policy.removed(entry)
    policy.returned(1, 4)
    policy.stranger(5)
    with pytest.raises(NotImplementedError):
        policy.order(6)
    with pytest.raises(NotImplementedError):
        Ranked().added(entry, 1)


def made_entry(number: int, *, tokens: int = 64, size: int = 100) -> Entry:
    mark = Checkpoint(
        position=tokens,
        kind="turn",
        cuts=None,
        table=Table(np.zeros(1, dtype=np.int32)),
        tail=-1,
        image=-1,
        lane=0,
        tick=number,
    )
    entry = Entry(identity=number, namespace=SPACE, tip=mark, tick=number, lane=0)
    entry.saved, entry.bytes = tokens, size
    return entry


def filled(policy: Policy, count: int) -> list[Entry]:
    entries = [made_entry(number) for number in range(count)]
    for entry in entries:
        policy.added(entry, entry.created)
    return entries


def take(policy: Policy, tick: int) -> Entry:
    """Evict the first victim, as the pool does."""
    victim = next(policy.order(tick))
    policy.removed(victim)
    return victim


@pytest.mark.parametrize("name", POLICIES)
def test_every_entry_is_offered_once_in_the_end(name: str) -> None:
    policy = POLICIES[name]()
    assert list(policy.order(0)) == []
    entries = filled(policy, 12)
    for tick, entry in enumerate([*entries[:5], *entries[:3], *entries[:3]], start=20):
        policy.used(entry, tick)
    for tick in (50, 51):  # twice: what nobody took is offered again
        offered = list(policy.order(tick))
        assert sorted(entry.identity for entry in offered) == list(range(12))


def test_s3fifo_promotes_what_was_used_twice_and_not_what_was_used_once() -> None:
    policy = S3Fifo()
    entries = filled(policy, 4)
    for tick in (10, 11):
        policy.used(entries[0], tick)
    policy.used(entries[1], 12)
    assert [take(policy, 20).identity for _ in range(4)] == [1, 2, 3, 0]


def test_s3fifo_counts_one_commit_as_one_use() -> None:
    policy = S3Fifo()
    entries = filled(policy, 2)
    policy.used(entries[0], 10)
    policy.used(entries[0], 10)
    assert take(policy, 20) is entries[0]


def test_s3fifo_lets_a_ghost_into_the_main_queue() -> None:
    policy = S3Fifo()
    filled(policy, 4)
    assert take(policy, 20).identity == 0
    policy.returned(3, 23)
    back = made_entry(24)
    policy.added(back, 24)
    for number in (25, 26):
        policy.added(made_entry(number), number)
    assert [take(policy, 30).identity for _ in range(6)] == [1, 2, 3, 25, 26, 24]


@pytest.mark.parametrize("age", [2, 4], ids=["younger", "older"])
def test_s3fifo_takes_what_left_at_another_time_for_no_ghost(age: int) -> None:
    policy = S3Fifo()
    filled(policy, 4)
    assert take(policy, 20).identity == 0
    policy.returned(age, 23)
    policy.added(made_entry(24), 24)
    policy.added(made_entry(25), 25)
    assert [take(policy, 30).identity for _ in range(5)] == [1, 2, 3, 24, 25]


def test_s3fifo_forgets_a_ghost_that_came_when_a_stranger_comes_in_its_place() -> None:
    policy = S3Fifo()
    filled(policy, 4)
    take(policy, 20)
    policy.returned(3, 23)
    policy.stranger(23)
    policy.added(made_entry(24), 24)
    policy.added(made_entry(25), 25)
    assert [take(policy, 30).identity for _ in range(5)] == [1, 2, 3, 24, 25]


def test_s3fifo_remembers_no_more_than_nine_ghosts_for_ten_entries() -> None:
    policy = S3Fifo()
    filled(policy, 4)
    for tick in (20, 21, 22):  # at the third there is room for one ghost: the youngest
        take(policy, tick)
    for gone in (20, 21, 22):
        policy.returned(30 - gone, 30)
        policy.added(made_entry(100 + gone), 31)
    assert [take(policy, 40).identity for _ in range(4)] == [3, 120, 121, 122]


def test_s3fifo_leaves_no_ghost_of_what_was_not_a_victim() -> None:
    policy = S3Fifo()
    entries = filled(policy, 4)
    policy.removed(entries[3])
    assert next(policy.order(20)) is entries[0]
    entries[0].bytes = 50
    policy.shortened(entries[0], 20)
    policy.removed(entries[0])
    policy.returned(1, 21)
    for number in (22, 23):
        policy.added(made_entry(number), number)
    assert [take(policy, 30).identity for _ in range(4)] == [1, 2, 22, 23]


def test_s3fifo_measures_its_small_queue_in_bytes() -> None:
    policy = S3Fifo()
    entries = filled(policy, 3)
    for entry in entries[:2]:
        for tick in (10, 11):
            policy.used(entry, tick)
    assert take(policy, 20) is entries[2]  # both others are in the main queue now
    thin = made_entry(5, size=20)
    policy.added(thin, 21)
    offered = list(policy.order(22))  # 20 of 220 bytes are less than a tenth
    assert offered == [entries[0], entries[1], thin], "yet it goes where all else is protected"
    thin.bytes = 23
    policy.used(thin, 23)
    assert next(policy.order(24)) is thin


def test_marconi_without_alpha_is_lru() -> None:
    policy = Marconi(alpha=0)
    entries = [made_entry(number, tokens=10 ** (number % 4 + 1)) for number in range(8)]
    for entry in entries:
        policy.added(entry, entry.created)
    assert list(policy.order(9)) == entries


def test_marconi_keeps_what_spares_more_work_for_each_byte() -> None:
    policy = Marconi(alpha=3)
    worth, *others = (made_entry(x, tokens=tokens) for x, tokens in enumerate((5_000, 64, 64, 64)))
    for entry in (worth, *others):
        policy.added(entry, entry.created)
    assert list(policy.order(9)) == [*others, worth]


def test_marconi_counts_attention_s_square_and_only_what_lies_past_the_kept_ancestor() -> None:
    policy = Marconi(alpha=3, attention_tokens=1_000)
    late, early = made_entry(1, tokens=3_000), made_entry(2, tokens=1_000)
    late.saved = early.saved = 900  # 900 tokens after 2,100 cost more than 900 after 100
    late.tip.tick = early.tip.tick = 1
    for entry in (late, early):
        policy.added(entry, 2)
    assert list(policy.order(3)) == [early, late]
    late.saved = 100
    assert list(policy.order(3)) == [late, early]


@pytest.mark.parametrize(
    ("field", "value"),
    [("alpha", -0.1), ("alpha", float("nan")), ("alpha", float("inf")), ("attention_tokens", 0)],
)
def test_marconi_refuses_weights_that_mean_nothing(field: str, value: float) -> None:
    make: Callable[..., Marconi] = Marconi
    with pytest.raises(ConfigError, match=f"{field}: .*needs"):
        make(**{field: value})
