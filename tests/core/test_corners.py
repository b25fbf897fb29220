"""What happens seldom: dead tails beside live ones, forks of forks, checkpoints that expired."""

from __future__ import annotations

from typing import Any

import pytest

from ninfer_pool import ConfigError, Lease, PoolConfig, PromptError
from ninfer_pool.core.policy import POLICIES
from tests.machinery.driver import Driver

PROMPT = list(range(20))
FIRST = [70, 71, 72, 73, 74, 75, 76, 77]


def driver(**changes: Any) -> Driver:
    config = PoolConfig(num_pages=400, page_bytes=16, image_bytes=32, page_tokens=4, grid=64)
    return Driver(config.replace(**changes))


def begun(shop: Driver, tokens: Any, **options: Any) -> Lease:
    lease = shop.begin(tokens, **options)
    assert lease is not None
    return lease


def generate(shop: Driver, tokens: list[int], *stretches: list[int]) -> None:
    """Serve a prompt and take a checkpoint after each stretch of the answer."""
    lease = begun(shop, tokens, reserve_tokens=sum(map(len, stretches)))
    shop.prefill(lease)
    for stretch in stretches:
        shop.decode(lease, stretch)
        shop.engine.execute(lease.checkpoint("frontier", position=lease.frontier))
    lease.commit()
    shop.audit()


def answered_thrice(shop: Driver) -> list[int]:
    """Answer one prompt three times, parting at 22; return the first, now superseded, whole."""
    generate(shop, PROMPT, FIRST[:4], FIRST[4:])
    generate(shop, PROMPT, [70, 71, 9, 9])
    generate(shop, PROMPT, [70, 71, 8, 8])
    return PROMPT + FIRST


# -- tails -----------------------------------------------------------------------------------


def test_the_tails_between_two_checkpoints_go_with_the_deeper_one() -> None:
    shop = driver()
    answered_thrice(shop)
    (entry,) = shop.pool.entries()
    assert shop.pool.evict(entry.key)
    shop.audit()
    assert shop.pool.stats().checkpoints == 0


def test_a_dead_tail_beside_a_revived_one_goes_with_it() -> None:
    shop = driver()
    first = answered_thrice(shop)
    assert shop.serve(first, retain=False).start == 28
    last, revived = sorted(shop.pool.entries(), key=lambda entry: entry.tokens)
    assert shop.pool.evict(last.key)
    shop.audit()
    assert shop.pool.evict(revived.key)
    shop.audit()
    assert shop.pool.stats().checkpoints == 0


@pytest.mark.parametrize("events", [0, 99])
def test_a_tail_goes_first_whether_or_not_events_are_kept(events: int) -> None:
    shop = driver(events=events, retained_bytes=16 * 24)
    answered_thrice(shop)
    gone = shop.pool.key(shop.prompt([*PROMPT, *FIRST[:4]]))
    shop.serve(range(100, 124))
    shop.serve(range(200, 208))
    assert shop.depth(PROMPT) == 20
    told = {event.key for event in shop.pool.events() if event.kind == "evicted"}
    assert (gone in told) == bool(events)


# -- forks -----------------------------------------------------------------------------------


def test_a_fork_that_loses_its_tip_takes_over_the_forks_below() -> None:
    shop = driver()
    stem, branch = list(range(10)), list(range(30, 35))
    talks = [
        [*stem, 1, 2, 3],
        [*stem, *branch, 4, 5, 6],
        [*stem, *branch, 60, 61, 62, 63, 64],
        [*stem, *branch, 60, 61, 62, 7],
    ]
    keys = [shop.serve(talk).key for talk in talks]
    assert shop.pool.evict(keys[1] or "")
    shop.audit()
    assert [shop.depth(talk) for talk in talks] == [13, 15, 20, 19]
    assert shop.pool.evict(keys[2] or "")
    shop.audit()
    assert [shop.depth(talk) for talk in talks] == [13, 15, 18, 19]


def test_a_prefix_of_two_forks_is_retained_without_an_entry() -> None:
    shop = driver()
    stem = list(range(10))
    keys = [shop.serve([*stem, 50 + number]).key for number in range(3)]
    assert shop.pool.evict(keys[0] or "")
    shop.serve(stem[:8])
    assert shop.depth(stem[:8]) == 8
    assert sorted(entry.tokens for entry in shop.pool.entries()) == [11, 11]
    assert {p for entry in shop.pool.entries() for p, _ in entry.checkpoints} == {8, 10, 11}


# -- expired checkpoints ---------------------------------------------------------------------


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("image_bytes", [0, 32])
def test_what_expired_is_not_offered_though_it_is_still_there(image_bytes: int) -> None:
    clock = Clock()
    shop = driver(image_bytes=image_bytes, clock=clock)
    shop.serve(range(20), boundaries=[(20, "system")], ttl_seconds=1)
    shop.serve(range(40))
    assert shop.pool.lookup(shop.prompt(range(40)))[0].position == 20
    clock.now = 2.0
    assert [match.position for match in shop.pool.lookup(shop.prompt(range(40)))] == [40]
    assert shop.depth(range(20)) == (0 if image_bytes else 20)


