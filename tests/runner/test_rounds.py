"""Rounds of drafting and verifying change nothing but the speed."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ninfer_pool.runner.executor import Turn
from ninfer_pool.runner.model import Model
from ninfer_pool.runner.runner import Runner
from ninfer_pool.runner.sampling import Sampler, Sampling
from tests.runner.models import random_model
from tests.runner.test_speculation import LEVEL, p_value
from tests.runner.world import Script, Seen, assert_near, assert_same_bits, begin, make, serve

KV = {"fp32": "fp32", "bf16": "bf16", "int8": "int8-g64"}
DTYPES = [*KV]
"""Of the model and its KV; INT8 lies beside a model in fp32."""
_models: dict[str, Model] = {}


def model_of(dtype: str) -> Model:
    """One random model a dtype, made once."""
    if dtype not in _models:
        model = "fp32" if dtype == "int8" else dtype
        _models[dtype] = random_model(4, dtype=model, head_dim=64)
    return _models[dtype]


def runner_of(dtype: str, drafts: int, **options: Any) -> Runner:
    return make(model_of(dtype), kv_dtype=KV[dtype], draft_tokens=drafts, **options)


def ignored(turn: Turn) -> list[int]:
    """Verify nothing."""
    return []


def drawn(turn: Turn) -> list[int]:
    """Verify random tokens."""
    source = random.Random(turn.position)
    return [source.randrange(199) for _ in turn.drafts]


def right_upto(answer: tuple[int, ...], begin: int, count: int) -> Callable[[Turn], list[int]]:
    """Proposals of which exactly ``count`` are what the model will say, where there are as many."""

    def proposals(turn: Turn) -> list[int]:
        at = turn.position + 1 - begin  # the pending token is the answer's at - 1
        good = list(answer[at : at + len(turn.drafts)])
        return [token if i < count else (token + 1) % 199 for i, token in enumerate(good)]

    return proposals


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("drafts", [1, 3, 5])
def test_greedy_output_does_not_depend_on_the_proposals(dtype: str, drafts: int) -> None:
    """The head's, none, random ones, and right ones up to each accept length: the same bits."""
    tokens, boundaries = Script(drafts, 199).ask()

    def run(proposals: Callable[[Turn], list[int]] | None) -> Seen:
        runner = runner_of(dtype, drafts, lanes=2)
        if proposals is not None:
            runner.executor.proposals = proposals
        return serve(runner, tokens, boundaries, steps=40)

    own = run(None)
    accepted = set()
    for count in range(drafts + 1):
        told = run(right_upto(own.generation.tokens, len(tokens), count))
        assert_same_bits(told, own)
        accepted.add(told.generation.accepted > 0)
        if count:
            assert told.generation.accepted >= 39 * count // (count + 1) - drafts
    assert accepted == {False, True}
    for proposals in (ignored, drawn):
        assert_same_bits(run(proposals), own)


