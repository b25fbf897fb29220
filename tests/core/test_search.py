"""Lookups and explanations: plain attention, exactness, reasons, and what would help."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer_pool import Lease, Namespace, PoolConfig, Prompt
from ninfer_pool.core.lookup import deepest_resume
from ninfer_pool.core.planner import canonical_cuts, plan_captures
from ninfer_pool.testing.oracle import OracleCheckpoint, OraclePool, cells_of, common
from tests.machinery import strategies
from tests.machinery.driver import SPACE, Driver


def driver(**changes: Any) -> Driver:
    config = PoolConfig(num_pages=400, page_bytes=16, image_bytes=32, page_tokens=4, grid=16)
    return Driver(config.replace(**changes))


@given(st.lists(strategies.prompts(), min_size=1, max_size=6), strategies.prompts())
@settings(max_examples=100)
def test_plain_attention_resumes_at_the_longest_common_prefix(served: Any, asked: Any) -> None:
    shop = driver(image_bytes=0, end_logits=False)
    served = [prompt for prompt in served if all(span.digest for span in prompt.media)]
    for prompt in served:
        shop.serve(prompt)
    limit = deepest_resume(shop.pool.config, asked)
    reach = [
        min(common(cells_of(asked), cells_of(other)), limit)
        for other in served
        if other.namespace == asked.namespace
    ]
    best = max(reach, default=0)
    for span in asked.media:
        if span.begin < best < span.end:
            best = span.begin
    assert shop.depth(asked) == best
    assert shop.serve(asked).start == best


def test_plain_attention_says_where_it_resumes() -> None:
    shop = driver(image_bytes=0, end_logits=False)
    shop.serve(range(40))
    matches = shop.pool.lookup(shop.prompt([*range(30), 99, 98]))
    assert matches == [(30, "junction", False, 8 * 16)]
    assert shop.serve([*range(30), 99, 98], exact=True).start == 16
    assert shop.serve([90, 91], exact=True).start == 0
    assert shop.serve(range(40), exact=True).start == 32


def test_matches_are_a_list() -> None:
    shop = driver()
    shop.serve(range(40), boundaries=[(8, "system")])
    matches = shop.pool.lookup(shop.prompt(range(40)))
    assert (len(matches), matches[0].position, [m.position for m in matches]) == (2, 8, [8, 40])
    assert matches[:1] == [matches[0]]
    assert matches
    assert matches != 5
    assert matches == shop.pool.lookup(shop.prompt(range(40)))
    assert repr(matches) == repr(list(matches))
    assert not shop.pool.lookup(shop.prompt([5]))


def test_exact_only_where_a_cold_run_cuts_alike() -> None:
    shop = driver()
    shop.serve(range(40), boundaries=[(8, "system"), (36, "turn")])
    same = [(8, "system"), (36, "turn"), (40, "turn")]
    assert [m.exact for m in shop.pool.lookup(shop.prompt(range(40), boundaries=same))] == [
        True,
        True,
        False,
    ]
    assert not any(m.exact for m in shop.pool.lookup(shop.prompt(range(40))))
    assert shop.serve(range(40), boundaries=same, exact=True).start == 36
    seen = shop.pool.explain(shop.prompt(range(41)), exact=True)
    assert (seen.resumable, seen.matched) == (0, 40)


def test_an_exact_checkpoint_is_preferred_at_a_tie() -> None:
    shop = driver()
    shop.serve(range(12))
    reader = shop.begin(range(12), boundaries=[(12, "turn")])
    assert reader is not None
    reader.release()
    assert not shop.pool.lookup(shop.prompt(range(12), boundaries=[(12, "turn")]))[0].exact
    shop.serve(range(12), boundaries=[(12, "turn")], read=False)
    done = shop.serve(range(13), boundaries=[(12, "turn")])
    assert (done.start, done.exact) == (12, True)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("weights", {"weights": "other"}),
        ("kv_dtype", {"kv_dtype": "bf16"}),
        ("rope", {"rope": "max=1"}),
        ("draft", {"draft": "mtp1"}),
        ("adapter", {"adapter": "a"}),
    ],
)
def test_another_identity_is_named_and_never_hits(field: str, changes: dict[str, Any]) -> None:
    shop = driver()
    shop.serve(range(20))
    base: dict[str, Any] = {"weights": SPACE.weights, "kv_dtype": SPACE.kv_dtype}
    other = shop.prompt(range(20), namespace=Namespace(**{**base, **changes}))
    seen = shop.pool.explain(other)
    assert (seen.reason, seen.resumable) == (f"identity:{field}", 0)
    assert seen.helps == (f"the same {field} as the retained entry's",)


def test_nothing_crosses_a_salt() -> None:
    shop = driver()
    shop.serve(range(20))
    base: dict[str, Any] = {"weights": SPACE.weights, "kv_dtype": SPACE.kv_dtype}
    other = shop.prompt(range(20), namespace=Namespace(**base, salt="tenant"))
    assert shop.pool.explain(other).reason == "no_entry"


def test_an_eviction_says_how_much_more_room_would_have_helped() -> None:
    shop = driver(max_entries=1)
    shop.serve(range(20))
    shop.serve(range(40, 50))
    seen = shop.pool.explain(shop.prompt(range(21)))
    assert (seen.reason, seen.matched, seen.lost) == ("evicted", 20, 20)
    assert seen.helps[-1] == "112 bytes more, so that 20 tokens stay"


def test_an_explanation_reads_well() -> None:
    shop = driver(minimum_tokens=30)
    shop.serve(range(20))
    assert str(shop.pool.explain(shop.prompt(range(20)))) == (
        "below_minimum: 0 of 20 tokens resumable, 20 matched, 20 lost\n"
        "  would help: minimum_tokens below 30"
    )
    shop = driver()
    shop.serve(range(20))
    assert str(shop.pool.explain(shop.prompt([*range(18), 5, 5]))) == (
        "no_checkpoint_before: 0 of 20 tokens resumable, 18 matched, 18 lost, parts at 18\n"
        "  would help: a checkpoint at 18 would spare 18 tokens more\n"
        "  would help: the same token at 18 as before (something in the prompt changes there)"
    )
    assert "from the turn checkpoint, not exact" in str(shop.pool.explain(shop.prompt(range(21))))


def test_a_boundary_too_near_the_cut_before_it_is_no_cut() -> None:
    shop = driver(min_chunk=4)
    prompt = shop.prompt(range(40), boundaries=[(4, "system"), (7, "turn"), (17, "turn")])
    assert canonical_cuts(prompt.boundaries, grid=16, min_chunk=4) == (4,)
    assert canonical_cuts(prompt.boundaries, grid=16, min_chunk=0) == (4, 7, 17)


def test_optional_points_are_taken_only_where_they_are_worth_it() -> None:
    prompt = driver().prompt(range(1000))
    plan: dict[str, Any] = {"start": 0, "cuts": (), "grid": 2048, "end_logits": True}
    for worth in (100, 5000):
        found = plan_captures(prompt, worth=worth, junctions=[50, 500], exact=False, **plan)
        assert found[0] == (1000, "turn")
        assert ((500, "junction") in found) == (worth == 100)
        assert (50, "junction") not in found
    found = plan_captures(prompt, worth=100, junctions=[500], exact=True, **plan)
    assert found == [(1000, "turn")]


def test_plain_attention_is_covered_by_what_forks_off_later() -> None:
    shop = driver(image_bytes=0, end_logits=False)
    keys = [shop.serve([*range(20), last, 7]).key for last in (91, 92, 93)]
    assert keys[0] is not None
    assert shop.pool.evict(keys[0])
    shop.audit()
    assert shop.serve([*range(18), 1, 2, 3]).start == 18
    assert shop.serve([*range(20), 94]).start == 20


@given(st.lists(st.tuples(strategies.prompts(), st.booleans()), max_size=7))
@settings(max_examples=100)
def test_an_unlimited_pool_holds_what_the_oracle_holds(requests: Any) -> None:
    shop = driver()
    oracle = OraclePool(shop.pool.config)
    for prompt, read in requests:
        wanted = oracle.predict(prompt, read=read)
        lease = shop.begin(prompt, read=read)
        assert lease is not None
        assert (lease.start, lease.exact) == (wanted.position, wanted.exact)
        with lease:
            shop.prefill(lease)
            cells = cells_of(prompt)
            for mark in lease.taken:
                place = cells[: mark.position]
                oracle.commit(OracleCheckpoint(prompt.namespace, place, mark.kind, mark.cuts))
            lease.commit()
        assert OraclePool.of(shop.pool).keys() == oracle.keys()


def test_the_same_prompt_asked_again_is_answered_from_memory_until_something_changes() -> None:
    shop = driver()
    shop.serve(range(40))
    prompt = shop.prompt(range(40))
    first = shop.pool.lookup(prompt)
    assert shop.pool.lookup(prompt) is first
    shop.serve([*range(40), 50, 51])
    assert [match.position for match in shop.pool.lookup(prompt)] == [40]
    again = shop.pool.lookup(prompt)
    assert again is not first
    assert driver().pool.lookup(prompt) == []
    shop.pool.clear()
    assert shop.pool.lookup(prompt) == []
    assert [match.position for match in first] == [40]


def test_a_buffer_changed_between_lookup_and_acquire_is_compared_anew() -> None:
    shop = driver()
    shop.serve(range(40))
    tokens = np.arange(44, dtype=np.int32)
    prompt = Prompt(tokens, namespace=SPACE)
    assert shop.pool.lookup(prompt)[-1].position == 40
    tokens[5] = 900
    lease = shop.pool.acquire(prompt)
    assert isinstance(lease, Lease)
    assert lease.start == 0


def test_partings_at_and_around_earlier_forks_are_found() -> None:
    shop = driver()
    shop.serve(range(60), boundaries=[(8, "system")])
    for at in (30, 12, 45):
        shop.serve([*range(at), *range(200, 210)])
        for parting in range(60):
            asked = [*range(parting), *range(300, 305)]
            assert shop.pool.explain(shop.prompt(asked)).matched == parting
