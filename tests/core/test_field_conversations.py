"""What people hit with other engines in conversations; the numbers are those of the reports."""

from __future__ import annotations

import pytest

from tests.core.field_world import PAGE, Chat, driver, talk


def test_field_01_a_one_shot_between_two_turns() -> None:
    for entries, retain in ((2, True), (1, False)):
        shop = driver(max_entries=entries)
        chat = Chat(shop, 0)
        chat.turn()
        shop.serve(talk(5, 9), retain=retain)
        assert chat.turn() == 6


def test_field_03_helpers_that_quote_the_chat() -> None:
    shop = driver(max_entries=4)
    chat = Chat(shop, 0)
    chat.turn()
    for _ in range(3):
        shop.serve([*chat.fresh(5), *chat.tokens, *chat.fresh(4)])
        assert chat.turn() == 6


def test_field_04_a_sweep_of_documents_spares_a_live_conversation() -> None:
    shop = driver(max_entries=8)
    chat = Chat(shop, 0)
    for _ in range(4):
        chat.turn()
    for number in range(32):
        shop.serve(talk(number + 1, 30))
        if number % 6 == 5:
            assert chat.turn() == 6


def test_field_05_hits_raise_survival() -> None:
    shop = driver(max_entries=2, policy="lru")
    chat = Chat(shop, 0)
    chat.turn()
    for number in range(6):
        shop.serve(talk(number + 1, 5))
        assert chat.turn() == 6


def test_field_06_a_hundred_linear_turns_are_one_entry() -> None:
    shop = driver()
    shop.audits = False
    chat = Chat(shop, 0)
    for turn in range(100):
        assert chat.turn() == (6 if turn else 30)
    shop.pool.check()
    assert len(shop.pool.entries()) == 1


def test_field_06_turns_whose_prologue_is_not_repeated_are_one_entry() -> None:
    """A chat's next prompt parts at the turn point: before the fixed beginning of the answer."""
    shop = driver(max_entries=8)
    turns: list[int] = []
    boundaries: list[tuple[int, str]] = []
    for turn in range(20):
        turns += range(1000 * turn + 1, 1000 * turn + 40)
        boundaries.append((len(turns), "turn"))
        prompt = [*turns, 7, 8, 9]  # the prologue, which no later prompt has
        declared = [*boundaries, (len(prompt), "response")]
        served = shop.serve(prompt, boundaries=declared, answer=[300_000 + turn, 5, 6])
        assert served.start == (boundaries[-2][0] if turn else 0)
        assert served.exact
        turns += [300_000 + turn, 6]
    assert shop.pool.stats().entries == 1
    assert shop.pool.stats().counters.evictions == 0


def test_field_07_a_parent_and_its_children() -> None:
    shop = driver(max_entries=4)
    parent = Chat(shop, 0)
    parent.turn()
    children = [Chat(shop, number) for number in (1, 2, 3)]
    for _ in range(3):
        for child in children:
            child.turn()
        assert parent.turn() == 6


def test_field_08_own_superseded_points_go_first() -> None:
    shop = driver(pages=120, retained_bytes=100 * PAGE)
    big = Chat(shop, 0, system=talk(0, 120))
    big.turn()
    other = Chat(shop, 1)
    while not shop.pool.stats().counters.superseded_evicted:
        other.tokens += other.fresh(3)
        other.turn()
    assert shop.pool.stats().counters.evictions == 0
    assert big.turn() == 6


def test_field_10_another_system_prompt_for_the_same_chat() -> None:
    shop = driver(max_entries=2)
    chat = Chat(shop, 0)
    chat.turn()
    shop.serve([*talk(7, 24), *chat.tokens[24:]])
    assert chat.turn() == 6


def test_field_11_no_checkpoint_before_the_divergence_is_said() -> None:
    shop = driver()
    shop.serve(talk(0))
    almost = [*talk(0)[:38], 1, 2]
    done = shop.serve(almost, boundaries=[(40, "turn")])
    assert (done.start, done.reason) == (0, "no_checkpoint_before")
    assert (done.explanation.matched, done.explanation.lost) == (38, 38)
    assert done.explanation.helps[0] == "a checkpoint at 38 would spare 38 tokens more"


