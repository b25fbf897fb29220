"""What people hit with other engines, reports 24 and later, as small cases."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ninfer_pool import Lease
from tests.core.field_world import ALL, IMAGE, PAGE, Chat, begun, driver, talk


def test_field_24_reentry_after_displacement_equals_a_cold_run() -> None:
    shop = driver(max_entries=1)
    first, second = Chat(shop, 0), Chat(shop, 1)
    for chat in (first, second, first, first, second, second, first):
        chat.turn()  # the driver verifies every restore, and every checkpoint after it
    assert first.turn() == 6


def test_field_25_what_a_plan_needs_is_leased_from_the_plan_on() -> None:
    shop = driver(pages=60, lanes=2)
    shop.serve(talk(0))
    waiting = shop.pool.acquire(shop.prompt([*talk(0), 1, 2, 3]))
    assert isinstance(waiting, Lease)
    for number in range(1, 8):
        shop.serve(talk(number))
    shop.engine.bind(waiting.lane, waiting.prompt)
    shop.engine.execute(waiting.restore())
    shop.engine.verify(waiting)
    assert waiting.start == 40


def test_field_26_another_image_behind_the_same_placeholders() -> None:
    shop = driver()
    for name, start in (("cat", 0), ("dog", 0), ("cat", 40)):
        done = shop.serve(shop.prompt(talk(0), media=[(8, 20, f"sha256:{name}")]))
        assert done.start == start
    assert shop.depth(shop.prompt(talk(0), media=[(8, 20, "sha256:cow")])) == 8


def test_field_26_an_image_that_differs_is_named() -> None:
    shop = driver()
    shop.serve(shop.prompt(talk(0), media=[(8, 20, "sha256:cat")]))
    other = shop.prompt(talk(0), media=[(8, 20, "sha256:cow")])
    assert shop.pool.explain(other).reason == "identity:media"


def test_field_26_media_without_a_digest_is_never_retained() -> None:
    shop = driver()
    prompt = shop.prompt(talk(0), media=[(8, 20, None)], boundaries=[(8, "system")])
    for _ in range(2):
        assert shop.serve(prompt, answer=[1, 2]).start in (0, 8)
    positions = [match.position for match in shop.pool.lookup(prompt)]
    assert positions == [8]
    assert shop.pool.stats().counters.skipped_media > 0


@pytest.mark.parametrize("off", [-1, 1])
def test_field_27_a_drifting_offset_is_refused(off: int) -> None:
    shop = driver()
    lease = begun(shop, talk(0))
    shop.prefill(lease)
    assert lease.commit(position=lease.frontier + off) is None
    assert shop.pool.stats().counters.position_mismatches == 1
    assert shop.depth(talk(0)) == 0
    assert shop.serve(talk(0)).start == 0


def test_field_28_payload_is_unchanged_after_any_number_of_resumes() -> None:
    shop = driver(lanes=3)
    shop.serve(talk(0, 41), answer=[1])
    leases = [begun(shop, [*talk(0, 41), 1, number]) for number in range(3)]
    for lease in leases:
        shop.prefill(lease)
        shop.decode(lease, [])
        shop.audit()
    for lease in leases:
        assert lease.start == 42
        shop.finish(lease)
        shop.audit()


@pytest.mark.parametrize("seed", range(10))
def test_field_29_random_accept_lengths(seed: int) -> None:
    rng = random.Random(seed)
    shop = driver()
    tokens = talk(0)
    for _ in range(5):
        lease = begun(shop, tokens, reserve_tokens=64)
        shop.prefill(lease)
        for _ in range(4):
            draft = [rng.randrange(9) for _ in range(4)]
            shop.decode(lease, draft)
            accepted = rng.randrange(5)
            lease.truncate(lease.frontier - 4 + accepted)
            shop.engine.roll_back(lease.lane, lease.frontier)
            tokens = [*tokens, *draft[:accepted]]
        shop.finish(lease)
        shop.audit()
        assert shop.depth(tokens) == len(tokens)
        tokens.append(7)


def test_field_31_the_donor_may_go() -> None:
    shop = driver()
    key = shop.serve(talk(0), boundaries=[(24, "system")]).key
    child = [*talk(0, 24), 1, 2, 3]
    shop.serve(child, boundaries=[(24, "system")])
    assert key is not None
    assert shop.pool.evict(key)
    shop.audit()
    assert shop.serve([*child, 4]).start == 27


def test_field_32_the_budget_holds_during_every_operation() -> None:
    shop = driver(pages=200, retained_bytes=30 * PAGE)
    for number in range(30):
        lease = begun(shop, talk(number, 20 + number), boundaries=[(8, "system")])
        for _ in range(3):
            shop.prefill(lease, chunks=1, publish=True)
            assert shop.pool.stats().retained_bytes <= 30 * PAGE
        shop.finish(lease)
        assert shop.pool.stats().retained_bytes <= 30 * PAGE
        shop.audit()


def test_field_33_replacing_keeps_to_the_budget() -> None:
    shop = driver(pages=200, retained_bytes=30 * PAGE)
    for number in range(12):
        shop.serve(talk(0), answer=[number, number, 1])
        assert shop.pool.stats().retained_bytes <= 30 * PAGE
    assert len(shop.pool.entries()) == 1


def test_field_34_shared_bytes_count_once_and_clear_frees_all() -> None:
    shop = driver()
    for last in range(8):
        shop.serve([*talk(0), last], boundaries=[(40, "system")])
    pages = shop.pool.stats().retained_bytes // PAGE
    assert pages == 10 + IMAGE + 8 * (1 + IMAGE)
    assert shop.pool.clear() == 8
    assert shop.pool.stats().retained_bytes == 0
    assert shop.pool.stats().pages_free == ALL


def test_field_35_a_full_pool_takes_new_entries() -> None:
    shop = driver(pages=40)
    for number in range(40):
        shop.serve(talk(number, 30))
        assert shop.serve([*talk(number, 30), 1]).start == 30


def test_field_36_two_passes_over_many_prefixes() -> None:
    shop = driver(pages=39 * 14)
    for number in range(39):
        assert shop.serve(talk(number)).start == 0
    for number in range(39):
        assert shop.serve(talk(number)).start == 40
    assert shop.pool.stats().counters.evictions == 0


def test_field_38_the_frontier_moves_as_long_as_there_are_bytes() -> None:
    shop = driver(pages=200, retained_bytes=80 * PAGE)
    chat = Chat(shop, 0)
    assert [chat.turn() for _ in range(20)][1:] == [6] * 19


def test_field_39_everything_pinned_is_a_no() -> None:
    shop = driver(pages=12)
    shop.serve(talk(0), pin=True)
    assert shop.ask(talk(1)) is None
    assert shop.ask(talk(0)) is not None


def test_field_42_published_means_complete() -> None:
    shop = driver(lanes=2)
    with begun(shop, talk(0), boundaries=[(24, "system")]) as lease:
        shop.prefill(lease, chunks=1)
        assert shop.depth(talk(0)) == 0
        lease.publish()
        assert shop.depth(talk(0)) == 24
    shop.audit()
    assert shop.serve(talk(0)).start == 24


def test_field_43_only_the_consumed_checkpoint_is_touched() -> None:
    shop = driver(max_entries=2, policy="lru")
    system = talk(0, 24)
    shop.serve([*system, 1, 2, 3], boundaries=[(24, "system")])
    shop.serve(talk(5))
    before = shop.pool.entries()[0]
    assert shop.serve([*system, 9], boundaries=[(24, "system")]).start == 24
    assert before.key not in [entry.key for entry in shop.pool.entries()]
    assert shop.depth(talk(5)) == 40


@pytest.mark.parametrize("end_logits", [True, False])
def test_field_44_a_prompt_that_is_exactly_an_entrys_tokens(
    end_logits: bool,  # noqa: FBT001
) -> None:
    shop = driver(end_logits=end_logits)
    shop.serve(talk(0), answer=[1, 2])
    assert shop.serve([*talk(0), 1, 2]).prefilled in ((0,) if end_logits else (1, 2))
    assert shop.serve([*talk(0), 1, 2]).prefilled == 1 - end_logits
    assert np.array_equal(shop.prompt(talk(0)).tokens, talk(0))
