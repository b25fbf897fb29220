"""llama.cpp resumes conversations from the pool: on request, `scripts/test --llama`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

if not os.environ.get("NINFER_POOL_LLAMA"):
    pytest.importorskip("llama_cpp", reason="scripts/test --llama compiles llama-cpp-python")

from ninfer_pool.errors import ConfigError, PromptError
from ninfer_pool.integrations.llama_cpp import LibraryError, LlamaSampling, PooledLlama
from ninfer_pool.runner import TINY, Runner
from tests.integrations.llama_models import (
    DENSE,
    F32,
    FALCON,
    HYBRID,
    LLAMA,
    Alone,
    Chat,
    load,
    pooled,
    shared,
)

PAGE = 64
MOST = 24
KINDS = (HYBRID, FALCON, LLAMA, DENSE)
QUESTIONS = ("Who made the earth?", "And the sea?", "Why?", "What came after that, and when?")


@pytest.fixture
def tiny() -> Iterator[PooledLlama]:
    with pooled(HYBRID) as made:
        yield made
        made.pool.check()


# -- an independent oracle ---------------------------------------------------------------------


def test_the_runner_and_llama_cpp_agree_on_the_same_weights() -> None:
    """Two implementations that share no code: RMS ratio of all logits at most 1e-4, fp32."""
    text = (TINY / "README.md").read_text(encoding="utf-8")
    llama = load(HYBRID, logits_all=True, type_k=F32, type_v=F32)
    tokens = llama.tokenize(text.encode(), add_bos=False, special=True)[:300]
    runner = Runner.from_pretrained(TINY, dtype="fp32", kv_dtype="fp32", kv_budget="32MiB")
    assert list(runner.tokenizer.encode(text))[:300] == tokens
    llama.eval(tokens)
    theirs = llama.scores[: len(tokens)]
    running = runner.start(runner.prompt(tokens), max_tokens=1)
    assert running is not None
    parts: list[Any] = []
    while not running.ready:
        runner.prefill(running, look=lambda _, x: parts.append(runner.model.logits(x)))
    ours = np.concatenate([part.detach().numpy() for part in parts])
    ratio = np.sqrt(((ours - theirs) ** 2).mean() / (ours**2).mean())
    print(f"runner against llama.cpp: RMS ratio {ratio:.2g} over {len(tokens)} positions")
    assert ratio <= 1e-4
    assert (ours.argmax(-1) == theirs.argmax(-1)).all()


def assert_same(
    alone: Alone, kind: str, prompt: list[int], tokens: list[int], *, most: int
) -> None:
    """The library's own greedy answer, or with quantized weights one of equal logits to it."""
    if kind == DENSE:
        assert alone.follows(prompt, tokens, slack=0.05)
    else:
        assert tokens == alone.greedy(prompt, most=most, fresh=True)


# -- conversations -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_computes_its_new_tokens_and_at_most_a_page(kind: str) -> None:
    """Outputs equal the library's own without reuse; with quantized weights, where it decides."""
    alone, chat, known = Alone(kind), Chat(kind, system="You know old books."), 0
    with pooled(kind) as made:
        for question in QUESTIONS:
            prompt = chat.ask(question)
            done = made.generate(prompt, max_tokens=MOST)
            new = len(prompt) - known
            assert new <= done.computed <= new + PAGE
            assert done.reused + done.computed == len(prompt)
            assert done.reuse == ("append_frontier" if known else "full_reset")
            assert_same(alone, kind, prompt, done.tokens, most=MOST)
            known = len(prompt) + len(done.tokens)
            chat.answered(done.tokens)
        made.pool.check()


