"""G1 to G11, each as its own tests."""

from __future__ import annotations

from typing import Any

import pytest

from ninfer_pool import PoolConfig
from ninfer_pool.core.policy import POLICIES
from ninfer_pool.testing.symbolic import EngineFault
from ninfer_pool.testing.watch import picture
from tests.machinery.driver import Driver

PAGE = 16
IMAGE = 2


def driver(*, pages: int = 400, **changes: Any) -> Driver:
    """A pool of pages of four tokens and images of two pages."""
    config = PoolConfig(
        num_pages=pages, page_bytes=PAGE, image_bytes=IMAGE * PAGE, page_tokens=4, grid=64
    )
    return Driver(config.replace(**changes))


def talk(number: int, length: int = 20) -> list[int]:
    """A prompt that shares nothing with those of other numbers."""
    return [1000 * (number + 1) + at for at in range(length)]


# -- G1 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_g1_nothing_goes_while_bytes_suffice(policy: str) -> None:
    shop = driver(policy=policy)
    for number in range(12):
        shop.serve(talk(number), answer=[7, 8])
    assert [shop.depth([*talk(number), 7, 8, 9]) for number in range(12)] == [22] * 12
    assert shop.pool.stats().counters.evictions == 0


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_g1_nothing_goes_while_k_suffices(policy: str) -> None:
    shop = driver(policy=policy, max_entries=3)
    for number in (0, 1, 2, 1, 0, 2, 2, 0):
        shop.serve(talk(number))
    assert [shop.depth(talk(number)) for number in range(3)] == [20, 20, 20]


# -- G2 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("lengths", [(20, 3, 50, 8), (5, 5, 60), (61, 2, 2, 2)])
def test_g2_an_admission_frees_what_it_needs_and_one_victim(
    policy: str, lengths: tuple[int, ...]
) -> None:
    shop = driver(pages=40, policy=policy)
    for number in range(40):
        done = shop.serve(talk(number, lengths[number % len(lengths)]))
        assert done.evicted_bytes <= done.needed_bytes + done.victim_max_bytes


# -- G3 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("end_logits", [True, False])
def test_g3_the_newest_hits_however_full_the_pool(
    policy: str,
    end_logits: bool,  # noqa: FBT001
) -> None:
    shop = driver(pages=24, policy=policy, end_logits=end_logits)
    for number in range(30):
        shop.serve(talk(number), boundaries=[(8, "system")])
        assert shop.serve(talk(number)).start == 20 - (not end_logits)


@pytest.mark.parametrize("end_logits", [True, False])
def test_g3_the_prompt_end_is_never_the_capture_skipped(end_logits: bool) -> None:  # noqa: FBT001
    """Room for five pages and one image: the boundary before the end must do without."""
    shop = driver(pages=5 + IMAGE, end_logits=end_logits)
    shop.serve(talk(0), boundaries=[(8, "system")])
    assert shop.depth(talk(0)) == 20 - (not end_logits)
    assert shop.pool.stats().counters.skipped_no_room


def test_g3_a_full_pool_of_pinned_entries_still_serves() -> None:
    shop = driver(pages=5 + IMAGE + 5)
    shop.serve(talk(0), pin=True)
    assert shop.serve(talk(1)).prefilled == 20
    assert shop.depth(talk(0)) == 20


# -- G4 --------------------------------------------------------------------------------------


def test_g4_when_all_is_pinned_acquire_says_no_and_changes_nothing() -> None:
    shop = driver(pages=5 + IMAGE + 4)
    shop.serve(talk(0), pin=True)
    before = picture(shop.pool)
    assert shop.ask(talk(1)) is None
    refusal = shop.pool.last_refusal
    assert refusal is not None
    assert refusal == ("no_room", 5 * PAGE, 4 * PAGE)
    assert picture(shop.pool) == before


def test_g4_what_is_being_resumed_is_not_evicted() -> None:
    shop = driver(pages=40, lanes=2)
    shop.serve(talk(0))
    reader = shop.begin([*talk(0), 1, 2, 3])
    assert reader is not None
    for number in range(1, 9):
        shop.serve(talk(number))
    assert not shop.pool.evict(shop.pool.key(shop.prompt(talk(0))))
    shop.pool.clear()
    assert shop.depth(talk(0)) == 20
    shop.prefill(reader)
    shop.finish(reader)
    shop.audit()


