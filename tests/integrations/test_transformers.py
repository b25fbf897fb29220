"""Models of the library served through a pool give what the library alone gives, and reuse."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch
from transformers import StoppingCriteria

from ninfer_pool import Lease
from ninfer_pool.integrations.transformers import Generated, PooledModel, generate
from tests.integrations.architectures import BUILDERS, HYBRID, PLAIN, VOCABULARY, fresh, shared

PAGE = 16
CLOSE = 1e-5
"""RMS ratio within which fp32 logits of other cuts agree; measured: at most 3e-7."""


def pooled(name: str, **options: Any) -> PooledModel:
    """A pool of its own for a shared model."""
    return PooledModel(shared(name), **{"num_pages": 200, "page_tokens": PAGE, **options})


def words(count: int, *, seed: int = 1) -> Any:
    """Ids (1, count) at random."""
    made = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (1, count), generator=made)


def alone(model: Any, ids: Any, **options: Any) -> Any:
    """What the library's own ``generate`` gives, without any reuse."""
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)


def full(**options: Any) -> dict[str, Any]:
    """Options that return every step's logits."""
    return {"return_dict_in_generate": True, "output_logits": True, **options}


def ratio(found: Any, wanted: Any) -> float:
    """RMS of the difference over RMS, of all logits of a generation."""
    mine, right = torch.cat(found.logits).double(), torch.cat(wanted.logits).double()
    return float((mine - right).square().mean().sqrt() / right.square().mean().sqrt())


@pytest.mark.parametrize("name", BUILDERS)
def test_a_chat_computes_what_is_new_and_says_what_the_library_says(name: str) -> None:
    model, pool = shared(name), pooled(name)
    ids, before = words(70), 0
    for turn in range(6):
        output, report = pool.generate(ids, max_new_tokens=10)
        assert torch.equal(output, alone(model, ids, max_new_tokens=10))
        assert report.computed_tokens <= ids.shape[1] - before + (PAGE if turn else 0)
        assert report.reuse == ("append_frontier" if turn else "full_reset")
        pool.pool.check()
        before = output.shape[1]
        ids = torch.cat([output, words(7 + 5 * turn, seed=turn)], dim=1)


@pytest.mark.parametrize("name", BUILDERS)
def test_an_answer_that_comes_back_otherwise_resumes_at_the_prompt_end(name: str) -> None:
    """A template drops the thinking, or a client edits the answer: a state cannot be cropped."""
    model, pool = shared(name), pooled(name)
    ids = words(70)
    pool.generate(ids, max_new_tokens=10)
    edited = torch.cat([ids, words(25, seed=9)], dim=1)
    output, report = pool.generate(edited, max_new_tokens=10)
    assert report.reused_tokens == 70
    assert torch.equal(output, alone(model, edited, max_new_tokens=10))


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_a_pool_made_in_inference_mode_serves_outside_it(name: str) -> None:
    with torch.inference_mode():
        pool = pooled(name)
        pool.generate(words(70), max_new_tokens=4)
    output, report = pool.generate(words(70), max_new_tokens=4)
    assert report.reason == "hit"
    assert torch.equal(output, alone(shared(name), words(70), max_new_tokens=4))


@pytest.mark.parametrize("name", BUILDERS)
def test_one_system_prompt_serves_many(name: str) -> None:
    model, pool = shared(name), pooled(name)
    system = words(45)
    for number in range(4):
        ids = torch.cat([system, words(20, seed=20 + number)], dim=1)
        output, report = pool.generate(ids, max_new_tokens=6, boundaries=[(45, "system")])
        assert report.reused_tokens == (45 if number else 0)
        assert torch.equal(output, alone(model, ids, max_new_tokens=6))


@pytest.mark.parametrize("name", BUILDERS)
def test_the_same_cuts_give_the_same_bits_and_other_cuts_nearly(name: str) -> None:
    """What is put together again is what was taken apart, byte for byte. Only where the prefill
    was cut makes a difference: sums then run in another order."""
    model, pool = shared(name), pooled(name)
    ids, options = words(83), full(max_new_tokens=8)
    cold, _ = pool.generate(ids, **options)
    again, report = pool.generate(ids, **options)
    third, _ = pool.generate(ids, **options)
    whole = alone(model, ids, **options)
    assert report.reused_tokens == 82
    assert all(map(torch.equal, again.logits, third.logits))
    # A hybrid's cold run is cut one token before its end to keep a state there, a plain one's not.
    same = whole if name in PLAIN else again
    assert all(map(torch.equal, cold.logits, same.logits))
    assert ratio(again, whole) <= CLOSE


