"""Deadlines: an expired checkpoint is not offered, and leaves nothing behind."""

from __future__ import annotations

import pytest

from ninfer_pool import Namespace, Prompt
from tests.core.shop import begun, driver


def test_a_namespace_whose_last_checkpoint_expired_is_forgotten() -> None:
    now = [0.0]
    shop = driver(clock=lambda: now[0])
    for number in range(5):
        space = Namespace(weights="a", kv_dtype="b", salt=str(number))
        shop.serve(Prompt(list(range(1, 6)), namespace=space), ttl_seconds=1)
        now[0] += 2
    assert len(shop.pool.state.catalog.roots) == 1


def test_deadlines_of_what_is_gone_do_not_pile_up() -> None:
    shop = driver(max_entries=2, clock=lambda: 0.0)
    for turn in range(200):
        shop.serve(range(100 * turn, 100 * turn + 20), ttl_seconds=1e6)
    assert len(shop.pool.state.catalog.deadlines) <= 2 * shop.pool.stats().checkpoints + 64


def test_an_expired_checkpoint_says_so() -> None:
    now = [0.0]
    shop = driver(clock=lambda: now[0])
    shop.serve(range(20), ttl_seconds=5)
    now[0] = 4.0
    assert shop.depth(range(20)) == 20
    now[0] = 6.0
    assert shop.depth(range(20)) == 0
    shop.serve(range(40, 50))
    seen = shop.pool.explain(shop.prompt(range(20)))
    assert (seen.reason, seen.evicted_tick) == ("evicted", None)
    assert "a longer ttl_seconds" in seen.helps
    assert shop.pool.stats().counters.expired == 1


def test_the_longest_life_asked_for_counts() -> None:
    now = [0.0]
    shop = driver(clock=lambda: now[0])
    prompt = shop.prompt(range(20), boundaries=[(20, "turn")])
    shop.serve(prompt, ttl_seconds=5)
    shop.serve(prompt, read=False)
    now[0] = 9.0
    assert shop.depth(range(20)) == 20
    shop.serve(range(60, 70), ttl_seconds=5)
    reader = begun(shop, range(60, 70))
    now[0] = 20.0
    assert shop.pool.acquire(shop.prompt(range(90, 99))) is None
    reader.release()
    shop.serve(range(90, 99))
    assert shop.depth(range(60, 70)) == 0


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
