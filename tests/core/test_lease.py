"""A lease's rules, and what it says of itself; pages, events, threads."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from ninfer_pool import ConfigError, Lease, LeaseError, Pending, PoolConfig, PrefixPool, PromptError
from ninfer_pool.core.events import Journal
from ninfer_pool.core.ledger import PageLedger
from tests.core.shop import begun
from tests.machinery.driver import Driver


def driver(**changes: Any) -> Driver:
    config = PoolConfig(num_pages=400, page_bytes=16, image_bytes=32, page_tokens=4, grid=16)
    return Driver(config.replace(**changes))


def test_after_its_end_every_method_raises() -> None:
    lease = begun(driver(), range(9))
    lease.release()
    lease.release()
    for act in (lease.restore, lease.commit, lease.publish, lambda: lease.advance([1])):
        with pytest.raises(LeaseError, match="it has ended"):
            act()


@pytest.mark.parametrize(
    ("tokens", "message"),
    [([0, 1, 5], "the token at 2 is not the prompt's"), ([*range(9), 5], "9 positions")],
)
def test_what_advance_refuses(tokens: list[int], message: str) -> None:
    lease = begun(driver(), range(9))
    with pytest.raises(LeaseError, match=message):
        lease.advance(tokens)
    assert lease.frontier == 0


@pytest.mark.parametrize("position", [3, 10])
def test_what_truncate_refuses(position: int) -> None:
    lease = begun(driver(), range(9), boundaries=[(4, "system")])
    lease.advance(list(range(4)))
    lease.checkpoint("system", position=4)
    lease.publish()
    lease.advance(list(range(4, 9)))
    with pytest.raises(LeaseError, match="needs an int of 4 to 9"):
        lease.truncate(position)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(LeaseError, match="kind: 'odd'"):
        begun(driver(), range(9)).checkpoint("odd", position=0)


def test_backing_over_a_checkpoint_gives_its_image_back() -> None:
    shop = driver()
    lease = begun(shop, range(8), reserve_tokens=8)
    shop.prefill(lease)
    shop.decode(lease, [1, 2])
    shop.engine.execute(lease.checkpoint("frontier", position=10))
    lease.truncate(8)
    shop.engine.roll_back(lease.lane, 8)
    shop.audit()
    shop.decode(lease, [3])
    shop.finish(lease)
    assert shop.depth([*range(8), 3]) == 9
    shop.audit()


def test_backing_over_a_checkpoint_of_plain_attention() -> None:
    shop = driver(image_bytes=0)
    lease = begun(shop, range(8), reserve_tokens=8)
    shop.prefill(lease)
    lease.truncate(3)
    assert lease.taken == []
    shop.prefill(lease)
    shop.finish(lease)
    assert shop.depth(range(8)) == 8


def test_it_says_what_it_reuses() -> None:
    shop = driver()
    assert shop.serve(range(9), boundaries=[(9, "history")], answer=[5]).reuse == "full_reset"
    assert shop.serve([*range(9), 5, 6]).reuse == "append_frontier"
    assert shop.serve([*range(9), 7]).reuse == "restore_history_checkpoint"


def test_it_tells_what_it_will_take() -> None:
    lease = begun(driver(), range(9), boundaries=[(4, "system"), (9, "turn")])
    assert lease.planned_captures == [(4, "system"), (9, "turn")]


def test_no_room_to_extend_is_a_no() -> None:
    shop = driver(num_pages=8)
    lease = begun(shop, range(9))
    assert not lease.extend(400)
    assert shop.pool.last_refusal is not None
    assert shop.pool.last_refusal.reason == "no_room"
    assert lease.reserved == 9


def test_extending_evicts() -> None:
    shop = driver(num_pages=14)
    shop.serve(range(20))
    lease = begun(shop, range(50, 58))
    assert lease.extend(30)
    assert shop.depth(range(20)) == 0
    assert lease.evicted_bytes <= lease.needed_bytes + lease.victim_max_bytes


def test_publishing_twice_and_nothing_retained() -> None:
    shop = driver()
    lease = begun(shop, range(9), retain=False)
    assert shop.prefill(lease, publish=True) == 9
    assert lease.commit() is None
    assert shop.depth(range(9)) == 0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"reserve_tokens": -1}, PromptError, "reserve_tokens: -1"),
        ({"priority": "high"}, PromptError, "priority: 'high'"),
        ({"lane": 1}, PromptError, "lane: 1; needs an int of 0 to 0"),
        ({"lane": 0.0}, PromptError, "lane: 0.0; needs an int"),
        ({"near": -1}, PromptError, "near: -1; needs an int of 0 to 0"),
        ({"ttl_seconds": 5}, ConfigError, "needs a PoolConfig with a clock"),
    ],
)
def test_what_acquire_refuses(options: Any, error: type[Exception], message: str) -> None:
    shop = driver()
    with pytest.raises(error, match=message):
        shop.pool.acquire(shop.prompt([1]), **options)


@pytest.mark.parametrize("ttl", [0, float("nan"), float("inf"), "5"])
def test_a_ttl_must_be_a_positive_number(ttl: Any) -> None:
    shop = driver(clock=lambda: 0.0)
    with pytest.raises(PromptError, match="ttl_seconds: "):
        shop.pool.acquire(shop.prompt([1]), ttl_seconds=ttl)


@pytest.mark.parametrize("tokens", [-1, 1.0, float("nan"), "1", None])
def test_a_lease_is_extended_by_a_number_of_tokens(tokens: Any) -> None:
    lease = begun(driver(), range(9))
    with pytest.raises(LeaseError, match=r"extend: .*needs an int of 0 or more"):
        lease.extend(tokens)
    assert lease.reserved == 9


@pytest.mark.parametrize("position", [-1, 0.0, "0", None])
def test_a_lease_is_truncated_to_a_position(position: Any) -> None:
    lease = begun(driver(), range(9))
    with pytest.raises(LeaseError, match=r"truncate: .*needs an int of 0 to 0"):
        lease.truncate(position)


@pytest.mark.parametrize("verb", ["lookup", "explain", "key", "acquire"])
def test_whatever_takes_a_prompt_says_so(verb: str) -> None:
    with pytest.raises(PromptError, match="prompt: list; needs a Prompt"):
        getattr(driver().pool, verb)([1, 2])


def test_a_pool_needs_a_config() -> None:
    with pytest.raises(ConfigError, match="config: dict; needs a PoolConfig"):
        PrefixPool({})  # type: ignore[arg-type]


def test_a_sibling_is_waited_for() -> None:
    shop = driver(lanes=2)
    first = begun(shop, [*range(20), 1], boundaries=[(20, "system")])
    other = shop.prompt([*range(20), 2])
    pending = shop.pool.acquire(other, wait_for_shared=True)
    assert isinstance(pending, Pending)
    assert pending == (20, first)
    strange = shop.prompt(range(30), namespace=shop.namespace.__class__(weights="x", kv_dtype="y"))
    lease = shop.pool.acquire(strange, wait_for_shared=True)
    assert isinstance(lease, Lease)


def test_a_lane_to_be_near_is_taken_where_it_is_free_and_none_is_home() -> None:
    shop = driver(lanes=3)
    assert begun(shop, [1], near=2).lane == 2
    assert begun(shop, [2], near=2).lane == 0  # taken, so the least recently used
    shop = driver(lanes=3)
    home = shop.serve(range(9)).lane
    assert begun(shop, range(9), near=2).lane == home


def test_the_least_recently_used_lane_is_taken() -> None:
    shop = driver(lanes=3)
    lanes = [shop.serve(range(number * 50, number * 50 + 9)).lane for number in range(4)]
    assert lanes == [0, 1, 2, 0]
    assert shop.serve(range(50, 60)).lane == 1
    assert begun(shop, [3], lane=2).lane == 2
    assert shop.begin([4], lane=2) is None


def test_events_follow_an_entry() -> None:
    shop = driver(max_entries=1)
    shop.serve(range(9), boundaries=[(9, "turn")], answer=[1, 2])
    key = shop.serve([*range(9), 1, 2, 3]).key
    shop.serve([*range(9), 5])
    shop.serve(range(50, 60))
    seen = [(event.kind, event.positions) for event in shop.pool.events()]
    assert ("stored", (9, 11)) in seen
    assert ("touched", (9, 11)) in seen
    assert ("stored", (9, 11, 12)) in seen
    assert seen[-1] == ("evicted", ())
    assert {kind for kind, _ in seen} <= {
        "stored",
        "touched",
        "superseded",
        "truncated",
        "evicted",
    }
    assert key in {event.key for event in shop.pool.events()}
    last = shop.pool.events()[-1].number
    assert [event.number for event in shop.pool.events(since=last)] == [last]


def test_a_superseded_tail_is_told_and_then_its_end() -> None:
    shop = driver(retained_bytes=16 * 16)
    shop.serve(range(8), answer=[1, 2])
    old = shop.pool.entries()[0].key
    shop.serve([*range(8), 5, 6, 7])
    assert ("superseded", old) in [(e.kind, e.key) for e in shop.pool.events()]
    shop.serve(range(60, 90))
    assert ("evicted", old, -1) in [(e.kind, e.key, e.entry) for e in shop.pool.events()]


def test_the_event_log_is_bounded_in_events_and_in_positions() -> None:
    journal = Journal(8)
    for number in range(20):
        journal.add("stored", str(number), range(3), entry=number, freed=0)
    assert [event.number for event in journal.since(0)] == list(range(12, 20))
    journal.add("stored", "long", range(60), entry=1, freed=0)
    assert [event.key for event in journal.since(0)] == ["19", "long"]
    journal.add("stored", "longer", range(999), entry=1, freed=0)
    assert [(e.number, e.positions[-1]) for e in journal.since(0)] == [(21, 998)]
    assert not list(journal.since(22))
    assert [e.number for e in journal.since(-1)] == [21]
    assert not Journal(0)


def test_an_entry_keeps_its_number_in_the_events_however_it_grows() -> None:
    shop = driver(max_entries=2)
    shop.serve(range(9), boundaries=[(9, "turn")], answer=[1, 2])
    shop.serve([*range(9), 1, 2, 3])
    shop.serve(range(50, 60))
    events = shop.pool.events()
    first, other = events[0].entry, events[-1].entry
    assert first != other
    assert len({event.key for event in events if event.entry == first}) > 1
    shop.serve(range(70, 80))
    assert [e.entry for e in shop.pool.events() if e.kind == "evicted"] == [first]
    shop.serve(range(9))
    newest = [event.entry for event in shop.pool.events() if event.kind == "stored"][-1]
    assert newest not in (first, other), "a number is never used again"


def test_what_expires_or_is_quarantined_is_told() -> None:
    clock = [0.0]
    shop = driver(clock=lambda: clock[0])
    shop.serve(range(9), boundaries=[(4, "system"), (9, "turn")], answer=[1, 2])
    shop.serve(range(50, 60), ttl_seconds=1)
    first, other = (event.entry for event in shop.pool.events())
    begun(shop, [*range(9), 8]).quarantine()
    begun(shop, [*range(9), 1, 2, 8]).quarantine()
    clock[0] = 2.0
    shop.serve(range(70, 80), retain=False)
    told = [(event.kind, event.entry, event.positions) for event in shop.pool.events()[2:]]
    assert told[:2] == [("truncated", first, (4, 11)), ("truncated", first, (4,))]
    assert told[2:] == [("evicted", other, ())]


def test_what_no_entry_ends_at_is_quarantined_without_a_word() -> None:
    shop = driver()
    for last in (5, 6, 7):
        shop.serve([*range(4), last], boundaries=[(4, "system")])
    assert shop.pool.evict(shop.pool.entries()[0].key)
    told = len(shop.pool.events())
    begun(shop, [*range(4), 9]).quarantine()
    assert shop.depth([*range(4), 9]) == 0
    assert len(shop.pool.events()) == told


def test_pages_are_taken_counted_and_given_back() -> None:
    ledger = PageLedger(6)
    pages = ledger.take(3)
    assert (ledger.free, ledger.freeable, ledger.total) == (3, 3, 6)
    assert ledger.ref_checkpoint(pages) == 3
    ledger.ref_lease(pages[:1])
    ledger.unref_lease(pages)
    ledger.ref_pin(pages[1:])
    ledger.check()
    assert (ledger.unevictable, ledger.freeable) == (3, 3)
    ledger.unref_lease(pages[:1])
    ledger.unref_pin(pages[1:])
    assert ledger.unref_checkpoint(pages) == 3
    assert ledger.free == 6
    ledger.check()


def test_images_are_counted_as_one_and_their_pages_serve_for_anything() -> None:
    ledger = PageLedger(7, image_pages=2)
    units = ledger.take(1, images=2)
    assert (ledger.free, ledger.unevictable, ledger.size(units)) == (2, 5, 5)
    images = [ledger.pages_of_image(image).tolist() for image in units[1:].tolist()]
    assert len({*units[:1].tolist(), *images[0], *images[1]}) == 5
    ledger.unref_lease(units)
    assert ledger.free == 7
    ledger.check()
    assert ledger.take(6, images=0).tolist() != units.tolist()
    ledger.check()
    assert sorted(ledger.free_pages().tolist()) == ledger.free_pages().tolist()
    assert ledger.pages_of_image(-1).tolist() == []


def test_a_count_below_zero_is_our_own_fault() -> None:
    with pytest.raises(AssertionError, match="below 0"):
        PageLedger(3).unref_lease(np.array([1], dtype=np.int32))


def test_many_threads_at_once() -> None:
    shop = driver(num_pages=120, lanes=4)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(60):
                prompt = shop.prompt([*range(12), number % 2, *range(turn % 7)])
                shop.pool.explain(prompt)
                lease = shop.pool.acquire(prompt, reserve_tokens=2, claim=bool(turn % 2))
                if isinstance(lease, Lease):
                    with lease:
                        for chunk in lease.chunks():
                            lease.advance(prompt.tokens[chunk.begin : chunk.end])
                            if chunk.checkpoint:
                                lease.checkpoint(chunk.checkpoint, position=chunk.end)
                        if turn % 5:
                            lease.commit()
                shop.pool.lookup(prompt)
                if turn % 20 == 19:
                    shop.pool.clear()
                shop.pool.check()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    shop.pool.check()
    assert shop.pool.stats().leases == 0


PROMPT = list(range(20))


def test_a_checkpoint_that_two_readers_failed_to_restore_is_quarantined_once() -> None:
    shop = driver(lanes=2)
    shop.serve(PROMPT)
    readers = [begun(shop, PROMPT) for _ in range(2)]
    assert shop.pool.running == 2
    for reader in readers:
        reader.quarantine()
    assert shop.pool.stats().counters.quarantined == 1
    assert shop.pool.running == 0
    shop.audit()
