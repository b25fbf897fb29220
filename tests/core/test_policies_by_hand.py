"""Policies without a pool: what each notice does to the order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ninfer_pool import POLICIES, ConfigError, Namespace, Policy
from ninfer_pool.core.entry import Checkpoint, Entry, PageTable
from ninfer_pool.core.policy import Ranked
from ninfer_pool.core.policy.marconi import Marconi
from ninfer_pool.core.policy.s3fifo import S3Fifo

SPACE = Namespace(weights="sha256:1", kv_dtype="bf16")


def test_a_policy_must_say_in_what_order() -> None:
    entry = made_entry(0)
    policy = Policy()
    policy.on_insert(entry, 1)
    policy.on_hit(entry, 2)
    policy.on_truncate(entry, 3)
    policy.on_remove(entry)
    policy.on_ghost_hit(1, 1, 4)
    policy.on_cold_miss(5)
    with pytest.raises(NotImplementedError):
        policy.victims(6)
    with pytest.raises(NotImplementedError):
        Ranked().on_insert(entry, 1)


def made_entry(number: int, *, tokens: int = 64, size: int = 100) -> Entry:
    mark = Checkpoint(
        position=tokens,
        kind="turn",
        cuts=None,
        table=PageTable(np.zeros(1, dtype=np.int32)),
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
        policy.on_insert(entry, entry.created)
    return entries


def take(policy: Policy, tick: int) -> Entry:
    """Evict the first victim, as the pool does."""
    victim = next(policy.victims(tick))
    policy.on_remove(victim)
    return victim


@pytest.mark.parametrize("name", POLICIES)
def test_every_entry_is_offered_once_in_the_end(name: str) -> None:
    policy = POLICIES[name]()
    assert list(policy.victims(0)) == []
    entries = filled(policy, 12)
    for tick, entry in enumerate([*entries[:5], *entries[:3], *entries[:3]], start=20):
        policy.on_hit(entry, tick)
    for tick in (50, 51):  # twice: what nobody took is offered again
        offered = list(policy.victims(tick))
        assert sorted(entry.identity for entry in offered) == list(range(12))


def test_s3fifo_promotes_what_was_used_twice_and_not_what_was_used_once() -> None:
    policy = S3Fifo()
    entries = filled(policy, 4)
    for tick in (10, 11):
        policy.on_hit(entries[0], tick)
    policy.on_hit(entries[1], 12)
    assert [take(policy, 20).identity for _ in range(4)] == [1, 2, 3, 0]


def test_s3fifo_counts_one_commit_as_one_use() -> None:
    policy = S3Fifo()
    entries = filled(policy, 2)
    policy.on_hit(entries[0], 10)
    policy.on_hit(entries[0], 10)
    assert take(policy, 20) is entries[0]


def test_s3fifo_lets_a_ghost_into_the_main_queue() -> None:
    policy = S3Fifo()
    filled(policy, 4)
    assert take(policy, 20).identity == 0
    policy.on_ghost_hit(3, 3, 23)
    back = made_entry(24)
    policy.on_insert(back, 24)
    for number in (25, 26):
        policy.on_insert(made_entry(number), number)
    assert [take(policy, 30).identity for _ in range(6)] == [1, 2, 3, 25, 26, 24]


def test_s3fifo_forgets_a_ghost_that_only_made_an_entry_grow() -> None:
    policy = S3Fifo()
    entries = filled(policy, 4)
    take(policy, 20)
    policy.on_ghost_hit(3, 3, 23)
    policy.on_hit(entries[1], 24)
    policy.on_insert(made_entry(25), 25)
    policy.on_insert(made_entry(26), 26)
    assert [take(policy, 30).identity for _ in range(5)] == [1, 2, 3, 25, 26]


@pytest.mark.parametrize("age", [2, 4], ids=["younger", "older"])
def test_s3fifo_takes_what_left_at_another_time_for_no_ghost(age: int) -> None:
    policy = S3Fifo()
    filled(policy, 4)
    assert take(policy, 20).identity == 0
    policy.on_ghost_hit(age, age, 23)
    policy.on_insert(made_entry(24), 24)
    policy.on_insert(made_entry(25), 25)
    assert [take(policy, 30).identity for _ in range(5)] == [1, 2, 3, 24, 25]


def test_s3fifo_forgets_a_ghost_that_came_when_a_stranger_comes_in_its_place() -> None:
    policy = S3Fifo()
    filled(policy, 4)
    take(policy, 20)
    policy.on_ghost_hit(3, 3, 23)
    policy.on_cold_miss(23)
    policy.on_insert(made_entry(24), 24)
    policy.on_insert(made_entry(25), 25)
    assert [take(policy, 30).identity for _ in range(5)] == [1, 2, 3, 24, 25]


def test_s3fifo_remembers_no_more_than_nine_ghosts_for_ten_entries() -> None:
    policy = S3Fifo()
    filled(policy, 4)
    for tick in (20, 21, 22):  # at the third there is room for one ghost: the youngest
        take(policy, tick)
    for gone in (20, 21, 22):
        policy.on_ghost_hit(30 - gone, 30 - gone, 30)
        policy.on_insert(made_entry(100 + gone), 31)
    assert [take(policy, 40).identity for _ in range(4)] == [3, 120, 121, 122]


def test_s3fifo_leaves_no_ghost_of_what_was_not_a_victim() -> None:
    policy = S3Fifo()
    entries = filled(policy, 4)
    policy.on_remove(entries[3])
    assert next(policy.victims(20)) is entries[0]
    entries[0].bytes = 50
    policy.on_truncate(entries[0], 20)
    policy.on_remove(entries[0])
    policy.on_ghost_hit(1, 1, 21)
    for number in (22, 23):
        policy.on_insert(made_entry(number), number)
    assert [take(policy, 30).identity for _ in range(4)] == [1, 2, 22, 23]


def test_s3fifo_measures_its_small_queue_in_bytes() -> None:
    policy = S3Fifo()
    entries = filled(policy, 3)
    for entry in entries[:2]:
        for tick in (10, 11):
            policy.on_hit(entry, tick)
    assert take(policy, 20) is entries[2]  # both others are in the main queue now
    thin = made_entry(5, size=20)
    policy.on_insert(thin, 21)
    offered = list(policy.victims(22))  # 20 of 220 bytes are less than a tenth
    assert offered == [entries[0], entries[1], thin], "yet it goes where all else is protected"
    thin.bytes = 23
    policy.on_hit(thin, 23)
    assert next(policy.victims(24)) is thin


def test_s3fifo_gives_a_second_chance_for_each_use_and_offers_nothing_twice() -> None:
    policy = S3Fifo()
    entries = filled(policy, 3)
    for entry in entries:
        for tick in (10, 11):
            policy.on_hit(entry, tick)
    newcomer = made_entry(3, size=10)
    policy.on_insert(newcomer, 12)
    assert next(policy.victims(13)) is entries[0]  # all three are in the main queue now
    for tick in range(14, 19):
        policy.on_hit(entries[0], tick)
    policy.on_hit(entries[2], 19)
    assert list(policy.victims(20)) == [entries[1], entries[2], entries[0], newcomer]


def test_marconi_without_alpha_is_lru() -> None:
    policy = Marconi(alpha=0)
    entries = [made_entry(number, tokens=10 ** (number % 4 + 1)) for number in range(8)]
    for entry in entries:
        policy.on_insert(entry, entry.created)
    assert list(policy.victims(9)) == entries


def test_marconi_keeps_what_spares_more_work_for_each_byte() -> None:
    policy = Marconi(alpha=3)
    worth, *others = (made_entry(x, tokens=tokens) for x, tokens in enumerate((5_000, 64, 64, 64)))
    for entry in (worth, *others):
        policy.on_insert(entry, entry.created)
    assert list(policy.victims(9)) == [*others, worth]


def test_marconi_counts_attention_s_square_and_only_what_lies_past_the_kept_ancestor() -> None:
    policy = Marconi(alpha=3, attention_tokens=1_000)
    late, early = made_entry(1, tokens=3_000), made_entry(2, tokens=1_000)
    late.saved = early.saved = 900  # 900 tokens after 2,100 cost more than 900 after 100
    late.tip.tick = early.tip.tick = 1
    for entry in (late, early):
        policy.on_insert(entry, 2)
    assert list(policy.victims(3)) == [early, late]
    late.saved = 100
    assert list(policy.victims(3)) == [late, early]


@pytest.mark.parametrize(
    ("field", "value"),
    [("alpha", -0.1), ("alpha", float("nan")), ("alpha", float("inf")), ("attention_tokens", 0)],
)
def test_marconi_refuses_weights_that_mean_nothing(field: str, value: float) -> None:
    make: Callable[..., Marconi] = Marconi
    with pytest.raises(ConfigError, match=f"{field}: .*needs"):
        make(**{field: value})
