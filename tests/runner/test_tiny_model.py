"""The shipped model is worth running: it has learnt the text, and its draft head foretells it.

Both figures are recomputed from the shipped weights, by the runner that serves them.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from ninfer_pool.runner import TINY, Runner, Tokenizer
from scripts.tiny_training import corpus, counts
from scripts.tiny_training.model import TinyModel

DATA = Path(__file__).parents[1] / "data" / "tiny"
WINDOW, CONTEXT = 1024, 256


@pytest.fixture(scope="module")
def runner() -> Runner:
    """The shipped model with one draft a round, KV in fp32."""
    return Runner.from_pretrained(TINY, kv_dtype="fp32", kv_budget="64MiB", draft_tokens=1)


@pytest.fixture(scope="module")
def tokenizer(runner: Runner) -> Tokenizer:
    return runner.tokenizer


@pytest.fixture(scope="module")
def chapters() -> list[str]:
    return corpus.read(DATA / "heldout.txt.xz").split("\f")


@pytest.mark.slow
def test_held_out_text_takes_at_least_a_quarter_fewer_bits_than_an_order_3_count_model(
    runner: Runner, tokenizer: Tokenizer, chapters: list[str]
) -> None:
    start = tokenizer.encode("<|endoftext|>")
    bits = sum(_bits(runner, [*start, *tokenizer.encode(text)]) for text in chapters)
    bits_per_byte = bits / sum(len(text.encode()) for text in chapters)

    counted = counts.bits_per_byte(
        corpus.read(DATA / "train.txt.xz").encode(), "\f".join(chapters).encode(), order=3
    )

    assert bits_per_byte <= 0.75 * counted, f"{bits_per_byte:.3f} against {counted:.3f}"


@pytest.mark.slow
def test_the_draft_head_foretells_half_of_the_greedy_tokens(
    runner: Runner, tokenizer: Tokenizer, chapters: list[str]
) -> None:
    """Drafts accepted of those proposed, greedy, from held-out prompts."""
    made = [
        runner.generate(runner.prompt(tokenizer.encode(text[:4000])[500:564]), max_tokens=48)
        for text in chapters
    ]
    drafted = sum(each.drafted for each in made)

    assert drafted > 20 * len(chapters)
    assert sum(each.accepted for each in made) / drafted >= 0.5


def test_greedy_output_repeats_itself_and_is_made_of_words(runner: Runner) -> None:
    prompt = runner.prompt("It was a truth universally acknowledged, that ")
    first, second = (runner.generate(prompt, max_tokens=60) for _ in range(2))
    text = runner.tokenizer.decode(first.tokens)

    assert first.tokens == second.tokens
    words = set(corpus.read(DATA / "train.txt.xz").lower().split())
    inner = text.lower().split()[1:-1]  # the first and the last may be cut
    assert sum(word in words for word in inner) >= 0.9 * len(inner) > 10


def test_the_runner_computes_what_training_did(runner: Runner, tokenizer: Tokenizer) -> None:
    config = json.loads((TINY / "config.json").read_text("utf-8"))
    trained = TinyModel(config).eval()
    trained.load_state_dict(safetensors.torch.load_file(TINY / "model.safetensors"))
    tokens = tokenizer.encode("She was a woman of mean understanding, little information, and")
    with torch.no_grad():
        hidden, _ = trained(torch.tensor([tokens]))
        theirs = trained.head(hidden)[0]

    mine = torch.from_numpy(_logits(runner, tokens))

    assert (mine - theirs).norm() <= 1e-4 * theirs.norm()


def test_the_count_model_is_a_distribution() -> None:
    text = b"the cat sat on the mat, the rat sat on the cat. " * 3

    total = sum(_probability(text, b"the" + bytes([symbol])) for symbol in range(256))

    assert total == pytest.approx(1.0)


def _logits(runner: Runner, tokens: list[int]) -> np.ndarray:
    """Return (n, vocabulary), row i over token i + 1."""
    running = runner.start(runner.prompt(tokens), max_tokens=1, read=False, retain=False)
    assert running is not None
    rows: list[torch.Tensor] = []
    while not running.ready:
        runner.prefill(running, look=lambda _, hidden: rows.append(runner.model.logits(hidden)))
    runner.cancel(running)
    return torch.cat(rows).numpy()


def _bits(runner: Runner, tokens: list[int]) -> float:
    """Return the bits of all tokens but the first; later windows read `CONTEXT` tokens before."""
    total = 0.0
    for start in range(0, max(1, len(tokens) - 1 - CONTEXT), WINDOW - CONTEXT):
        row = tokens[start : start + WINDOW + 1]
        logits = _logits(runner, row[:-1]).astype(np.float64)
        top = logits.max(-1, keepdims=True)
        log_total = np.log(np.exp(logits - top).sum(-1)) + top[:, 0]
        losses = log_total - logits[np.arange(len(logits)), row[1:]]
        total += float(losses[0 if start == 0 else CONTEXT :].sum())
    return total / math.log(2)


def _probability(train: bytes, gram: bytes) -> float:
    return float(2.0 ** -counts.bits_per_byte(train, gram, order=3))