def test_g4_a_pinned_entry_outlives_any_k() -> None:
    shop = driver(max_entries=1)
    key = shop.serve(talk(0), pin=True).key
    shop.serve(talk(1))
    assert [entry.key for entry in shop.pool.entries()] == [key]
    assert key is not None
    assert shop.pool.unpin(key)
    shop.serve(talk(1))
    assert shop.depth(talk(1)) == 20


def test_g4_no_lane_is_a_no() -> None:
    shop = driver()
    lease = shop.begin(talk(0))
    assert shop.begin(talk(1)) is None
    assert shop.pool.last_refusal is not None
    assert shop.pool.last_refusal.reason == "no_lane"
    assert lease is not None
    lease.release()
    assert shop.begin(talk(1)) is not None


# -- G5 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["checkpoint", "commit"])
@pytest.mark.parametrize("published", [True, False])
def test_g5_a_position_that_is_not_the_pools_is_quarantined(
    where: str,
    published: bool,  # noqa: FBT001
) -> None:
    shop = driver()
    shop.serve(talk(0))
    lease = shop.begin([*talk(0), 1, 2, 3])
    assert lease is not None
    shop.prefill(lease, publish=published)
    if where == "checkpoint":
        assert lease.checkpoint("frontier", position=lease.frontier - 1) == []
        assert lease.commit() is None
    else:
        assert lease.commit(position=lease.frontier + 1) is None
    assert len(shop.pool.lookup(shop.prompt([*talk(0), 1, 2, 3]))) == 0
    counters = shop.pool.stats().counters
    assert (counters.position_mismatches, counters.quarantined) == (1, 1 + published)
    assert shop.pool.explain(shop.prompt(talk(0))).reason == "quarantined"
    shop.audit()


def test_g5_a_restore_that_failed_quarantines_that_one_checkpoint() -> None:
    shop = driver()
    shop.serve(talk(0), boundaries=[(8, "system")])
    lease = shop.begin(talk(0))
    assert lease is not None
    lease.quarantine()
    assert lease.ended
    assert shop.depth(talk(0)) == 8
    shop.audit()


def test_g5_the_symbolic_engine_sees_a_wrong_page() -> None:
    shop = driver()
    shop.serve(talk(0))
    mark = next(iter(shop.pool.state.catalog.entries.values())).tip
    shop.engine.poison([int(mark.table.ids[0])])
    with pytest.raises(EngineFault, match="KV rows"):
        shop.audit()


# -- G6 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(6))
def test_g6_leaving_without_commit_restores_the_pool(steps: int) -> None:
    shop = driver(lanes=2)
    shop.serve(talk(0), boundaries=[(8, "system")])
    shop.serve(talk(1), lane=1)
    before = picture(shop.pool)
    lease = shop.begin([*talk(0)[:12], *talk(3)], reserve_tokens=8, claim=True)
    assert lease is not None
    with lease:
        if steps > 0:
            shop.prefill(lease, chunks=1)
        if steps > 1:
            shop.prefill(lease)
        if steps > 2:
            shop.decode(lease, [1, 2, 3])
        if steps > 3:
            lease.truncate(lease.frontier - 2)
        if steps > 4:
            assert lease.extend(40)
    assert picture(shop.pool) == before
    shop.audit()


def test_g6_a_miss_is_evidence_only_when_committed() -> None:
    shop = driver(pages=20, policy="s3fifo")
    for number in range(6):
        shop.serve(talk(number))
    before = picture(shop.pool)
    lease = shop.begin(talk(9, 4))
    assert lease is not None
    lease.release()
    assert picture(shop.pool) == before


def test_g6_what_was_published_stays() -> None:
    shop = driver()
    with shop.begin(talk(0), boundaries=[(8, "system")]) or pytest.fail("no room") as lease:
        shop.prefill(lease, chunks=1, publish=True)
    assert shop.depth(talk(0)) == 8
    shop.audit()