def test_the_library_alone_evaluates_a_hybrids_whole_prompt_again() -> None:
    """What the adapter is for: the same two prompts, which part in their last words."""
    alone, chat = Alone(HYBRID), Chat(HYBRID, system="You know old books." * 8)
    first, other = (chat.ask(question, keep=False) for question in QUESTIONS[:2])
    answers = [alone.greedy(first, most=4, fresh=True), alone.greedy(other, most=4, fresh=False)]
    assert alone.evaluated >= len(other)
    system = [(len(chat.tokens), "system")]
    with pooled(HYBRID) as made:
        made.generate(made.prompt(first, boundaries=system), max_tokens=4)
        done = made.generate(made.prompt(other, boundaries=system), max_tokens=4)
        assert done.tokens == answers[1]
        assert done.reuse == "restore_system_checkpoint"
        assert done.computed == len(other) - len(chat.tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_more_conversations_than_lanes_are_all_retained(kind: str) -> None:
    chats = [Chat(kind, system=f"You are number {number}.") for number in range(4)]
    alone, restored, known = Alone(kind), set(), dict.fromkeys(chats, 0)
    with pooled(kind) as made:
        for question in QUESTIONS[:2]:
            for chat in chats:
                prompt = chat.ask(question)
                done = made.generate(prompt, max_tokens=8)
                assert_same(alone, kind, prompt, done.tokens, most=8)
                assert done.computed <= len(prompt) - known[chat] + 1
                restored.add(done.restored)
                known[chat] = len(prompt) + len(done.tokens)
                chat.answered(done.tokens)
        assert "from_pages" in restored
        assert made.pool.stats().entries == 4
        made.pool.check()


def test_a_dense_model_resumes_at_any_token() -> None:
    words = list(range(100, 300))
    with pooled(DENSE) as made:
        made.generate(words, max_tokens=1)
        for parted in (63, 64, 65, 130, 199):
            done = made.generate([*words[:parted], 7, 8], max_tokens=1)
            assert done.reused == parted


@pytest.mark.parametrize("kind", KINDS[:3])
def test_interleaved_streams_do_not_mix(kind: str) -> None:
    prompts = [Chat(kind, system="Be brief.").ask(question) for question in QUESTIONS[:2]]
    with pooled(kind) as made:
        apart = [made.generate(prompt, max_tokens=8, retain=False).tokens for prompt in prompts]
        streams = [made.stream(prompt, max_tokens=8) for prompt in prompts]
        turns = [[next(stream) for stream in streams] for _ in range(min(map(len, apart)))]
        for stream, tokens, alone in zip(streams, zip(*turns, strict=True), apart, strict=True):
            assert list(tokens) == alone[: len(tokens)]
            stream.close()
        assert made.pool.running == 0


# -- what a request reports, and how it ends -----------------------------------------------------


def test_the_same_prompt_again_computes_nothing(tiny: PooledLlama) -> None:
    words = tiny.llama.tokenize(b"In the beginning God created", add_bos=False)
    prompt = tiny.prompt(words, boundaries=[(len(words), "turn")])
    cold = tiny.generate(prompt, max_tokens=8, sampling=LlamaSampling(temperature=1.0, seed=5))
    warm = tiny.generate(prompt, max_tokens=8, sampling=LlamaSampling(temperature=1.0, seed=5))
    assert (cold.reused, cold.reason, warm.computed, warm.reason) == (0, "no_entry", 0, "hit")
    assert warm.exact
    assert warm.reuse == "restore_turn_checkpoint"
    assert warm.tokens == cold.tokens  # the same bits, so the same draws


def test_a_completion_looks_like_the_librarys_and_reports(tiny: PooledLlama) -> None:
    first = tiny.create_completion("In the beginning", max_tokens=8)
    again = tiny.create_completion("In the beginning", max_tokens=8, stop=[" the"])
    assert first["usage"]["completion_tokens"] == 8
    assert first["choices"][0]["finish_reason"] == "length"
    assert " the" not in again["choices"][0]["text"]
    assert again["pool"]["reused"] == first["usage"]["prompt_tokens"]
    theirs = shared(HYBRID).create_completion("In the beginning", max_tokens=8, temperature=0.0)
    assert first["choices"][0]["text"] == theirs["choices"][0]["text"]


def test_a_cancelled_stream_leaves_what_it_crossed(tiny: PooledLlama) -> None:
    words = list(range(100, 200))
    stream = tiny.stream(words, max_tokens=8)
    next(stream)
    stream.close()
    assert tiny.pool.running == 0
    assert tiny.generate(words, max_tokens=1).computed == 0


def test_nothing_crosses_a_salt(tiny: PooledLlama) -> None:
    words = list(range(100, 200))
    tiny.generate(tiny.prompt(words, salt="a"), max_tokens=1)
    assert tiny.generate(tiny.prompt(words, salt="b"), max_tokens=1).reused == 0
    assert tiny.generate(tiny.prompt(words, salt="a"), max_tokens=1).reused == 100


def test_a_damaged_image_is_quarantined_and_the_prompt_computed(tiny: PooledLlama) -> None:
    words = list(range(100, 200))
    good = tiny.generate(words, max_tokens=4)
    tiny.engine.slab[:] = 0
    again = tiny.generate(words, max_tokens=4)
    assert again.tokens == good.tokens
    assert again.reused == 0
    assert tiny.pool.stats().counters.quarantined >= 1


def test_the_librarys_own_context_is_not_touched(tiny: PooledLlama) -> None:
    alone = Alone(HYBRID)
    words = list(range(100, 160))
    before = alone.greedy(words, most=4, fresh=True)
    with PooledLlama(alone.llama, pool_bytes=32 << 20) as made:
        made.generate(list(range(300, 400)), max_tokens=4)
        assert alone.llama.n_tokens == len(words) + len(before) - 1
        assert made.generate(words, max_tokens=4).tokens == before


# -- bad input -----------------------------------------------------------------------------------


def test_no_lane_is_said_and_changes_nothing(tiny: PooledLlama) -> None:
    streams = [tiny.stream(list(range(100, 110)), max_tokens=4) for _ in range(3)]
    next(streams[0])
    next(streams[1])
    with pytest.raises(ConfigError, match="no_lane"):
        next(streams[2])
    for stream in streams:
        stream.close()


@pytest.mark.parametrize(
    ("asked", "options", "match"),
    [
        ([1, 2, 9999], {}, "ids below"),
        (list(range(100, 1000)), {"max_tokens": 200}, "n_ctx is 1024"),
        ([1, 2], {"max_tokens": 0}, "max_tokens"),
        ([], {}, "tokens: empty"),
        ([1, 2], {"stop": ["a", ""]}, "not empty"),
    ],
)
def test_what_can_never_run_is_refused(
    tiny: PooledLlama, asked: list[int], options: dict[str, Any], match: str
) -> None:
    with pytest.raises(PromptError, match=match):
        tiny.generate(asked, **options)
    assert tiny.pool.stats().counters.acquired == 0


def test_what_is_closed_says_so_and_does_not_crash() -> None:
    with pooled(HYBRID) as closed:
        stream = closed.stream([1, 2, 3], max_tokens=4, stop_tokens=())
        next(stream)
    with pytest.raises(LibraryError, match="closed"):
        next(stream)
    with pytest.raises(ConfigError, match="closed"):
        closed.generate([1, 2, 3])
    closed.pool.check()
    assert not closed.pool.stats().leases


def test_a_prompt_of_another_model_is_refused(tiny: PooledLlama) -> None:
    with pooled(DENSE) as other, pytest.raises(PromptError, match="another model's"):
        tiny.generate(other.prompt([1, 2, 3]))


@pytest.mark.parametrize(
    "options", [{"temperature": -1.0}, {"top_p": 2.0}, {"seed": -1}, {"temperature": float("inf")}]
)
def test_sampling_out_of_range_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        LlamaSampling(**options)
