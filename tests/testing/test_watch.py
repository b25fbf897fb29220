"""The eviction hook: what is legal passes, what is not is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from ninfer_pool.core import eviction as room
from ninfer_pool.core.config import PoolConfig
from ninfer_pool.core.lease import Lease
from ninfer_pool.core.policy import POLICIES
from ninfer_pool.core.policy.classical import Lru
from ninfer_pool.testing.watch import IllegalVictim, Watch, picture
from tests.machinery import strategies
from tests.machinery.driver import Driver
from tests.machinery.machine import PoolMachine, pool_machine

CONFIG = PoolConfig(num_pages=24, page_bytes=16, image_bytes=32, page_tokens=4, grid=64, lanes=2)
SHORT = settings(max_examples=20, stateful_step_count=10, derandomize=True, database=None)


class Shop(Driver):
    """A driver whose pool is watched."""

    def __init__(self, config: PoolConfig) -> None:
        super().__init__(config)
        self.watch = Watch(self.pool)

    def talk(self, number: int, length: int = 20, **options: Any) -> None:
        """Commit a prompt that shares nothing with others."""
        prompt = self.prompt([100 * number + at for at in range(length)])
        lease = self.watch.acquire(prompt, **options)
        assert isinstance(lease, Lease)
        self.engine.bind(lease.lane, prompt)
        self.engine.execute(lease.restore())
        self.prefill(lease)
        lease.commit()
        self.watch.settle()


def press(shop: Shop) -> None:
    for number in range(12):
        shop.talk(number, 8 + number, pin=number == 3)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("bound", [{}, {"max_entries": 2}, {"retained_bytes": 12 * 16}])
def test_every_victim_of_every_policy_is_legal(policy: str, bound: dict[str, int]) -> None:
    shop = Shop(CONFIG.replace(policy=policy, **bound))
    press(shop)
    assert shop.watch.count > 5


def newest_first(state: Any, bill: Any) -> bool:
    for entry in reversed(list(state.catalog.order.victims(state.tick))):
        if not entry.tip.refs:
            room.truncate_entry(state, entry, bill)
            return True
    return False


def unasked(state: Any, bill: Any) -> bool:
    entry = next(e for e in state.catalog.entries.values() if not e.tip.refs)
    room.truncate_entry(state, entry, bill)
    return True


def whoever(state: Any, bill: Any) -> bool:
    room.truncate_entry(state, next(state.catalog.order.victims(state.tick)), bill)
    return True


def no_spare(state: Any, bill: Any) -> bool:
    return False


def too_many(state: Any, pages: int, bill: Any) -> None:
    room._evict_until(state, lambda: state.ledger.free > pages + 4, bill)


def one_more(state: Any, bill: Any, **_: Any) -> None:
    if len(state.catalog.entries) > 1:
        room._evict_next(state, None, bill)


ILLEGAL: list[tuple[str, Callable[..., Any], str]] = [
    ("eviction._truncate_next", newest_first, "the policy offered first"),
    ("eviction._truncate_next", unasked, "did not offer last"),
    ("eviction._truncate_next", whoever, "pinned or leased"),
    ("eviction._evict_superseded", no_spare, "superseded checkpoint stays"),
    ("admission.evict_for", too_many, "were free"),
    ("lease.enforce_budget", one_more, "while everything fitted"),
]


@pytest.mark.parametrize(
    ("place", "wrong", "why"), ILLEGAL, ids=[row[1].__name__ for row in ILLEGAL]
)
def test_an_illegal_victim_is_refused(
    monkeypatch: pytest.MonkeyPatch, place: str, wrong: Callable[..., Any], why: str
) -> None:
    monkeypatch.setattr(f"ninfer_pool.core.{place}", wrong)
    shop = Shop(CONFIG)
    shop.talk(90, 8, pin=True)
    shop.serve(range(900, 908), answer=(1, 2))
    shop.serve([*range(900, 908), 5, 6])
    with pytest.raises(IllegalVictim, match=why):
        press(shop)


class Offers(Lru):
    """Offers something else before its entries."""

    def first(self) -> list[Any]:
        """What it offers before."""
        return [None]

    def victims(self, tick: int) -> Iterator[Any]:
        yield from self.first()
        yield from super().victims(tick)


class OffersTwice(Offers):
    def first(self) -> list[Any]:
        return [entry for entry in self._entries.values() if entry.pinned] * 2


@pytest.mark.parametrize(("policy", "why"), [(Offers, "offers None"), (OffersTwice, "twice")])
def test_what_is_no_entry_is_refused(policy: type[Lru], why: str) -> None:
    with pytest.raises(IllegalVictim, match=why):
        press(Shop(CONFIG.replace(policy=policy)))


def test_a_picture_tells_pools_apart() -> None:
    one, other = Shop(CONFIG), Shop(CONFIG)
    assert picture(one.pool) == picture(other.pool)
    one.talk(1)
    assert picture(one.pool) != picture(other.pool)
    assert picture(one.pool, order=False) == picture(one.pool, order=False)


# -- the machine and the strategies ----------------------------------------------------------


@pytest.mark.parametrize(
    "machine",
    [PoolMachine, pool_machine(config=CONFIG), pool_machine(policy=Lru), pool_machine(roomy=True)],
)
def test_a_machine_takes_a_config_or_a_policy(machine: type[PoolMachine]) -> None:
    run_state_machine_as_test(machine, settings=SHORT)


def test_the_machine_finds_an_illegal_victim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_truncate_next", newest_first)
    few = settings(SHORT, max_examples=200, phases=[Phase.generate])
    with pytest.raises(IllegalVictim):
        run_state_machine_as_test(pool_machine(config=CONFIG), settings=few)


@settings(max_examples=50)
@given(data=st.data())
def test_budgets_only_shrink(data: st.DataObject) -> None:
    config = data.draw(strategies.configs(tight=True))
    every = [config, *data.draw(strategies.budgets(config))]
    for before, after in pairwise(every):
        assert after.num_pages <= before.num_pages
        assert after.retained_pages <= before.retained_pages
        assert (after.max_entries or 99) <= (before.max_entries or 99)


@settings(max_examples=50)
@given(workload=strategies.workloads(most=8))
def test_workloads_are_served(workload: list[strategies.Request]) -> None:
    shop = Driver(CONFIG.replace(num_pages=2_000))
    assert 1 <= len(workload) <= 8
    for prompt, answer, options in workload:
        assert shop.serve(prompt, answer=answer, **options).key is not None
        assert shop.depth(prompt) == len(prompt)
