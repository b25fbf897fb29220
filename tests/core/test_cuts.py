"""Where prefill is cut: what is exact, and where checkpoints are taken."""

from __future__ import annotations

from ninfer_pool import Prompt
from ninfer_pool.core.planner import canonical_cuts, plan_captures
from tests.core.shop import driver
from tests.machinery.driver import SPACE


def test_a_plain_lookup_says_exact_by_the_prompts_own_cuts() -> None:
    shop = driver(image_bytes=0, grid=4)
    shop.serve(range(1, 11))
    prompt = shop.prompt([*range(1, 9), 99], boundaries=[(3, "system")])
    (match,) = shop.pool.lookup(prompt)
    assert (match.position, match.exact) == (8, False)
    assert match.exact == shop.pool.explain(prompt).exact


def test_a_boundary_that_min_chunk_drops_is_no_capture() -> None:
    """A cut there is not canonical: a cold run with ``exact`` would take it, a resumed one not."""
    prompt = Prompt(list(range(1, 30)), namespace=SPACE, boundaries=[(8, "system"), (10, "system")])
    cuts = canonical_cuts(prompt.boundaries, grid=64, min_chunk=5)
    assert cuts == (8,)
    captures = plan_captures(
        prompt, start=0, cuts=cuts, grid=64, worth=1, end_logits=True, junctions=(), exact=True
    )
    assert [position for position, _ in sorted(captures)] == [8, 29]


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


PROMPT = list(range(20))


def test_without_logits_of_the_end_one_token_is_left_to_compute() -> None:
    shop = driver(end_logits=False)
    shop.serve(PROMPT)
    shop.serve(range(24))
    assert shop.depth(PROMPT) == 19


def test_checkpoints_of_one_position_and_other_cuts_stand_side_by_side() -> None:
    shop = driver()
    one = [(12, "turn")]
    two = [(5, "system"), (12, "turn")]
    shop.serve(range(12), boundaries=one)
    shop.serve(range(12), boundaries=two, read=False)
    for declared in (one, two):
        assert shop.serve(range(13), boundaries=declared, exact=True).start == 12
    shop.serve(range(12), boundaries=two, read=False)
    assert shop.pool.stats().counters.interned_pages > 0
    shop.audit()
