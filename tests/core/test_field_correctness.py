"""Wrong answers that people got from other engines; the numbers are those of the reports."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ninfer_pool import Lease
from tests.core.field_world import Chat, begun, driver, talk


def test_field_16_a_state_is_never_truncated() -> None:
    """Tokens past the checkpoint are computed anew; the image is loaded as it was saved."""
    shop = driver()
    shop.serve(talk(0))
    lease = begun(shop, talk(0)[:39])
    assert lease.start == 0
    assert shop.engine.position(lease.lane) == 0


def test_field_20_a_failed_restore_costs_that_checkpoint_alone() -> None:
    shop = driver()
    shop.serve(talk(0), boundaries=[(8, "system"), (20, "turn")], answer=[1])
    begun(shop, [*talk(0), 1, 2]).quarantine()
    shop.audit()
    assert [m.position for m in shop.pool.lookup(shop.prompt(talk(0)))] == [8, 20, 40]


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
