"""Faults that an adversary found in the runner, each by what went wrong."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ninfer_pool import ConfigError, PromptError
from ninfer_pool.runner.running import Media
from tests.runner.models import random_model
from tests.runner.world import assert_same_bits, make, serve

MODEL = random_model(4, head_dim=64, num_hidden_layers=2, full_attention_interval=2)
TOKENS = [(7 * i) % 198 + 1 for i in range(80)]


@pytest.mark.parametrize("told", [True, False])
def test_rotary_positions_are_those_that_the_prompt_is_known_by(told: bool) -> None:  # noqa: FBT001
    """Else a prompt resumes, as exact, what was computed with other positions."""
    runner = make(MODEL)
    axes = torch.arange(80).expand(3, -1).clone()
    axes[1] += 3
    declared = axes.numpy().astype(np.int32) if told else None
    media = Media() if told else Media(positions=axes)
    with pytest.raises(PromptError, match="positions: other than the prompt's own"):
        runner.start(runner.prompt(TOKENS, positions=declared), media=media)
    assert runner.pool.running == 0


def test_pages_of_another_size_are_refused() -> None:
    """Kernels know pages of 64: the pool's counts would be of other rows."""
    with pytest.raises(ConfigError, match="page_tokens: 32; needs 64"):
        make(MODEL, page_tokens=32)


def test_a_start_that_fails_gives_its_lane_back(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make(MODEL)

    def fails(*_: object) -> None:
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(runner.store, "ids", fails)
        with pytest.raises(RuntimeError, match="device lost"):
            runner.start(runner.prompt(TOKENS))
    assert runner.pool.running == 0
    assert serve(runner, TOKENS, [], steps=2).start == 0


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_int8_pages_take_a_draft_pass_of_no_rows(steps: int) -> None:
    """Near a request's last token fewer drafts are wanted than the window has."""
    runner = make(MODEL, kv_dtype="int8-g64", draft_tokens=3)
    seen = serve(runner, TOKENS, [], steps=steps)
    assert len(seen.generation.tokens) == steps


def test_a_boundary_that_min_chunk_drops_changes_no_bit() -> None:
    """A cold run cut there for its checkpoint; one that resumed past it did not."""
    tokens = [(7 * i) % 198 + 1 for i in range(150)]
    bounds = [(63, "system"), (65, "junction"), (110, "turn"), (150, "turn")]
    runner = make(MODEL, min_chunk=7, grid=2048)
    serve(runner, tokens[:110], [(63, "system"), (110, "turn")], steps=2)
    warm = serve(runner, tokens, bounds, steps=4, exact=True)
    assert warm.start == 110
    assert_same_bits(warm, serve(make(MODEL, min_chunk=7, grid=2048), tokens, bounds, steps=4))