def same(mine: Any, theirs: Any) -> bool:
    """Say whether two layers hold the same bits: tensors, some by number, or none."""
    if isinstance(mine, dict):
        return mine.keys() == theirs.keys() and all(same(mine[i], theirs[i]) for i in mine)
    return mine is theirs is None or torch.equal(mine, theirs)


@pytest.mark.parametrize("name", BUILDERS)
def test_pages_hold_the_bytes_that_the_library_computed(name: str) -> None:
    pool = pooled(name)
    output, report = pool.generate(words(50), **full(max_new_tokens=8))
    ids = output.sequences
    lease = pool.pool.acquire(pool.prompt(ids))
    assert isinstance(lease, Lease)
    with lease:
        pool.engine.execute(lease.restore())
        held = pool.engine.continued(0, begin=lease.start, table=lease.pages)
        assert lease.start == report.retained_tokens == 57
        for mine, theirs in zip(held.layers, output.cache.layers, strict=True):
            for kind in ("keys", "values", "conv_states", "recurrent_states"):
                assert same(getattr(mine, kind, None), getattr(theirs, kind, None))


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "falcon_h1"])
def test_sampling_draws_what_the_library_draws(name: str) -> None:
    model, pool = shared(name), pooled(name)
    ids = words(40)
    pool.generate(ids, max_new_tokens=2)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "top_p": 0.95}
    torch.manual_seed(5)
    output, report = pool.generate(ids, **options)
    torch.manual_seed(5)
    assert report.reused_tokens == 39
    assert torch.equal(output, alone(model, ids, **options))


class Streamer:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.given: list[list[int]] = []

    def put(self, value: Any) -> None:
        self.given.append(value.flatten().tolist())

    def end(self) -> None:
        self.given.append([])


class Longer(StoppingCriteria):
    """Stops after so many tokens; or raises there."""

    def __init__(self, tokens: int, *, error: Exception | None = None) -> None:
        self.tokens, self.error = tokens, error

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        done = input_ids.shape[1] >= self.tokens
        if done and self.error is not None:
            raise self.error
        return torch.full((1,), done, dtype=torch.bool)


def test_streamers_stops_and_penalties_work_as_without_a_pool() -> None:
    model, pool = shared("qwen3_5"), pooled("qwen3_5")
    ids = words(40)
    pool.generate(ids, max_new_tokens=2)
    streams = Streamer(), Streamer()
    options: dict[str, Any] = {"repetition_penalty": 1.3, "max_new_tokens": 20}
    options["stopping_criteria"] = [Longer(49)]
    output, report = pool.generate(ids, streamer=streams[0], **options)
    assert torch.equal(output, alone(model, ids, streamer=streams[1], **options))
    assert (report.generated_tokens, report.retained_tokens) == (9, 48)
    assert streams[0].given == streams[1].given


def test_the_function_serves_from_the_same_pool() -> None:
    model, pool = shared("llama"), pooled("llama")
    pool.generate(words(30), max_new_tokens=2)
    output, report = generate(model, words(30), pool=pool, max_new_tokens=4)
    assert report.reused_tokens == 29
    assert torch.equal(output, alone(model, words(30), max_new_tokens=4))


@pytest.mark.parametrize("name", ["llama", "granitemoehybrid"])
def test_what_fails_midway_leaves_the_pool_as_it_was(name: str) -> None:
    pool = pooled(name)
    pool.generate(words(40), max_new_tokens=4)
    before = pool.pool.entries()
    longer = torch.cat([words(40), words(9, seed=2)], dim=1)
    for tokens in (50, 53):
        stop = Longer(tokens, error=RuntimeError("told to fail"))
        with pytest.raises(RuntimeError, match="told to fail"):
            pool.generate(longer, max_new_tokens=9, stopping_criteria=[stop])
        assert pool.pool.entries() == before
        assert not pool.pool.running
        pool.pool.check()
    output, report = pool.generate(longer, max_new_tokens=5)
    assert report.reused_tokens == 40
    assert torch.equal(output, alone(shared(name), longer, max_new_tokens=5))


@pytest.mark.parametrize("name", ["llama", "bamba"])
def test_without_room_the_library_runs_past_the_pool(name: str) -> None:
    pool = pooled(name, num_pages=12)
    output, report = pool.generate(words(250), max_new_tokens=5)
    assert torch.equal(output, alone(shared(name), words(250), max_new_tokens=5))
    assert (report.reason, report.reuse, report.retained_tokens) == ("no_room", "full_reset", 0)
    pool.pool.check()