# -- G7 --------------------------------------------------------------------------------------


def test_g7_reading_changes_nothing() -> None:
    shop = driver(pages=40)
    for number in range(6):
        shop.serve(talk(number), answer=[1, 2])
    before = picture(shop.pool)
    for number in range(7):
        prompt = shop.prompt(talk(number))
        assert repr(shop.pool.lookup(prompt))
        assert str(shop.pool.explain(prompt))
        shop.pool.find(shop.pool.key(prompt))
    shop.pool.stats()
    shop.pool.check()
    shop.pool.events()
    assert picture(shop.pool) == before


def test_g7_a_lookup_stays_as_it_was() -> None:
    shop = driver()
    shop.serve(talk(0), boundaries=[(8, "system")])
    matches = shop.pool.lookup(shop.prompt(talk(0)))
    shop.pool.clear()
    assert [match.position for match in matches] == [8, 20]


# -- G8 --------------------------------------------------------------------------------------


def test_g8_a_capture_that_does_not_fit_fails_nothing() -> None:
    shop = driver(pages=8, retained_bytes=7 * PAGE)
    lease = shop.begin(talk(0, 28), reserve_tokens=4)
    assert lease is not None
    assert shop.prefill(lease) == 28
    shop.finish(lease)
    shop.audit()
    counters = shop.pool.stats().counters
    assert counters.captures_skipped == counters.skipped_no_room > 0


def test_g8_events_never_fail_a_request() -> None:
    for events in (0, 1):
        shop = driver(events=events)
        shop.serve(talk(0))
        shop.serve(talk(1))
        assert len(shop.pool.events()) == events


# -- G9 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_g9_the_budget_holds_after_every_operation(policy: str) -> None:
    shop = driver(pages=60, retained_bytes=20 * PAGE, policy=policy)
    for number in range(25):
        shop.serve(talk(number % 7, 12 + number), answer=[number])
        assert shop.pool.stats().retained_bytes <= 20 * PAGE
    assert shop.pool.stats().counters.peak_retained_pages <= 20


def test_g9_a_conversation_that_outgrows_it_keeps_its_deepest_that_fits() -> None:
    shop = driver(pages=60, retained_bytes=8 * PAGE)
    prompt = talk(0, 60)
    shop.serve(prompt, boundaries=[(8, "system"), (20, "turn"), (40, "history")])
    assert shop.depth(prompt) == 20
    assert shop.pool.stats().retained_bytes <= 8 * PAGE


# -- G10 -------------------------------------------------------------------------------------


def test_g10_with_a_constant_for_a_hash_every_answer_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ninfer_pool.core.identity.xxh3_128", lambda *parts: bytes(16))
    shop = driver(lanes=2)
    for number in range(4):
        assert shop.serve(talk(number), answer=[5]).start == 0
    for number in range(4):
        assert shop.serve([*talk(number), 5, 6]).start == 21
    (key,) = {entry.key for entry in shop.pool.entries()}
    assert len(shop.pool.find(key)) == 4
    for verb in (shop.pool.pin, shop.pool.unpin, shop.pool.release, shop.pool.evict):
        assert not verb(key)
    assert shop.pool.explain(shop.prompt(talk(9))).reason == "no_entry"
    shop.audit()


# -- G11 -------------------------------------------------------------------------------------


def test_g11_an_entry_is_invisible_until_its_commit() -> None:
    shop = driver(lanes=2)
    lease = shop.begin(talk(0))
    assert lease is not None
    shop.prefill(lease)
    assert shop.depth(talk(0)) == 0
    shop.finish(lease)
    assert shop.depth(talk(0)) == 20


def test_g11_an_abort_leaves_no_trace() -> None:
    shop = driver()
    with shop.begin(talk(0)) or pytest.fail("no room") as lease:
        shop.prefill(lease)
    stats = shop.pool.stats()
    assert (stats.entries, stats.retained_bytes, stats.pages_free) == (0, 0, stats.pages_total)
    assert shop.pool.explain(shop.prompt(talk(0))).reason == "no_entry"
