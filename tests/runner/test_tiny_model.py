"""The shipped model is worth running: it has learnt the text, and its draft head foretells it.

Both figures are recomputed from the shipped weights. The model is seen through two functions only,
`Scorer`, so the same tests can ask any implementation of the forward pass.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest

from scripts.tiny_training import corpus, counts

torch = pytest.importorskip("torch")
tokenizers = pytest.importorskip("tokenizers")
safetensors_torch = pytest.importorskip("safetensors.torch")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "ninfer_pool" / "runner" / "tiny"
DATA = ROOT / "tests" / "data" / "tiny"
WINDOW, CONTEXT = 1024, 256


class Scorer(Protocol):
    """What the tests need of a model."""

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Return (n, vocabulary): row i is over token i + 1."""

    def draft_logits(self, tokens: list[int]) -> np.ndarray:
        """Return (n - 1, vocabulary): row i is draft slot i + 1, over token i + 2."""


class TrainingForward:
    """The shipped weights in the training script's own forward pass, in fp32."""

    def __init__(self, folder: Path) -> None:
        from scripts.tiny_training.model import TinyModel

        config = json.loads((folder / "config.json").read_text("utf-8"))
        self._model = TinyModel(config).eval()
        weights = safetensors_torch.load_file(folder / "model.safetensors")
        self._model.load_state_dict(weights)

    def logits(self, tokens: list[int]) -> np.ndarray:
        return self._run(tokens)[0]

    def draft_logits(self, tokens: list[int]) -> np.ndarray:
        return self._run(tokens)[1]

    def _run(self, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
        with torch.no_grad():
            hidden, draft = self._model(torch.tensor([tokens]))
            return self._model.head(hidden)[0].numpy(), self._model.head(draft)[0].numpy()


@pytest.fixture(scope="module")
def scorer() -> Scorer:
    torch.set_num_threads(1)
    return TrainingForward(FOLDER)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def chapters() -> list[str]:
    return corpus.read(DATA / "heldout.txt.xz").split("\f")


@pytest.mark.slow
def test_held_out_text_takes_at_least_a_quarter_fewer_bits_than_an_order_3_count_model(
    scorer: Scorer, tokenizer: Any, chapters: list[str]
) -> None:
    start = tokenizer.token_to_id("<|endoftext|>")
    bits = sum(_bits(scorer, [start, *tokenizer.encode(text).ids]) for text in chapters)
    bits_per_byte = bits / sum(len(text.encode()) for text in chapters)

    counted = counts.bits_per_byte(
        corpus.read(DATA / "train.txt.xz").encode(), "\f".join(chapters).encode(), order=3
    )

    assert bits_per_byte <= 0.75 * counted, f"{bits_per_byte:.3f} against {counted:.3f}"


@pytest.mark.slow
def test_the_draft_head_foretells_half_of_the_greedy_tokens(
    scorer: Scorer, tokenizer: Any, chapters: list[str]
) -> None:
    foretold = [
        agreed
        for text in chapters
        for agreed in _foretold(scorer, tokenizer.encode(text[:4000]).ids[500:564], new_tokens=32)
    ]

    assert len(foretold) == len(chapters) * 31
    assert np.mean(foretold) >= 0.5


def test_the_count_model_is_a_distribution() -> None:
    text = b"the cat sat on the mat, the rat sat on the cat. " * 3

    total = sum(_probability(text, b"the" + bytes([symbol])) for symbol in range(256))

    assert total == pytest.approx(1.0)


def _bits(scorer: Scorer, tokens: list[int]) -> float:
    """Return the bits of all tokens but the first; later windows read `CONTEXT` tokens before."""
    total = 0.0
    for start in range(0, max(1, len(tokens) - 1 - CONTEXT), WINDOW - CONTEXT):
        row = tokens[start : start + WINDOW + 1]
        logits = scorer.logits(row[:-1]).astype(np.float64)
        top = logits.max(-1, keepdims=True)
        log_total = np.log(np.exp(logits - top).sum(-1)) + top[:, 0]
        losses = log_total - logits[np.arange(len(logits)), row[1:]]
        total += float(losses[0 if start == 0 else CONTEXT :].sum())
    return total / math.log(2)


def _foretold(scorer: Scorer, prompt: list[int], *, new_tokens: int) -> list[bool]:
    """Return, for each generated token but the first, whether depth 1 of the draft was right."""
    tokens = list(prompt)
    for _ in range(new_tokens):
        tokens.append(int(scorer.logits(tokens)[-1].argmax()))
    guesses = scorer.draft_logits(tokens[:-1]).argmax(-1)  # of tokens 2 ... n - 1
    first = len(prompt) + 1  # the first that a draft can be used for
    return [bool(guesses[at - 2] == tokens[at]) for at in range(first, len(tokens))]


def _probability(train: bytes, gram: bytes) -> float:
    return float(2.0 ** -counts.bits_per_byte(train, gram, order=3))
