"""Faults that an adversary found in the core, each by what went wrong."""

from __future__ import annotations

from typing import Any

import pytest

from ninfer_pool import Lease, Namespace, PoolConfig, Prompt
from ninfer_pool.core.planner import canonical_cuts, plan_captures
from tests.machinery.driver import SPACE, Driver


def driver(**changes: Any) -> Driver:
    config = PoolConfig(num_pages=400, page_bytes=16, image_bytes=32, page_tokens=4, grid=64)
    return Driver(config.replace(**changes))


def begun(shop: Driver, tokens: Any, **options: Any) -> Lease:
    lease = shop.begin(tokens, **options)
    assert lease is not None
    return lease


def test_a_plain_resume_below_its_source_shares_no_table_with_it() -> None:
    """Resumed at 7 of 8, it wrote a page of its own where the source holds another."""
    shop = driver(image_bytes=0, end_logits=False)
    shop.serve(range(1, 9))
    shop.serve(range(1, 9), answer=[50, 51, 52])
    assert shop.depth([*range(1, 9), 50, 51, 52, 53]) == 11


def test_a_plain_lookup_says_exact_by_the_prompts_own_cuts() -> None:
    shop = driver(image_bytes=0, grid=4)
    shop.serve(range(1, 11))
    prompt = shop.prompt([*range(1, 9), 99], boundaries=[(3, "system")])
    (match,) = shop.pool.lookup(prompt)
    assert (match.position, match.exact) == (8, False)
    assert match.exact == shop.pool.explain(prompt).exact


def test_a_pinned_entry_grows_after_its_inherited_tip_was_quarantined() -> None:
    shop = driver()
    first = shop.serve(range(1, 9)).key
    assert shop.pool.pin(str(first))
    shop.serve(range(1, 13))
    begun(shop, range(1, 13)).quarantine()
    shop.serve(range(1, 16))
    (entry,) = shop.pool.entries()
    assert (entry.pinned, entry.tokens) == (True, 15)


def test_what_is_pinned_anew_is_kept_though_it_was_inherited_before() -> None:
    shop = driver(num_pages=40)
    shop.pool.pin(str(shop.serve(range(1, 9)).key))
    grown = str(shop.serve(range(1, 13)).key)
    assert shop.pool.unpin(grown)
    assert shop.pool.pin(grown)
    shop.serve(range(1, 16))
    (entry,) = shop.pool.entries()
    assert 12 not in entry.superseded
    assert shop.pool.retained.entries[0].pinned is not None
    assert 12 in {mark.position for mark in shop.pool.retained.entries[0].pinned}


def test_a_use_that_ends_in_another_entry_is_told_to_the_policy() -> None:
    """A plain request that parted inside an entry consumed it: the least recent one goes."""
    shop = driver(image_bytes=0, policy="lru", max_entries=2)
    used = shop.serve(range(1, 9)).key
    idle = shop.serve(range(21, 29)).key
    shop.serve([1, 2, 3, 4, 5, 90, 91])
    assert shop.pool.find(str(used))
    assert not shop.pool.find(str(idle))


def test_a_namespace_whose_last_checkpoint_expired_is_forgotten() -> None:
    now = [0.0]
    shop = driver(clock=lambda: now[0])
    for number in range(5):
        space = Namespace(weights="a", kv_dtype="b", salt=str(number))
        shop.serve(Prompt(list(range(1, 6)), namespace=space), ttl_seconds=1)
        now[0] += 2
    assert len(shop.pool.retained.roots) == 1


def test_dropping_what_was_just_committed_leaves_what_another_pin_protects() -> None:
    """With K = 1 and a pinned entry, a revived tail that the pin covers goes back (G4)."""
    shop = driver(max_entries=1, grid=5, image_bytes=16)
    first = [0, 3, 2, 4, 0, 2, 0, 0, 3, 3, 2, 4]
    shop.serve(first[:3], answer=first[3:], pin=True)
    shop.serve(first[:4], answer=[1, 0, 4, 2, 2, 4])
    shop.serve([*first, 7])
    assert shop.depth(first) == 12
    begun(shop, [0, 3, 2, 4, 0, 3]).release()
    shop.audit()


def test_a_budget_counts_what_extend_added_after_a_checkpoint() -> None:
    shop = driver(num_pages=24, retained_bytes=128, image_bytes=16, end_logits=False, grid=5)
    lease = begun(shop, [0, 3, 2, 4, 0, 2, 0, 0], boundaries=[(5, "system")], reserve_tokens=6)
    shop.prefill(lease)
    assert lease.extend(3)
    shop.decode(lease, range(9))
    assert shop.finish(lease) is not None
    shop.audit()


def test_a_removed_source_is_recounted_as_its_lease_took_it() -> None:
    """Quarantined under another lease, its table then grew otherwise: `check` was wrong."""
    shop = driver(lanes=3)
    shop.serve(range(1, 17), boundaries=[(10, "system"), (16, "turn")])
    reader, breaker = begun(shop, range(1, 17)), begun(shop, range(1, 17))
    assert reader.start == breaker.start == 16
    breaker.quarantine()
    shop.serve([*range(1, 17), 7, 8, 9], boundaries=[(10, "system")])
    reader.release()
    shop.audit()


