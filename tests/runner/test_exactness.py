"""A resumed run gives the bits of a cold one wherever the pool says that it is exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ninfer_pool.runner.model import Model
from ninfer_pool.runner.runner import Runner
from tests.runner.models import random_model
from tests.runner.world import Script, assert_near, assert_same_bits, begin, make, serve

KINDS: dict[str, dict[str, str]] = {
    "fp32": {"dtype": "fp32", "kv_dtype": "fp32"},
    "fp32-bf16": {"dtype": "fp32", "kv_dtype": "bf16"},
    "fp32-int8": {"dtype": "fp32", "kv_dtype": "int8-g64"},
    "bf16": {"dtype": "bf16", "kv_dtype": "bf16"},
    "bf16-int8": {"dtype": "bf16", "kv_dtype": "int8-g64"},
    "fp16": {"dtype": "fp16", "kv_dtype": "fp16"},
}
pytestmark = pytest.mark.pairwise(kind=KINDS)
_models: dict[tuple[str, int], Model] = {}


def model_of(dtype: str, *, head_dim: int = 64) -> Model:
    """One random model a dtype, made once."""
    if (dtype, head_dim) not in _models:
        _models[dtype, head_dim] = random_model(3, dtype=dtype, head_dim=head_dim)
    return _models[dtype, head_dim]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> dict[str, str]:
    """One dtype of the model and one of its KV."""
    return KINDS[request.param]


def runner_of(kind: dict[str, str], **options: Any) -> Runner:
    return make(model_of(kind["dtype"]), kv_dtype=kind["kv_dtype"], **options)


def test_every_turn_resumes_exactly_to_the_bit(kind: dict[str, str], seeds: range) -> None:
    """Conversations of turns, retold with all earlier boundaries, asked for with ``exact``."""
    for seed in seeds:
        runner = runner_of(kind, lanes=1 + seed % 3, shuffle=seed)
        script = Script(seed, 199)
        for turn in range(4):
            tokens, boundaries = script.ask()
            steps = 64 if turn == 3 else 9
            warm = serve(runner, tokens, boundaries, steps=steps, exact=True)
            assert warm.generation.exact
            assert (warm.start > 0) == (turn > 0)
            cold = serve(
                runner_of(kind, lanes=1 + seed % 3), tokens, boundaries, steps=steps, exact=True
            )
            assert_same_bits(warm, cold)
            script.answer(warm.generation.tokens)


def test_a_branch_resumes_where_it_parts(kind: dict[str, str], seeds: range) -> None:
    """Several conversations share a system prompt and part after it."""
    for seed in seeds[:3]:
        runner = runner_of(kind, lanes=2, shuffle=seed)
        stem, ends = Script(seed, 199), []
        for branch in range(3):
            script = Script(seed, 199)
            script._random.seed(f"{seed} {branch}")
            ends.append(script.ask())
            warm = serve(runner, *ends[-1], steps=12, exact=True)
            assert warm.start == (len(stem.tokens) if branch else 0)
            assert_same_bits(warm, serve(runner_of(kind, lanes=2), *ends[-1], steps=12))
        for end in ends:  # and each again, whole
            warm = serve(runner, *end, steps=12, exact=True)
            assert warm.start == len(end[0])
            assert_same_bits(warm, serve(runner_of(kind, lanes=2), *end, steps=12))


def test_every_exact_checkpoint_of_a_conversation_resumes_to_the_bit(
    kind: dict[str, str],
) -> None:
    """Each that lookup calls exact, by a prompt that goes on from just there in another way."""
    runner, script = runner_of(kind, shuffle=3), Script(21, 199)
    tokens, boundaries = script.ask()
    for turn in range(3):
        if turn:
            tokens, boundaries = script.ask()
        script.answer(serve(runner, tokens, boundaries, steps=7, exact=True).generation.tokens)
    told = runner.prompt(tokens, boundaries=boundaries)
    exact = [match.position for match in runner.pool.lookup(told) if match.exact]
    assert len(exact) >= 4
    for at in exact:
        other = [*tokens[:at], 198, 5, 6]
        bounds = [each for each in boundaries if each[0] <= at] + [(at + 3, "turn")]
        warm = serve(runner, other, bounds, steps=9, exact=True)
        assert (warm.start, warm.generation.exact) == (at, True)
        assert_same_bits(warm, serve(runner_of(kind), other, bounds, steps=9))


@pytest.mark.parametrize("drafts", [0, 2])
def test_other_lanes_change_no_bit(kind: dict[str, str], drafts: int) -> None:
    """The same request in another lane, with other requests decoding beside it or none."""
    alone = runner_of(kind, lanes=3, draft_tokens=drafts)
    tokens, boundaries = Script(7, 199).ask()
    cold = serve(alone, tokens, boundaries)
    busy = runner_of(kind, lanes=3, shuffle=1, draft_tokens=drafts)
    others = []
    for number in range(2):
        other, _ = begin(busy, *Script(50 + number, 199).ask(), max_tokens=500)
        while not other.ready:
            busy.prefill(other)
        others.append(other)
    assert_same_bits(serve(busy, tokens, boundaries, beside=others, lane=2), cold)
    again = serve(busy, tokens, boundaries, beside=others, exact=True)
    assert again.start == len(tokens)
    assert_same_bits(again, cold)


@pytest.mark.parametrize("edge", [-1, 0, 1])
@pytest.mark.parametrize("pages", [1, 2])
def test_page_edges(kind: dict[str, str], edge: int, pages: int) -> None:
    """Checkpoints at a page's edge, one before and one after; then zero new tokens and some."""
    at = 64 * pages + edge
    tokens = [(37 * i) % 198 + 1 for i in range(at + 40)]
    runner = runner_of(kind, shuffle=pages)
    serve(runner, tokens[:at], [(at, "turn")], steps=3)
    whole = [(at, "turn")]
    for length in (at, at + 1, at + 40):
        bounds = [*whole, (length, "turn")] if length > at else whole
        warm = serve(runner, tokens[:length], bounds, steps=5, exact=True)
        assert warm.start >= at
        assert_same_bits(warm, serve(runner_of(kind), tokens[:length], bounds, steps=5))


