"""The runner's own rules: failed restores, media, sizes, bad input."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ninfer_pool import ConfigError, ModelError, Prompt, PromptError
from ninfer_pool.core.operations import LoadImage, Operation
from ninfer_pool.runner.capacity import Capacity, pages_for
from ninfer_pool.runner.defaults import dtypes_of
from ninfer_pool.runner.executor import layout_of
from ninfer_pool.runner.media import Media, media_digest
from ninfer_pool.runner.request import Sequence
from ninfer_pool.runner.runner import Runner
from tests.runner.models import random_folder, random_model
from tests.runner.world import Script, assert_same_bits, begin, make, serve

MODEL = random_model(2, head_dim=64)
TOKENS, BOUNDARIES = Script(1, 199).ask()
EIGHTY = [(7 * i) % 198 + 1 for i in range(80)]


def test_a_failed_restore_leaves_the_lane_reset_and_the_entry_quarantined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = make(MODEL)
    cold = serve(runner, TOKENS, BOUNDARIES, steps=5)
    whole = runner.slab._one
    one: list[Operation] = []

    def fails(operation: Operation) -> None:
        if isinstance(operation, LoadImage) and not one:
            one.append(operation)
            runner.slab._working[operation.lane] = 7
            raise RuntimeError("device lost")
        whole(operation)  # type: ignore[arg-type]

    monkeypatch.setattr(runner.slab, "_one", fails)
    again = serve(runner, TOKENS, BOUNDARIES, steps=5, exact=True)
    assert one
    assert again.start < len(TOKENS)  # the next best was resumed, to the bit
    assert_same_bits(again, cold)
    counters = runner.pool.stats().counters
    assert counters.quarantined == 1


def test_a_restore_that_always_fails_ends_cold_or_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make(MODEL)
    serve(runner, TOKENS, BOUNDARIES, steps=5)

    def fails(*_: object) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr("ninfer_pool.kernels.load_image", fails)
    assert serve(runner, TOKENS, BOUNDARIES, steps=5).start == 0
    monkeypatch.setattr(runner.slab, "_one", fails)
    with pytest.raises(RuntimeError, match="device lost"):
        runner.start(runner.prompt([5, 6, 7]))
    assert runner.pool.running == 0


def test_an_image_that_cannot_be_written_is_never_offered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("device lost")

    for chunks in (1, 2, 3):  # the system's, the turn's, the frontier's
        runner = make(MODEL)
        running, _ = begin(runner, TOKENS, BOUNDARIES, max_tokens=2)
        for _ in range(chunks - 1):
            runner.prefill(running)
        with monkeypatch.context() as patch:
            patch.setattr("ninfer_pool.kernels.save_image", fails)
            with pytest.raises(RuntimeError, match="device lost"):
                _to_the_end(runner, running)
        runner.cancel(running)
        assert runner.running == []
        assert runner.pool.lookup(runner.prompt(TOKENS, boundaries=BOUNDARIES)) == []
        assert runner.pool.running == 0
        runner.pool.check()


def _to_the_end(runner: Runner, running: Sequence) -> None:
    while not running.ready:
        runner.prefill(running)
    while running.finish is None:
        runner.decode([running])
    runner.finish(running)


def pictured(seed: int = 0) -> tuple[list[int], Media, dict[str, Any]]:
    """A prompt of text, one image of 12 rows on three axes, and text."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(12, 64, generator=generator)
    tokens = [(7 * i) % 198 + 1 for i in range(30)] + [0] * 12 + [9, 8, 7, 6, 5]
    axes = torch.arange(47).expand(3, -1).clone()
    axes[:, 30:42] = 30
    axes[1, 30:42] += torch.arange(12) // 4
    axes[2, 30:42] += torch.arange(12) % 4
    axes[:, 42:] = torch.arange(34, 39)
    parts = {
        "media": [(30, 42, media_digest(embeddings))],
        "positions": axes.numpy().astype(np.int32),
        "boundaries": [(30, "system"), (47, "turn")],
    }
    return tokens, Media(embeddings=[embeddings], positions=axes), parts


