"""What any policy must keep to: `policy_conformance` makes the tests for one of your own."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ninfer_pool.core.config import PoolConfig
from ninfer_pool.core.entry import Entry
from ninfer_pool.core.lease import Lease
from ninfer_pool.core.policy import Policy
from ninfer_pool.core.pool import PrefixPool
from ninfer_pool.core.prompt import Prompt
from ninfer_pool.testing.simulation import simulate
from ninfer_pool.testing.world import SPACES, World

MakePolicy = Callable[[], Policy]
CONFIG = PoolConfig(num_pages=60, page_bytes=16, image_bytes=32, page_tokens=4, grid=16, lanes=2)
SHRINKING: tuple[dict[str, Any], ...] = (
    {},
    {"num_pages": 36, "retained_bytes": 30 * 16},
    {"num_pages": 30, "max_entries": 3},
    {"num_pages": 24, "retained_bytes": 20 * 16, "max_entries": 1},
)
"""The same pool with less and less room."""
CLOCKS = {
    name: getattr(time, name)
    for unit in ("", "_ns")
    for name in (f"time{unit}", f"monotonic{unit}", f"perf_counter{unit}")
}
SEEDS, SIMULATED = range(3), range(8)


class Supervised(Policy):
    """Passes everything on to a policy and asserts that it changes no entry and reads no clock."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.held: dict[int, Entry] = {}
        """The entries that the policy holds."""

    def on_insert(self, entry: Entry, tick: int) -> None:
        """Pass it on."""
        self.held[entry.identity] = entry
        with self._unchanged():
            self.policy.on_insert(entry, tick)

    def on_hit(self, entry: Entry, tick: int) -> None:
        """Pass it on."""
        with self._unchanged():
            self.policy.on_hit(entry, tick)

    def on_truncate(self, entry: Entry, tick: int) -> None:
        """Pass it on."""
        with self._unchanged():
            self.policy.on_truncate(entry, tick)

    def on_remove(self, entry: Entry) -> None:
        """Pass it on."""
        with self._unchanged():
            self.policy.on_remove(entry)
        self.held.pop(entry.identity, None)

    def on_ghost_hit(self, age: int, gap: int, tick: int) -> None:
        """Pass it on."""
        with self._unchanged():
            self.policy.on_ghost_hit(age, gap, tick)

    def on_cold_miss(self, tick: int) -> None:
        """Pass it on."""
        with self._unchanged():
            self.policy.on_cold_miss(tick)

    def truncation_candidates(self, tick: int) -> Iterator[Entry]:
        """Pass each on."""
        return self._each(lambda: self.policy.truncation_candidates(tick))

    def victims(self, tick: int) -> Iterator[Entry]:
        """Pass each on."""
        return self._each(lambda: self.policy.victims(tick))

    def _each(self, ask: Callable[[], Iterator[Entry]]) -> Iterator[Entry]:
        with self._unchanged():
            offers = iter(ask())
        while True:
            with self._unchanged():
                entry = next(offers, self)
            if entry is self:
                return
            yield entry  # type: ignore[misc]  # whatever it is: the pool's watch judges it

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        before = {identity: _looks(entry) for identity, entry in self.held.items()}
        for name in CLOCKS:
            setattr(time, name, _no_clock)
        try:
            yield
        finally:
            for name, clock in CLOCKS.items():
                setattr(time, name, clock)
        after = {identity: _looks(entry) for identity, entry in self.held.items()}
        assert after == before, "the policy changed an entry, which is the pool's alone"


def _no_clock() -> float:
    raise AssertionError("a policy must not look at a clock: ticks are the only time")


def _looks(entry: Entry) -> list[Any]:
    tip = entry.tip
    mine = [getattr(entry, name) for name in Entry.__slots__]
    pinned = None if entry.pinned is None else tuple(entry.pinned)
    return [*mine, pinned, tip.position, tip.refs, tip.superseded, tip.uses, tip.tick, tip.expires]