def test_a_table_is_of_one_path() -> None:
    """Checkpoints of one commit that lie before and past a fork share no table to grow."""
    shop = driver(grid=4, page_tokens=4)
    stem = list(range(1, 16))
    shop.serve([*stem, 40, 41, 42], boundaries=[(18, "turn")])
    shop.serve([*stem, 50, 51, 52], boundaries=[(8, "system"), (15, "junction")], read=False)
    shop.audit()
    tables: dict[Any, Any] = {}
    for root in shop.pool.retained.roots.values():
        for path in root.subtree():
            for mark in path.marks:
                assert tables.setdefault(mark.table, path) is path


def test_a_partly_filled_page_below_an_interned_one_is_that_page() -> None:
    """Else a commit held a page more than its budget had been asked for."""
    shop = driver(image_bytes=0, retained_bytes=4 * 16)
    shop.serve(range(1, 9), boundaries=[(6, "turn"), (8, "turn")])
    shop.serve(range(1, 9), boundaries=[(6, "system"), (8, "turn")], read=False, answer=range(8))
    assert shop.pool.stats().retained_bytes == 4 * 16


def test_a_boundary_that_min_chunk_drops_is_no_capture() -> None:
    """A cut there is not canonical: a cold run with ``exact`` would take it, a resumed one not."""
    prompt = Prompt(list(range(1, 30)), namespace=SPACE, boundaries=[(8, "system"), (10, "system")])
    cuts = canonical_cuts(prompt.boundaries, grid=64, min_chunk=5)
    assert cuts == (8,)
    captures = plan_captures(
        prompt, start=0, cuts=cuts, grid=64, worth=1, end_logits=True, junctions=(), exact=True
    )
    assert [position for position, _ in sorted(captures)] == [8, 29]


def test_deadlines_of_what_is_gone_do_not_pile_up() -> None:
    shop = driver(max_entries=2, clock=lambda: 0.0)
    for turn in range(200):
        shop.serve(range(100 * turn, 100 * turn + 20), ttl_seconds=1e6)
    assert len(shop.pool.expiry) <= 2 * shop.pool.stats().checkpoints + 64


def test_plain_attention_names_what_differs_below_a_longer_sequence() -> None:
    """Only checkpoints up to the prompt's end were looked at: none, where answers follow it."""
    shop = driver(image_bytes=0)
    shop.serve(range(1, 21), answer=[50, 51])
    other = Namespace(weights="sha256:2", kv_dtype=SPACE.kv_dtype)
    assert shop.pool.explain(Prompt(list(range(1, 21)), namespace=other)).reason == (
        "identity:weights"
    )


@pytest.mark.parametrize("image_bytes", [0, 32])
def test_a_pin_moves_to_what_is_left_when_its_tip_is_quarantined(image_bytes: int) -> None:
    """The entry went on saying that it was pinned, and nothing of it was."""
    shop = driver(image_bytes=image_bytes, lanes=2)
    shop.serve(range(1, 10), pin=True)
    below = begun(shop, range(1, 6))  # a checkpoint below the pinned tip, made after the pin
    shop.prefill(below)
    shop.engine.execute(below.checkpoint("turn", position=below.frontier))
    below.publish()
    below.release()
    begun(shop, range(1, 10)).quarantine()
    (entry,) = shop.pool.entries()
    assert entry.pinned
    assert not shop.pool.evict(entry.key)
    assert shop.pool.unpin(entry.key)
    assert shop.pool.evict(entry.key)
    shop.pool.check()


def test_a_parting_right_after_a_message_leaves_what_follows_exact() -> None:
    """It was cut one token after the message's end, where no cold run of the prompt is cut."""
    shop = driver(page_tokens=4, image_bytes=32)
    head, opener = list(range(1, 61)), 7  # every message begins with the same token
    first = [*head, opener, *range(100, 140)]
    other = [*head, opener, *range(200, 240)]
    ends = [(60, "history"), (101, "turn")]
    shop.serve(first, boundaries=ends)
    parted = shop.serve(other, boundaries=ends)
    assert (parted.start, parted.exact) == (60, True)
    again = shop.serve([*other, 9], boundaries=ends)
    assert (again.start, again.exact) == (101, True)


def test_a_junction_right_after_an_older_boundary_is_captured_at_that_boundary() -> None:
    shop = driver(page_tokens=4, image_bytes=32)
    stem, opener = list(range(1, 41)), 7
    long = [*stem, opener, *range(100, 140)]
    ends = [(40, "history"), (60, "history"), (81, "turn")]
    shop.serve(long, boundaries=ends)  # of one kind only the newest is worth an image: none at 40
    other = [*stem, opener, *range(200, 240)]
    shop.serve(other, boundaries=[(40, "history"), (60, "history"), (81, "turn")])
    third = shop.serve([*stem, opener, *range(300, 340)], boundaries=[(40, "history")])
    assert (third.start, third.reuse) == (40, "restore_junction_checkpoint")
    assert third.exact
