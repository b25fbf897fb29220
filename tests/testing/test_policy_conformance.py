"""Every policy of ours conforms; each broken one is found by the test that says why."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from ninfer_pool.core.entry import Entry
from ninfer_pool.core.policy import POLICIES, Policy
from ninfer_pool.core.policy.classical import Lru
from ninfer_pool.testing.policies import policy_conformance

pytestmark = pytest.mark.slow

TestDefault = policy_conformance(POLICIES["default"])
TestLru = policy_conformance(POLICIES["lru"])
TestFifo = policy_conformance(POLICIES["fifo"])
TestGdsf = policy_conformance(POLICIES["gdsf"])
TestMarconi = policy_conformance(POLICIES["marconi"])
TestS3Fifo = policy_conformance(POLICIES["s3fifo"])
TestReturn = policy_conformance(POLICIES["return"])


def test_every_policy_is_tried() -> None:
    tried = [value.make for name, value in globals().items() if name.startswith("Test")]
    assert set(tried) == set(POLICIES.values())


class Listed(Policy):
    """The oldest first, with nothing wrong."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def on_insert(self, entry: Entry, tick: int) -> None:
        self.entries.append(entry)

    def on_remove(self, entry: Entry) -> None:
        self.entries.remove(entry)

    def victims(self, tick: int) -> Iterator[Entry]:
        return iter(list(self.entries))


class OffersNone(Listed):
    """Says that it has no victim by offering None."""

    def victims(self, tick: int) -> Iterator[Any]:
        yield None
        yield from self.entries


class OffersTheGone(Listed):
    """Does not forget what was removed."""

    def on_remove(self, entry: Entry) -> None:
        pass


class OffersTwice(Listed):
    """Begins with the best and then goes through all of them."""

    def victims(self, tick: int) -> Iterator[Entry]:
        yield from self.entries[-1:]
        yield from self.entries


class HidesTheUsed(Listed):
    """Holds back what was ever used."""

    def victims(self, tick: int) -> Iterator[Entry]:
        return iter([entry for entry in self.entries if not entry.hits])


class ForgetsWhatIsPassedOver(Listed):
    """Takes an entry off its list when it offers it, taken or not."""

    def victims(self, tick: int) -> Iterator[Entry]:
        while self.entries:
            yield self.entries.pop(0)

    def on_remove(self, entry: Entry) -> None:
        if entry in self.entries:
            self.entries.remove(entry)


class Guesses(Listed):
    """Offers in random order."""

    def victims(self, tick: int) -> Iterator[Entry]:
        return iter(random.sample(self.entries, len(self.entries)))


class ByAddress(Listed):
    """Offers in the order of a set."""

    def victims(self, tick: int) -> Iterator[Entry]:
        return iter(sorted(self.entries, key=lambda entry: hash(id(entry.tip) >> 4) % 7))


class LooksAtTheClock(Listed):
    """Notes when an entry came by the wall clock."""

    def on_insert(self, entry: Entry, tick: int) -> None:
        self.entries.append(entry)
        self.entries.sort(key=lambda _: time.monotonic())


class Unpins(Listed):
    """Takes the pin off what it wants to go."""

    def victims(self, tick: int) -> Iterator[Entry]:
        for entry in self.entries:
            entry.pinned = None
            yield entry


class TakesProtectionOff(Listed):
    """Takes the count of pins and leases off what it wants to go."""

    def victims(self, tick: int) -> Iterator[Entry]:
        for entry in list(self.entries):
            entry.tip.refs = 0
            yield entry


class NeedsEntries(Listed):
    """Does not expect a stranger before there is an entry."""

    def on_cold_miss(self, tick: int) -> None:
        assert self.entries[0] is not None


ONE = Lru()

CAUGHT = [
    (OffersNone, "all_that_it_holds_is_offered_once_and_nothing_else"),
    (OffersNone, "the_newest_hits_and_the_budget_holds"),
    (OffersTheGone, "all_that_it_holds_is_offered_once_and_nothing_else"),
    (OffersTheGone, "the_newest_hits_and_the_budget_holds"),
    (OffersTwice, "all_that_it_holds_is_offered_once_and_nothing_else"),
    (HidesTheUsed, "all_that_it_holds_is_offered_once_and_nothing_else"),
    (ForgetsWhatIsPassedOver, "all_that_it_holds_is_offered_once_and_nothing_else"),
    (Guesses, "it_does_the_same_thing_twice"),
    (ByAddress, "it_does_the_same_thing_twice"),
    (LooksAtTheClock, "it_does_the_same_thing_twice"),
    (Unpins, "pinned_and_leased_entries_stay"),
    (TakesProtectionOff, "pinned_and_leased_entries_stay"),
    (NeedsEntries, "notices_may_come_at_any_time"),
    (lambda: ONE, "notices_may_come_at_any_time"),
]


@pytest.mark.parametrize(("broken", "test"), CAUGHT)
def test_a_broken_policy_is_found(broken: Any, test: str) -> None:
    suite = policy_conformance(broken)()
    with pytest.raises(Exception):  # noqa: B017, PT011  # its own, or an assertion of the tests
        getattr(suite, f"test_{test}")()


@pytest.mark.parametrize("test", sorted({test for _, test in CAUGHT}))
def test_a_policy_with_nothing_wrong_passes(test: str) -> None:
    getattr(policy_conformance(Listed)(), f"test_{test}")()