@dataclass(slots=True, kw_only=True)
class Trial:
    """A pool under a policy, served by random requests from a seed; every victim is judged."""

    policies: list[Supervised]
    """One per priority class, as the pool made them."""
    world: World
    retained: list[tuple[int, ...]] = field(default_factory=list)
    """Every sequence that was committed."""
    lost: list[str] = field(default_factory=list)
    """The keys of truncated and evicted entries, in order."""

    @classmethod
    def start(cls, make: MakePolicy, config: PoolConfig = CONFIG, *, seed: int = 0) -> Trial:
        """Return a trial of a new pool."""
        policies: list[Supervised] = []

        def supervised() -> Policy:
            policies.append(Supervised(make()))
            return policies[-1]

        world = World(config.replace(policy=supervised), random.Random(seed))
        return cls(policies=policies, world=world)

    @property
    def pool(self) -> PrefixPool:
        """The pool under trial."""
        return self.world.pool

    def serve(self, tokens: list[int], *, answer: Sequence[int] = (), **options: Any) -> bool:
        """Serve one request and judge its victims; False: it was not admitted."""
        world, prompt = self.world, Prompt(tokens, namespace=SPACES[0])
        lease = world.acquire(prompt, reserve_tokens=len(answer), **options)
        if lease is None:
            return False
        assert isinstance(lease, Lease)
        with lease:
            world.restore(lease)
            while world.prefill(lease) != "done":
                pass
            world.decode(lease, answer)
            world.engine.execute(lease.checkpoint("frontier", position=lease.frontier))
            if lease.commit() is not None:
                self.retained.append((*tokens, *answer))
        self.settle()
        return True

    def settle(self) -> None:
        """Judge the victims, recount everything, and record the losses."""
        self.world.audit()
        self.lost = [e.key for e in self.pool.events() if e.kind in ("truncated", "evicted")]

    def depth(self, tokens: Sequence[int]) -> int:
        """Return how deep these tokens could be resumed now."""
        return self.pool.lookup(Prompt(tokens, namespace=SPACES[0])).deepest

    def run(self, requests: int = 50) -> None:
        """Serve random requests: conversations that grow, come back, part, and are pinned."""
        draw, pool = self.world.random, self.pool
        talks = [[100 * talk + at for at in range(draw.randint(3, 40))] for talk in range(9)]
        for _ in range(requests):
            at = min(int(draw.expovariate(0.4)), len(talks) - 1)
            tokens = talks[at][: draw.choice((None, None, None, len(talks[at]) // 2 + 1))]
            priority = draw.choice((0, 0, 0, 1, -1))
            self.serve(tokens, answer=(draw.randrange(9),), priority=priority)
            if draw.random() < 0.4 and len(tokens) < 60:
                talks[at] = [*tokens, *range(draw.randint(1, 5))]
            if draw.random() < 0.2 and (entries := pool.entries()):
                verb = draw.choice(("pin", "unpin", "unpin", "release", "evict"))
                getattr(pool, verb)(draw.choice(entries).key)
                self.settle()

    def offers(self) -> None:
        """Assert that each policy, asked to the end, offers all that it holds, each once."""
        tick = self.pool.state.tick
        for policy in self.policies:
            offered = list(policy.victims(tick))
            assert None not in offered, "the policy offers None"
            names = [entry.identity for entry in offered]
            assert len(names) == len(set(names)), "the policy offers an entry twice"
            missing = set(policy.held) - set(names)
            assert not missing, f"the policy never offers {len(missing)} of its entries"
            assert not set(names) - set(policy.held), "the policy offers a removed entry"
            thinned = {entry.identity for entry in policy.truncation_candidates(tick)}
            assert thinned <= set(policy.held), "the policy truncates a removed entry"

    def dict_with_losses(self) -> None:
        """Assert that whatever can be resumed was once committed."""
        for entry in self.pool.state.catalog.entries.values():
            row = self.pool.find(entry.key)
            assert row, f"{entry!r} is not found by its key"
        for tokens in self.retained:
            depth = self.depth(tokens)
            assert any(kept[:depth] == tokens[:depth] for kept in self.retained)


class PolicyConformance:
    """The tests; `policy_conformance` makes a class of them for one policy."""

    @staticmethod
    def make() -> Policy:
        """Return a new instance of the policy."""
        raise NotImplementedError

    def test_all_that_it_holds_is_offered_once_and_nothing_else(self) -> None:
        """Each entry, never ``None``, none that is gone; nothing before there is anything."""
        for seed in SEEDS:
            trial = Trial.start(self.make, seed=seed)
            trial.offers()
            trial.run(10 + 20 * seed)
            trial.offers()
            trial.pool.clear()
            trial.offers()

    def test_the_pool_stays_a_dict_with_losses(self) -> None:
        """Whatever is found was committed and is right; less and less room only loses more."""
        for seed in SEEDS:
            for changes in SHRINKING:
                trial = Trial.start(self.make, CONFIG.replace(**changes), seed=seed)
                trial.run(25)
                trial.dict_with_losses()

    def test_with_room_for_all_nothing_is_lost(self) -> None:
        """Then it is a dict (G1)."""
        trial = Trial.start(self.make, CONFIG.replace(num_pages=4_000))
        for talk in range(30):
            assert trial.serve([100 * talk + at for at in range(20)], answer=(7,))
        assert not trial.lost
        assert all(trial.depth([*kept, 1]) == len(kept) for kept in trial.retained)

    def test_pinned_and_leased_entries_stay(self) -> None:
        """However long others press (G4)."""
        trial = Trial.start(self.make)
        pinned, leased = list(range(20)), list(range(500, 520))
        assert trial.serve(pinned, pin=True)
        assert trial.serve(leased)
        reader = trial.world.acquire(Prompt([*leased, 1], namespace=SPACES[0]))
        for talk in range(10, 40):
            trial.serve([100 * talk + at for at in range(20)])
            assert (trial.depth(pinned), trial.depth(leased)) == (20, 20)
        assert trial.lost, "nothing was pressed out"
        assert reader is not None

    def test_the_newest_hits_and_the_budget_holds(self) -> None:
        """However full the pool is, in bytes and in entries (G3, G9)."""
        for bound in ({"retained_bytes": 30 * 16}, {"max_entries": 2}):
            trial = Trial.start(self.make, CONFIG.replace(**bound))
            for talk in range(30):
                tokens = [100 * talk + at for at in range(8 + talk)]
                assert trial.serve(tokens)
                assert trial.depth(tokens) == len(tokens)
            assert trial.lost, "nothing was pressed out"

    def test_it_does_the_same_thing_twice(self) -> None:
        """No clock, no unseeded randomness, no order of a set or of addresses."""
        for seed in SEEDS:
            runs = []
            for attempt in range(2):
                ballast = [object() for _ in range(997 * attempt)]
                trial = Trial.start(self.make, seed=seed)
                trial.run()
                runs.append(trial.lost)
                del ballast
            assert runs[0], "nothing was pressed out"
            assert runs[1] == runs[0], "the same calls lost other entries"

    def test_notices_may_come_at_any_time(self) -> None:
        """Of a stranger or a return, before and after there are entries."""
        policy = Supervised(self.make())
        for tick in range(3):
            policy.on_cold_miss(tick)
            policy.on_ghost_hit(tick + 1, tick + 2, tick)
            assert list(policy.truncation_candidates(tick)) == list(policy.victims(tick)) == []
        assert type(self.make()) is type(policy.policy)
        assert self.make() is not policy.policy, "the factory hands out one instance twice"

    def test_any_sequence_of_calls_keeps_every_guarantee(self) -> None:
        """The simulation, its pools under this policy."""
        for seed in SIMULATED:
            simulate(seed, policy=lambda: Supervised(self.make()))


def policy_conformance(policy_factory: MakePolicy) -> type[PolicyConformance]:
    """Return a pytest class of the tests that any policy must pass; some seconds in all.

    ``policy_factory``: what `PoolConfig` takes as ``policy``: the class, or a function that
    returns a new instance. The policy is tried under real pools: whatever it offers, its pool
    must stay a dict with losses that keeps pins, leases, budget and the newest; it must offer
    each entry that it holds, once, and nothing else, never ``None``; decide alike twice; and
    change no entry.

    >>> from ninfer_pool.core.policy import Ranked
    >>> class Oldest(Ranked):
    ...     def rank(self, entry, tick):
    ...         return (entry.tip.tick,)
    >>> TestOldest = policy_conformance(Oldest)
    """
    name = getattr(policy_factory, "__name__", type(policy_factory).__name__)
    return type(f"Test{name}", (PolicyConformance,), {"make": staticmethod(policy_factory)})