@pytest.mark.parametrize("dtype", DTYPES)
def test_against_an_engine_without_drafts_only_near_ties_differ(dtype: str) -> None:
    """Other row counts round otherwise: where tokens first part, two logits were all but equal."""
    for seed in range(4):
        tokens, boundaries = Script(seed, 199).ask()
        plain = serve(runner_of(dtype, 0), tokens, boundaries, steps=40)
        drafting = serve(runner_of(dtype, 3), tokens, boundaries, steps=40)
        assert_near(drafting, plain, bound={"fp32": 1e-4, "bf16": 0.1, "int8": 1e-3}[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [63, 0, 1])
def test_forks_beside_a_page_edge_draft_as_a_cold_run_does(dtype: str, offset: int) -> None:
    """Draft KV is stored shifted: siblings with two next tokens never share a wrong row."""
    at = 128 + offset if offset != 63 else 127
    stem = [(41 * i) % 198 + 1 for i in range(at)]
    runner = runner_of(dtype, 3, lanes=2, shuffle=offset)
    serve(runner, stem, [(at, "turn")], steps=4)
    for first in (7, 9, 7):
        tokens = [*stem, first, 5, 6]
        boundaries = [(at, "turn"), (at + 3, "turn")]
        warm, drafts = _drafts(runner, tokens, boundaries)
        cold, wanted = _drafts(runner_of(dtype, 3, lanes=2), tokens, boundaries)
        assert warm.start >= at
        assert_same_bits(warm, cold)
        assert drafts == wanted


def _drafts(
    runner: Runner, tokens: list[int], boundaries: list[tuple[int, str]]
) -> tuple[Seen, list[list[int]]]:
    """Serve it and also return what the head drafted each round."""
    made: list[list[int]] = []

    def listen(turn: Turn) -> list[int]:
        made.append(list(turn.drafts))
        return turn.drafts

    runner.executor.proposals = listen
    return serve(runner, tokens, boundaries, steps=20, exact=True), made


def test_accepted_drafts_leave_the_draft_kv_of_a_prefill() -> None:
    """After rounds with every accept length the head's KV is what prefilling the tokens writes."""
    tokens, boundaries = Script(3, 199).ask()
    own = serve(runner_of("fp32", 3), tokens, boundaries, steps=30)
    told = runner_of("fp32", 3)
    told.executor.proposals = right_upto(own.generation.tokens, len(tokens), 2)
    running, _ = begin(told, tokens, boundaries, max_tokens=30)
    while not running.ready:
        told.prefill(running)
    while running.finish is None:
        told.decode([running])
    upto = running.lease.frontier
    cold = runner_of("fp32", 3)
    whole = [*tokens, *own.generation.tokens][:upto]
    other, _ = begin(cold, whole, [], max_tokens=1)
    while not other.ready:
        cold.prefill(other)
    mine, theirs = _draft_keys(told, running.table, upto), _draft_keys(cold, other.table, upto)
    assert torch.allclose(mine, theirs, rtol=1e-3, atol=1e-3)


def _draft_keys(runner: Runner, table: torch.Tensor, upto: int) -> torch.Tensor:
    pages = runner.slab.caches[-1].k[table[: -(-upto // 64)]]
    return pages.transpose(1, 2).flatten(0, 1)[1:upto]


DRAWS = 500
"""Of three tokens, in 27 cells. A right runner fails one choice of seeds in 10,000."""


def drawn_texts() -> tuple[float, int, int]:
    """The p-value of texts sampled with drafts against the model's own; drafts kept, and made."""
    model = random_model(4, vocab_size=3)
    tokens, how = [1, 2, 0, 2, 1, 1, 2], Sampling(temperature=2.0)
    runner, texts, kept, made = make(model, draft_tokens=2), Counter[tuple[int, ...]](), 0, 0
    prompt = runner.prompt(tokens, boundaries=[(7, "turn")])
    for seed in range(DRAWS):
        sampling = dataclasses.replace(how, seed=seed)
        one = runner.generate(
            prompt, sampling=sampling, max_tokens=4, stop_tokens=(), retain=not seed
        )
        texts[one.tokens[:3]] += 1
        kept, made = kept + one.accepted, made + one.drafted
    wanted: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        following = {text: _next(model, [*tokens, *text], how) for text in wanted}
        wanted = {
            (*text, token): p * q
            for text, p in wanted.items()
            for token, q in enumerate(following[text])
        }
    return p_value(texts, wanted), kept, made


def _next(model: Model, tokens: list[int], how: Sampling) -> list[float]:
    """The model's own distribution of the token after these."""
    row = serve(make(model), tokens, [], steps=1).new[0]
    probabilities: list[float] = Sampler(how, prompt=tokens).distribution(row).tolist()
    return probabilities


def test_text_sampled_with_drafts_has_the_models_distribution() -> None:
    """From the prompt to the tokens, with the head's own drafts, some kept and some not."""
    p, kept, made = drawn_texts()
    assert p > LEVEL
    assert 0 < kept < made


def test_a_wrong_rule_shows_in_sampled_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ninfer_pool.runner.sampling._accepts", lambda *_, **__: True)
    assert drawn_texts()[0] < LEVEL / 1_000


def test_a_stop_inside_a_round_ends_there() -> None:
    """A stop token among the accepted drafts: nothing after it is kept, and resuming is right."""
    tokens, boundaries = Script(6, 199).ask()
    own = serve(runner_of("fp32", 5), tokens, boundaries, steps=40)
    answer = own.generation.tokens
    for stop_at in range(1, 8):
        runner = runner_of("fp32", 5)
        runner.executor.proposals = right_upto(answer, len(tokens), 5)
        stop = answer[stop_at]
        upto = answer.index(stop) + 1
        prompt = runner.prompt(tokens, boundaries=boundaries)
        result = runner.generate(prompt, max_tokens=40, stop_tokens=(stop,))
        assert (result.tokens, result.finish) == (answer[:upto], "stop")
        longer = runner.prompt([*tokens, *answer[:upto]], boundaries=boundaries)
        assert runner.pool.lookup(longer)[-1].position == len(tokens) + upto - 1


def test_cancelled_after_any_round_the_pool_stays_sound() -> None:
    tokens, boundaries = Script(8, 199).ask()
    for rounds in range(5):
        runner = runner_of("fp32", 3)
        stream = runner.stream(runner.prompt(tokens, boundaries=boundaries), max_tokens=50)
        for _ in range(rounds):
            next(stream)
        stream.close()
        runner.pool.check()
        assert runner.pool.running == 0
        again = serve(runner, tokens, boundaries, steps=10, exact=True)
        assert (again.start > 0) == (rounds > 0)
        assert_same_bits(again, serve(runner_of("fp32", 3), tokens, boundaries, steps=10))


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_int8_pages_take_a_draft_pass_of_no_rows(steps: int) -> None:
    """Near a request's last token fewer drafts are wanted than the window has."""
    runner = runner_of("int8", 3)
    seen = serve(runner, list(range(1, 81)), [], steps=steps)
    assert len(seen.generation.tokens) == steps