def test_field_11_with_a_turn_checkpoint_it_resumes_there() -> None:
    shop = driver()
    shop.serve(talk(0), boundaries=[(36, "turn")])
    assert shop.serve([*talk(0)[:38], 1, 2]).start == 36


def test_field_12_chosen_by_tokens_saved_not_by_tokens_matched() -> None:
    shop = driver()
    shop.serve(talk(0)[:30])
    shop.serve([*talk(0)[:38], 1, 2, 3])
    done = shop.serve(talk(0))
    assert (done.start, done.explanation.matched) == (30, 38)


def test_field_13_a_rewrite_far_back_finds_a_checkpoint_near() -> None:
    shop = driver()
    shop.audits = False
    chat = Chat(shop, 0)
    for _ in range(200):
        chat.turn()
    shop.pool.check()
    at = len(chat.tokens) * 2 // 5
    assert at - shop.depth([*chat.tokens[:at], 1, 2]) <= 9


def test_field_14_each_tool_step_prefills_its_growth() -> None:
    shop = driver(max_entries=1)
    chat = Chat(shop, 0)
    chat.turn()
    assert [chat.turn() for _ in range(20)] == [6] * 20


def test_field_15_a_tail_that_changes_resumes_at_the_turn() -> None:
    shop = driver()
    prompt = talk(0)
    shop.serve(prompt, boundaries=[(40, "turn")], answer=[1, 2, 3, 4])
    done = shop.serve([*prompt, 1, 9, 9])
    assert (done.start, done.reuse) == (40, "restore_turn_checkpoint")


def test_field_17_the_second_request_resumes_at_the_system_boundary() -> None:
    shop = driver()
    system = talk(0, 24)
    shop.serve([*system, 1, 2, 3], boundaries=[(24, "system")])
    assert shop.serve([*system, 4, 5, 6], boundaries=[(24, "system")]).start == 24


def test_field_17_an_undeclared_junction_serves_the_third() -> None:
    shop = driver()
    for last, start in ((1, 0), (2, 0), (3, 24)):
        assert shop.serve([*talk(0, 24), last, 5, 6]).start == start


@pytest.mark.parametrize("length", [1, 3, 4, 5])
def test_field_18_no_minimum_but_the_callers(length: int) -> None:
    shop = driver()
    shop.serve(talk(0, length))
    assert shop.serve(talk(0, length)).start == length
    picky = driver(minimum_tokens=length + 1)
    picky.serve(talk(0, length))
    done = picky.serve(talk(0, length))
    assert (done.start, done.reason) == (0, "below_minimum")


def test_field_21_a_volatile_line_keeps_what_is_before_it() -> None:
    shop = driver()
    tools, rest = talk(0, 24), talk(1, 30)
    shop.serve([*tools, 1, *rest], boundaries=[(24, "system"), (55, "turn")])
    done = shop.serve([*tools, 2, *rest], boundaries=[(24, "system"), (55, "turn")])
    assert (done.start, done.explanation.diverged_at) == (24, 24)


def test_field_22_tools_in_another_order() -> None:
    shop = driver()
    one, two, rest = talk(1, 10), talk(2, 10), talk(3, 10)
    shop.serve([0, *one, *two, *rest])
    done = shop.serve([0, *two, *one, *rest])
    assert (done.start, done.reason, done.explanation.diverged_at) == (0, "diverged", 1)


def test_field_23_a_message_that_is_never_sent_again() -> None:
    shop = driver()
    shop.serve([*talk(0), 1, 1, 1], boundaries=[(40, "turn"), (43, "turn")])
    assert shop.depth([*talk(0), 2, 2]) == 0
    shop.serve([*talk(0), 2, 2], boundaries=[(40, "turn"), (42, "turn")])
    seen = shop.pool.explain(shop.prompt([*talk(0), 3, 3]))
    assert seen.diverged_at == 40
