"""What is retained where not everything fits."""

from __future__ import annotations

from tests.core.shop import begun, driver


def test_a_budget_counts_what_extend_added_after_a_checkpoint() -> None:
    shop = driver(num_pages=24, retained_bytes=128, image_bytes=16, end_logits=False, grid=5)
    lease = begun(shop, [0, 3, 2, 4, 0, 2, 0, 0], boundaries=[(5, "system")], reserve_tokens=6)
    shop.prefill(lease)
    assert lease.extend(3)
    shop.decode(lease, range(9))
    assert shop.finish(lease) is not None
    shop.audit()


PROMPT = list(range(20))


FIRST = [70, 71, 72, 73, 74, 75, 76, 77]


def test_the_prompt_s_end_is_kept_before_the_answer_s() -> None:
    shop = driver(retained_bytes=16 * 9)
    shop.serve(PROMPT, answer=FIRST)
    assert shop.depth([*PROMPT, *FIRST]) == 20


def test_nothing_is_chosen_where_nothing_fits() -> None:
    shop = driver(num_pages=40, retained_bytes=16 * 5)
    assert shop.serve(range(20)).key is None
    assert shop.pool.stats().checkpoints == 0
    assert shop.pool.stats().counters.captures_skipped == 1