@pytest.mark.parametrize("step", [-1, 0, 1])
@pytest.mark.parametrize(("at", "before"), [(100, 0), (108, 100)])
def test_one_before_at_and_after_a_checkpoint_and_a_frontier(
    kind: dict[str, str], at: int, before: int, step: int
) -> None:
    """A checkpoint made by prefill at 100; the frontier that decoding left at 108."""
    tokens = [(43 * i) % 198 + 1 for i in range(100)]
    for exact in (False, True):
        runner = runner_of(kind)
        first = serve(runner, tokens, [(100, "turn")], steps=9)
        asked = [*tokens, *first.generation.tokens, 5][: at + step]
        bounds = [each for each in [(100, "turn"), (at + step, "turn")] if each[0] <= at + step]
        warm = serve(runner, asked, bounds, steps=5, exact=exact)
        cold = serve(runner_of(kind), asked, bounds, steps=5)
        if exact or at == 100:
            assert warm.start == (before if step < 0 else 100)
            assert_same_bits(warm, cold)
        else:
            assert (warm.start, warm.generation.exact) == (before if step < 0 else 108, step < 0)
            assert_near(warm, cold, bound=BOUND[kind["dtype"], kind["kv_dtype"]])


def test_a_resume_that_cuts_at_a_junction_does_not_say_exact(kind: dict[str, str]) -> None:
    """The checkpoint is exact, but what follows is cut where a cold run in an empty pool is not."""
    runner = runner_of(kind, grid=2048)
    stem = [(7 * i) % 198 + 1 for i in range(140)]
    serve(runner, stem, [(40, "system"), (140, "turn")], steps=2)
    other = [*stem[:90], 8, *stem[:60]]
    bounds = [(40, "system"), (len(other), "turn")]
    warm = serve(runner, other, bounds, steps=4)
    assert (warm.start, warm.generation.exact) == (40, False)
    runner = runner_of(kind, grid=2048)
    serve(runner, stem, [(40, "system"), (140, "turn")], steps=2)
    asked = serve(runner, other, bounds, steps=4, exact=True)
    assert (asked.start, asked.generation.exact) == (40, True)
    assert_same_bits(asked, serve(runner_of(kind, grid=2048), other, bounds, steps=4))


def test_what_is_not_exact_says_so(kind: dict[str, str]) -> None:
    """Undeclared ends, frontiers made by decoding, junctions: never ``exact``, and close."""
    runner = runner_of(kind)
    tokens = [(29 * i) % 198 + 1 for i in range(150)]
    first = serve(runner, tokens[:100], [], steps=20)
    frontier = [*tokens[:100], *first.generation.tokens]
    warm = serve(runner, frontier, [], steps=5)
    assert (warm.generation.exact, warm.start) == (False, 119)
    assert serve(runner, frontier, [], steps=5, exact=True).start in (0, 64)
    undeclared = serve(runner, tokens[:130], [], steps=5)
    assert (undeclared.start, undeclared.generation.exact) == (100, False)


BOUND = {
    ("fp32", "fp32"): 1e-5,
    ("fp32", "bf16"): 5e-5,
    ("fp32", "int8-g64"): 2e-4,
    ("bf16", "bf16"): 0.03,
    ("bf16", "int8-g64"): 0.03,
    ("fp16", "fp16"): 0.005,
}
"""RMS of the difference over RMS of the logits, by the model's dtype and the KV's, against a cold
run that cuts otherwise: four to ten times what was measured, see docs/explanation/exactness.md."""