def test_plain_attention_resumes_from_any_fork_that_has_not_expired() -> None:
    clock = Clock()
    shop = driver(image_bytes=0, clock=clock)
    stem = list(range(20))
    first = shop.serve([*stem, 1, 2, 3]).key
    shop.serve([*stem[:10], 4, 5, 6])
    for number in range(2):
        shop.serve([*stem, 50 + number, 7], ttl_seconds=1 + number)
    assert shop.pool.evict(first or "")
    depths = []
    for clock.now in (0.0, 1.5, 2.5):
        depths.append(shop.depth([*stem[:15], 99]))
    assert depths == [15, 15, 0]


# -- counts ----------------------------------------------------------------------------------


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


def test_a_ghost_that_is_forgotten_leaves_nothing_behind() -> None:
    shop = driver(ghosts=1, max_entries=1)
    for number in range(3):
        shop.serve(range(100 * number, 100 * number + 5 + number))
    reasons = [
        shop.pool.explain(shop.prompt(range(100 * number, 100 * number + 5 + number))).reason
        for number in range(3)
    ]
    assert reasons == ["no_entry", "evicted", "hit"]
    assert len(shop.pool.retained.ghosts._counts) == 1


def test_the_last_to_go_is_sought_past_an_entry_that_is_wholly_protected() -> None:
    shop = driver(num_pages=24, lanes=2)
    key = shop.serve(range(40, 44)).key
    assert shop.pool.pin(key or "")
    shop.serve(range(12), boundaries=[(4, "system")])
    reader = begun(shop, range(12))
    while shop.depth(range(4)):
        free = shop.pool.stats().pages_free
        other = begun(shop, range(50, 50 + 4 * (free - 1)))
        other.release()
    assert (shop.depth(range(12)), shop.depth(range(40, 44))) == (12, 4)
    reader.release()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_entry_is_offered_once_under_pressure_too(policy: str) -> None:
    shop = Driver(driver(max_entries=4, policy=policy).pool.config, audits=False)
    for _ in range(6):
        for number in range(6):
            shop.serve(range(100 * number, 100 * number + 9))
    retained = shop.pool.retained
    offered = [entry.identity for entry in retained.ranking.order(retained.tick)]
    assert sorted(offered) == sorted(retained.entries)


def test_one_commit_uses_an_entry_once() -> None:
    shop = driver()
    shop.serve(PROMPT)
    shop.serve([*PROMPT, 5])
    assert [entry.hits for entry in shop.pool.entries()] == [1]


def test_without_logits_of_the_end_one_token_is_left_to_compute() -> None:
    shop = driver(end_logits=False)
    shop.serve(PROMPT)
    shop.serve(range(24))
    assert shop.depth(PROMPT) == 19


def test_the_prompt_s_end_is_kept_before_the_answer_s() -> None:
    shop = driver(retained_bytes=16 * 9)
    shop.serve(PROMPT, answer=FIRST)
    assert shop.depth([*PROMPT, *FIRST]) == 20


def test_asking_for_a_key_leaves_nothing_behind() -> None:
    shop = driver()
    shop.pool.key(shop.prompt(PROMPT))
    assert not shop.pool.retained._digests


def test_as_many_ghosts_as_documented() -> None:
    assert PoolConfig(num_pages=9, page_bytes=16, image_bytes=16).ghosts == 1024


def test_a_tail_that_two_computations_made_keeps_the_pages_of_each() -> None:
    """Resumed before its end, generated alike and further, then parted from: two page tables."""
    shop = driver()
    stem = list(range(100, 103))
    ends = [[1, 2], [1, 2, 3, 4]]
    for end in ends:
        lease = begun(shop, stem, boundaries=[(3, "turn")], exact=True, reserve_tokens=4)
        shop.prefill(lease)
        shop.decode(lease, end)
        shop.finish(lease)
        shop.pool.check()
    shop.serve([*stem, 90, 91], boundaries=[(3, "turn"), (5, "turn")])
    shop.pool.check()


def test_flags_numbers_and_factories_of_the_wrong_type_are_refused() -> None:
    shop = driver()
    for name in ("read", "retain", "pin", "exact", "claim", "wait_for_shared"):
        wrong: dict[str, Any] = {name: 1}
        with pytest.raises(PromptError, match="needs True or False"):
            shop.pool.acquire(shop.prompt([1, 2]), **wrong)
    with pytest.raises(ConfigError, match="since: 'x'; needs an int"):
        shop.pool.events("x")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="policy: makes a dict; needs to make a Policy"):
        driver(policy=dict)
    for nothing in (None, ["a"], 5):
        assert shop.pool.find(nothing) == []  # type: ignore[arg-type]
        assert not shop.pool.evict(nothing)  # type: ignore[arg-type]
