"""The proof kit on each architecture: the library's models keep every rule of an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("hypothesis")

from ninfer_pool.integrations.transformers import PooledModel, TransformersEngine
from ninfer_pool.testing.conformance import conformance
from tests.integrations.architectures import shared

EXAMPLES = 3


def makes(name: str, *, seed: int = 3) -> Callable[..., TransformersEngine]:
    """A factory of engines of one model, each with pages and lanes of its own."""
    like = PooledModel(shared(name, seed=seed), num_pages=64, page_tokens=8, grid=16).engine

    def make(*, num_pages: int = 64, lanes: int = 1) -> TransformersEngine:
        config = like.config.replace(num_pages=num_pages, lanes=lanes)
        return TransformersEngine(
            like.model, config=config, layout=like.layout, namespace=like.namespace
        )

    return make


def proven(name: str) -> Any:
    """The kit's tests for one architecture; other weights must share nothing with it."""
    return conformance(makes(name), examples=EXAMPLES, others=[makes(name, seed=4)])


TestLlama = proven("llama")
TestQwen3 = pytest.mark.slow(proven("qwen3"))
TestQwen35 = proven("qwen3_5")
TestQwen3Next = proven("qwen3_next")
TestFalconH1 = proven("falcon_h1")
TestBamba = pytest.mark.slow(proven("bamba"))
TestGranite = proven("granitemoehybrid")