def test_what_is_not_exact_is_near(kind: dict[str, str], seeds: range) -> None:
    """Resumed from undeclared ends and decode-made frontiers: bounded, and only ties differ."""
    bound = BOUND[kind["dtype"], kind["kv_dtype"]]
    for seed in seeds:
        runner, script = runner_of(kind, shuffle=seed), Script(seed, 199)
        tokens, _ = script.ask()
        first = serve(runner, tokens, [], steps=20)
        script.answer(first.generation.tokens)
        for _ in range(2):
            tokens, _ = script.ask()
            warm = serve(runner, tokens, [], steps=20)
            assert warm.start > 0
            assert not warm.generation.exact
            assert_near(warm, serve(runner_of(kind), tokens, [], steps=20), bound=bound)
            script.answer(warm.generation.tokens)


def test_what_follows_an_inexact_checkpoint_is_not_exact(kind: dict[str, str]) -> None:
    """A prefill-made boundary above a decode-made frontier does not claim the cold run's bits."""
    runner = runner_of(kind)
    tokens = [(31 * i) % 198 + 1 for i in range(80)]
    first = serve(runner, tokens, [(80, "turn")], steps=12)
    longer = [*tokens, *first.generation.tokens, *tokens[:30]]
    bounds = [(80, "turn"), (len(longer), "turn")]
    second = serve(runner, longer, bounds, steps=4)
    assert (second.generation.exact, second.start) == (False, 91)
    third = serve(runner, [*longer, 5, 6], [*bounds, (len(longer) + 2, "turn")], steps=4)
    assert not third.generation.exact
    fourth = serve(runner, [*longer, 5, 7], [*bounds, (len(longer) + 2, "turn")], exact=True)
    assert fourth.start == 80
    cold = serve(runner_of(kind), [*longer, 5, 7], [*bounds, (len(longer) + 2, "turn")])
    assert_same_bits(fourth, cold)


def test_a_hundred_resumes_leave_an_entry_as_it_was(kind: dict[str, str]) -> None:
    """Forks of one entry write no byte that it holds; guard pages stay as they were."""
    runner = runner_of(kind, lanes=2)
    tokens, boundaries = Script(11, 199).ask()
    serve(runner, tokens, boundaries, steps=8)
    state = runner.pool.state
    entry = next(iter(state.catalog.entries.values()))
    marks = list(state.catalog.path_checkpoints(entry))
    pages = [
        [*mark.kv_pages(64).tolist(), *state.ledger.pages_of_image(mark.image).tolist()]
        for mark in marks
    ]
    before = [runner.slab.pages[ids] for ids in pages]
    guard = state.ledger.take(4).tolist()  # as if another lease had them
    runner.slab.pages[guard] = 0x5A
    for number in range(100):
        own = [*tokens, 1 + number, 2, 3]
        running, _ = begin(runner, own, boundaries, max_tokens=3, retain=False)
        assert running.lease.start == len(tokens)
        while not running.ready:
            runner.prefill(running)
        while running.finish is None:
            runner.decode([running])
        runner.cancel(running)
    assert all(
        torch.equal(old, runner.slab.pages[ids]) for old, ids in zip(before, pages, strict=True)
    )
    assert (runner.slab.pages[guard] == 0x5A).all()


def test_a_cancelled_prefill_is_resumed_from_the_checkpoints_it_crossed(
    kind: dict[str, str],
) -> None:
    """Cancelled after every chunk in turn; the next try goes on from there, to the bit."""
    tokens, boundaries = Script(5, 199).ask()
    script_cold = serve(runner_of(kind), tokens, boundaries, steps=8)
    runner = runner_of(kind)
    crossed = 0
    for chunks in range(1, 5):
        running, _ = begin(runner, tokens, boundaries, max_tokens=8, exact=True)
        crossed = max(crossed, running.lease.start)
        for _ in range(chunks):
            if not running.ready:
                runner.prefill(running)
        runner.cancel(running)
    warm = serve(runner, tokens, boundaries, steps=8, exact=True)
    assert warm.start >= crossed
    assert warm.start > 0
    assert_same_bits(warm, script_cold)


def test_a_boundary_that_min_chunk_drops_changes_no_bit() -> None:
    """A cold run cut there for its checkpoint; one that resumed past it did not."""
    tokens = [(7 * i) % 198 + 1 for i in range(150)]
    bounds = [(63, "system"), (65, "junction"), (110, "turn"), (150, "turn")]
    runner = runner_of(KINDS["fp32"], min_chunk=7, grid=2048)
    serve(runner, tokens[:110], [(63, "system"), (110, "turn")], steps=2)
    warm = serve(runner, tokens, bounds, steps=4, exact=True)
    assert warm.start == 110
    assert_same_bits(
        warm, serve(runner_of(KINDS["fp32"], min_chunk=7, grid=2048), tokens, bounds, steps=4)
    )