def test_more_is_generated_than_there_was_room_for() -> None:
    """The answer is whole; what has no room is not retained."""
    pool = pooled("llama", num_pages=3)
    output, report = pool.generate(words(40), max_new_tokens=30)
    assert torch.equal(output, alone(shared("llama"), words(40), max_new_tokens=30))
    assert report.retained_tokens == 40
    pool.pool.check()


def test_without_a_lane_the_library_runs_past_the_pool() -> None:
    pool = pooled("llama")
    lease = pool.pool.acquire(pool.prompt(words(5)))
    assert isinstance(lease, Lease)
    with lease:
        output, report = pool.generate(words(20), max_new_tokens=3)
    assert report.reason == "no_lane"
    assert torch.equal(output, alone(shared("llama"), words(20), max_new_tokens=3))


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "granitemoehybrid"])
def test_what_was_cut_by_the_rules_alone_is_resumed_bit_by_bit(name: str) -> None:
    """With ``exact=True`` a prompt has the bits of its own cold run, whatever was there before."""
    ids = torch.cat([words(45), words(38, seed=8)], dim=1)
    options: dict[str, Any] = {"boundaries": [(45, "system")], "exact": True}
    options |= full(max_new_tokens=6)
    cold, _ = pooled(name, grid=32).generate(ids, **options)
    pool = pooled(name, grid=32)
    other = torch.cat([words(45), words(30, seed=7)], dim=1)
    pool.generate(other, **options)
    output, report = pool.generate(ids, **options)
    assert report.exact
    assert report.reused_tokens == 45
    assert all(map(torch.equal, cold.logits, output.logits))


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_threads_run_in_lanes_of_their_own(name: str) -> None:
    model, pool = shared(name), pooled(name, lanes=2)
    stem = words(40)
    pool.generate(stem, max_new_tokens=1)

    def ask(number: int) -> tuple[Any, Generated]:
        ids = torch.cat([stem, words(9, seed=30 + number)], dim=1)
        return ids, pool.generate(ids, max_new_tokens=6)

    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(ask, range(8)))
    assert {answer.report.reused_tokens for _, answer in answers} == {40}
    for ids, answer in answers:
        assert torch.equal(answer.output, alone(model, ids, max_new_tokens=6))
    pool.pool.check()


@pytest.mark.parametrize("name", HYBRID)
def test_the_library_alone_can_do_neither(name: str) -> None:
    """What the pool is for: a hybrid's cache refuses to be cropped, its generate an assistant."""
    model = shared(name)
    output = alone(model, words(20), **full(max_new_tokens=2))
    assert not output.cache.is_croppable
    with pytest.raises(RuntimeError, match="crop"):
        output.cache.crop(-1)
    with pytest.raises(ValueError, match="assisted generation is not supported"):
        alone(model, words(20), max_new_tokens=2, prompt_lookup_num_tokens=2)


@pytest.mark.parametrize("name", ["qwen3", "falcon_h1"])
def test_the_model_stays_as_it_is(name: str) -> None:
    model = fresh(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    settings = model.config.to_dict(), model.generation_config.to_dict()
    PooledModel(model, num_pages=60, page_tokens=PAGE).generate(words(20), max_new_tokens=3)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert (model.config.to_dict(), model.generation_config.to_dict()) == settings


@pytest.mark.parametrize("name", PLAIN)
def test_a_lane_reads_its_own_requests_pages_and_not_what_it_held_before(name: str) -> None:
    """A plain model's lane is told nothing when another request takes it at the same length."""
    engine = pooled(name, lanes=2).engine
    for lane, seed in ((0, 1), (1, 2)):
        engine.prefill(words(PAGE, seed=seed)[0], lane=lane, begin=0, table=[lane])
    right = engine.decode(5, lane=1, begin=PAGE, table=[1, 3])
    assert np.array_equal(engine.decode(5, lane=0, begin=PAGE, table=[1, 2]), right)


@pytest.mark.parametrize("name", PLAIN)
def test_plain_attention_resumes_at_any_token(name: str) -> None:
    pool = pooled(name)
    pool.generate(words(60), max_new_tokens=4)
    for common in (1, 15, 16, 17, 37):
        ids = torch.cat([words(60)[:, :common], (words(60)[:, common : common + 5] + 1) % 97], 1)
        output, report = pool.generate(ids, max_new_tokens=3, retain=False)
        assert report.reused_tokens == common
        assert torch.equal(output, alone(shared(name), ids, max_new_tokens=3))