def answer(runner: Runner, tokens: list[int], media: Media, parts: dict[str, Any]) -> Any:
    return runner.generate(
        runner.prompt(tokens, **parts), media=media, max_tokens=12, stop_tokens=()
    )


def test_media_resume_to_the_bit_and_another_picture_does_not_hit() -> None:
    runner = make(MODEL)
    tokens, media, parts = pictured()
    cold = answer(runner, tokens, media, parts)
    warm = answer(runner, tokens, media, parts)
    assert (warm.reused, warm.exact, warm.tokens) == (47, True, cold.tokens)
    other = answer(runner, *pictured(1))
    assert other.reused == 30
    assert other.tokens == answer(make(MODEL), *pictured(1)).tokens
    assert other.tokens != cold.tokens


def test_embeddings_must_be_those_declared() -> None:
    runner = make(MODEL)
    tokens, media, parts = pictured()
    prompt = runner.prompt(tokens, **parts)
    for wrong, says in (
        (Media(positions=media.positions), "0 embeddings; the prompt has 1"),
        (pictured(1)[1], r"media\[0\].digest"),
        (Media(embeddings=media.embeddings, positions=torch.zeros(3, 5)), "positions: "),
    ):
        with pytest.raises(PromptError, match=says):
            runner.start(prompt, media=wrong)
    bare = runner.prompt(tokens, **{**parts, "media": [(30, 42, None)]})
    for bad in (torch.zeros(11, 64), torch.zeros(12, 64, dtype=torch.float16)):
        with pytest.raises(PromptError, match=r"media\[0\]: embeddings .* needs \(12, 64\)"):
            runner.start(bare, media=Media(embeddings=[bad]))


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"draft_tokens": 6}, ModelError, "draft_tokens: 6; needs an int of 0 to 5"),
        ({"kv_dtype": "fp8"}, ConfigError, "kv_dtype: 'fp8'"),
        ({"lanes": 9}, ConfigError, "lanes: 9; needs 1 to 8"),
        ({"max_context": 5000}, ConfigError, "max_context: 5000"),
        ({"kv_budget": "16KiB"}, ConfigError, "kv_budget: 16 KiB; one lane and one saved state"),
        ({"kv_budget": "4Gib"}, ConfigError, "kv_budget: '4Gib'"),
        ({"dtype": "int4"}, ModelError, "dtype: 'int4'"),
    ],
)
def test_what_cannot_work_is_one_clear_error(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    folder = random_folder(tmp_path / "model", head_dim=64)
    with pytest.raises(error, match=says):
        Runner.from_pretrained(folder, **options)


def test_a_card_without_bf16_takes_fp16_and_refuses_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """There no kernel for bf16 compiles, of weights or of KV."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    card = torch.device("cuda")
    assert dtypes_of(card, dtype=None, kv_dtype=None) == ("fp16", "fp16")
    assert dtypes_of(card, dtype="fp32", kv_dtype="int8-g64") == ("fp32", "int8-g64")
    for name in ("dtype", "kv_dtype"):
        asked: dict[str, Any] = {"dtype": None, "kv_dtype": None, name: "bf16"}
        with pytest.raises(ModelError, match=f"^{name}: 'bf16'; cuda computes none, needs fp16"):
            dtypes_of(card, **asked)
    assert dtypes_of(torch.device("cpu"), dtype=None, kv_dtype=None) == ("fp32", "bf16")


def test_drafts_need_a_head(tmp_path: Path) -> None:
    folder = random_folder(tmp_path / "model", mtp_num_hidden_layers=0)
    with pytest.raises(ModelError, match="no draft head, needs 0"):
        Runner.from_pretrained(folder, draft_tokens=2)


def test_int8_groups_need_heads_that_they_fit() -> None:
    with pytest.raises(ConfigError, match="head_dim 32; needs a multiple of 64"):
        make(random_model(2), kv_dtype="int8-g64")


@pytest.mark.parametrize(
    ("tokens", "options", "says"),
    [
        ([5] * 4000, {"max_tokens": 200}, "the context is 4096"),
        ([5, 199], {}, "id 199; needs ids below 199"),
        ([5], {"max_tokens": 0}, "max_tokens: 0"),
    ],
)
def test_a_request_that_can_never_run_is_refused(
    tokens: list[int], options: dict[str, Any], says: str
) -> None:
    runner = make(MODEL)
    with pytest.raises(PromptError, match=says):
        runner.start(runner.prompt(tokens), **options)
    assert runner.pool.running == 0


def test_a_prompt_of_another_model_is_refused_and_a_salted_one_is_not() -> None:
    runner = make(MODEL)
    space = dataclasses.replace(runner.namespace, weights="sha256:other")
    with pytest.raises(PromptError, match=r"namespace\.weights: 'sha256:other'; this runner's is"):
        runner.start(Prompt([5, 6], namespace=space))
    salted = runner.prompt(TOKENS, salt="tenant")
    assert runner.generate(salted, max_tokens=2).reused == 0
    assert runner.generate(salted, max_tokens=2).reused == len(TOKENS)
    assert runner.generate(runner.prompt(TOKENS), max_tokens=2).reused == 0


def test_no_room_is_none_and_changes_nothing() -> None:
    runner = make(MODEL, num_pages=30, lanes=2)
    first = runner.start(runner.prompt([5] * 900), max_tokens=16)
    assert first is not None
    assert runner.start(runner.prompt([6] * 900), max_tokens=16) is None
    assert runner.pool.last_refusal is not None
    with pytest.raises(ConfigError, match="no room"):
        runner.generate(runner.prompt([6] * 900), max_tokens=16)
    with pytest.raises(PromptError, match="take 32 pages; the slab has 30"):
        runner.start(runner.prompt([6] * 2000), max_tokens=16)
    runner.pool.check()


def test_capacity_is_what_fits() -> None:
    layout = layout_of(MODEL, kv_dtype="int8-g64", draft_tokens=2)
    # two layers of K and V, 2 heads of 64 INT8 elements and one fp16 scale, 64 positions
    assert layout.page_bytes == 2 * 2 * 64 * 2 * (64 + 2)
    assert pages_for(layout, "1MiB", device=torch.device("cpu")) == (1 << 20) // layout.page_bytes
    capacity = Capacity.of(layout, 1000)
    assert capacity.tokens == 64_000
    assert "64,000 tokens of KV" in str(capacity)
    assert pages_for(layout, None, device=torch.device("cpu")) > 0


def test_lanes_take_turns_and_two_requests_run_at_once() -> None:
    runner = make(MODEL, lanes=2)
    first, _ = begin(runner, TOKENS, BOUNDARIES, max_tokens=20)
    second, _ = begin(runner, TOKENS[:40], [], max_tokens=20)
    assert runner.start(runner.prompt([5, 6])) is None
    for each in (first, second):
        while not each.ready:
            runner.prefill(each)
    while not first.finish:
        runner.decode([first, second])
    results = [each.output() for each in (first, second) if runner.finish(each) is not None]
    alone = serve(make(MODEL, lanes=2), TOKENS, BOUNDARIES, steps=20)
    assert results[0].tokens == alone.generation.tokens
    assert runner.running == []


@pytest.mark.parametrize("told", [True, False])
def test_rotary_positions_are_those_that_the_prompt_is_known_by(told: bool) -> None:  # noqa: FBT001
    """Else a prompt resumes, as exact, what was computed with other positions."""
    runner = make(MODEL)
    axes = torch.arange(80).expand(3, -1).clone()
    axes[1] += 3
    declared = axes.numpy().astype(np.int32) if told else None
    media = Media() if told else Media(positions=axes)
    with pytest.raises(PromptError, match="positions: other than the prompt's own"):
        runner.start(runner.prompt(EIGHTY, positions=declared), media=media)
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
        patch.setattr(runner.slab, "ids", fails)
        with pytest.raises(RuntimeError, match="device lost"):
            runner.start(runner.prompt(EIGHTY))
    assert runner.pool.running == 0
    assert serve(runner, EIGHTY, [], steps=2).start == 0
