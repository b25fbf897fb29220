"""llama.cpp's state taken apart and put together, and the proof kit on the engine."""

from __future__ import annotations

import json
import os
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

if not os.environ.get("NINFER_POOL_LLAMA"):
    pytest.importorskip("llama_cpp", reason="scripts/test --llama compiles llama-cpp-python")

from ninfer_pool.errors import ConfigError, ModelError
from ninfer_pool.integrations.llama_cpp import LibraryError, LlamaEngine, namespace_of
from ninfer_pool.integrations.llama_cpp.convert import convert
from ninfer_pool.integrations.llama_cpp.layout import StateError, StateLayout
from ninfer_pool.integrations.llama_cpp.sequences import Sequences
from ninfer_pool.testing.adapter import refuse
from ninfer_pool.testing.conformance import conformance
from tests.integrations.llama_models import DENSE, F32, FALCON, HYBRID, LLAMA, Q8_0, load, shared

PAGE = 64
KV: dict[str, dict[str, Any]] = {
    "f16": {},
    "f16, flash": {"flash_attn": True},
    "f32": {"type_k": F32, "type_v": F32},
    "q8_0, flash": {"type_k": Q8_0, "type_v": Q8_0, "flash_attn": True},
}


@lru_cache(maxsize=4)
def page_bytes(kind: str) -> int:
    """Bytes of one of the model's pages, as an engine says."""
    return LlamaEngine(shared(kind), pool_bytes=64 << 20, n_ctx=PAGE).config.page_bytes


def made(kind: str, *, num_pages: int = 64, **options: Any) -> LlamaEngine:
    """An engine over the shared model with as many pages."""
    pool_bytes = num_pages * page_bytes(kind)
    return LlamaEngine(shared(kind), pool_bytes=pool_bytes, n_ctx=640, **options)


def proven(kind: str, *, other: str) -> Any:
    """The kit's tests for one model, which must share nothing with another."""
    return conformance(partial(made, kind), examples=8, others=[partial(made, other)])


TestQwen35 = proven(HYBRID, other=FALCON)
TestFalconH1 = proven(FALCON, other=LLAMA)
TestLlama = proven(LLAMA, other=HYBRID)


# -- the same bits, however a lane is brought back ------------------------------------------------


class Run:
    """One prompt's pages and image in an engine, and the logits that a cold run gave after it."""

    def __init__(self, engine: LlamaEngine, *, end: int) -> None:
        self.engine, self.end = engine, end
        words = np.random.default_rng(end).integers(9, 2000, end + 40)
        self.words = words.astype(np.int32)
        self.table = np.arange(10, dtype=np.int32)
        self.image = tuple(range(10, 10 + engine.config.image_pages))
        engine.reset(0)
        engine.prefill(self.words[:end], lane=0, begin=0, table=self.table)
        if self.image:
            engine.save_image(0, self.image)
        self.cold = self.go_on(0, self.table)

    def go_on(self, lane: int, table: npt.NDArray[np.int32]) -> list[bytes]:
        """Compute the rest and decode a token; return both logits."""
        more = self.engine.prefill(self.words[self.end :], lane=lane, begin=self.end, table=table)
        last = self.engine.decode(7, lane=lane, begin=self.end + 40, table=table)
        return [more.tobytes(), last.tobytes()]

    def again(self, lane: int) -> list[bytes]:
        """Resume in a lane, with pages of its own from the last one on."""
        whole = self.end // PAGE
        table = self.table.copy()
        table[whole:] = np.arange(20 + 10 * lane, 30 + 10 * lane)[whole:]
        self.engine.copy_page(int(self.table[whole]), int(table[whole]))
        if self.image:
            self.engine.load_image(lane, self.image)
        return self.go_on(lane, table)


@pytest.mark.parametrize("end", [1, 63, 64, 65, 128, 200])
@pytest.mark.parametrize("kv", KV)
def test_a_resumed_lane_computes_the_bits_of_a_cold_run(kv: str, end: int) -> None:
    """From another lane, in place, and from pages; at page edges; whatever the KV types."""
    engine = LlamaEngine(load(HYBRID, **KV[kv]), pool_bytes=16 << 20, lanes=3, n_ctx=512)
    run = Run(engine, end=end)
    assert run.again(1) == run.cold
    assert engine.restored(1) == "from_lane"
    assert run.again(0) == run.cold
    assert engine.restored(0) == "in_place"
    for lane in range(3):
        engine.reset(lane)
        engine.prefill(run.words[:1], lane=lane, begin=0, table=run.table[9:])
    assert run.again(2) == run.cold
    assert engine.restored(2) == "from_pages"
    engine.close()


def test_a_dense_lane_goes_back_and_on() -> None:
    engine = made(DENSE, num_pages=60, lanes=3)
    run = Run(engine, end=100)
    assert [run.again(lane) for lane in (1, 0, 2)] == [run.cold] * 3
    engine.close()


def test_drafts_are_taken_back_by_the_last_image() -> None:
    engine = made(HYBRID)
    run = Run(engine, end=70)
    engine.load_image(0, run.image)
    one = engine.decode(5, lane=0, begin=70, table=run.table)
    for at in (71, 72):
        engine.decode(9, lane=0, begin=at, table=run.table)
    engine.roll_back(0, 71)
    assert np.array_equal(engine.tail_logits(0), one)
    with pytest.raises(LibraryError, match="before its image"):
        engine.roll_back(0, 69)
    engine.close()


def test_a_copy_that_the_library_put_off_is_not_overtaken() -> None:
    sequences = Sequences(shared(HYBRID), lanes=2, n_ctx=128)
    sequences.decode(0, [5, 6, 7], 0)
    state = sequences.take(0)
    sequences.copy(0, 1)
    with pytest.raises(LibraryError, match="a copy of it is pending"):
        sequences.put(0, state)
    sequences.decode(1, [8], 3)
    sequences.put(0, state)
    sequences.close()


def test_what_a_lane_forgot_is_not_taken_for_what_it_held() -> None:
    """A page's version stands for rows that were cut off since: those come from pages."""
    engine = made(HYBRID)
    run = Run(engine, end=100)
    engine.load_image(0, run.image)
    engine.compute(run.words[:5], lane=0, begin=100, table=run.table)  # not written to pages
    assert run.again(0) == run.cold
    engine.close()


# -- identity ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"type_k": Q8_0}, "kv_dtype"),
        ({"flash_attn": True}, "kv_dtype"),
        ({"n_ubatch": 32}, "kv_dtype"),
        ({"rope_freq_base": 5e5}, "rope"),
        ({"kv_overrides": {"qwen35.rope.freq_base": 5e5}}, "rope"),
    ],
)
def test_what_changes_the_computation_is_in_the_namespace(
    changes: dict[str, Any], field: str
) -> None:
    engine = made(HYBRID)
    other = LlamaEngine(load(HYBRID, **changes), pool_bytes=1 << 20, n_ctx=512)
    assert engine.namespace.first_difference(other.namespace) == field
    longer = LlamaEngine(shared(HYBRID), pool_bytes=1 << 20, n_ctx=1024)
    assert engine.namespace.first_difference(longer.namespace) == "rope"
    assert engine.namespace.first_difference(made(LLAMA).namespace) == "weights"
    assert engine.namespace.first_difference(made(HYBRID).namespace) is None


def test_every_file_of_a_split_model_counts(tmp_path: Path) -> None:
    llama = SimpleNamespace(context_params=shared(HYBRID).context_params, kv_overrides=None)
    seen = set()
    for text in ("a", "b"):
        for number, content in ((1, "x"), (2, text)):
            name = f"model-{number:05d}-of-00002.gguf"
            (tmp_path / text).mkdir(exist_ok=True)
            (tmp_path / text / name).write_text(content, encoding="utf-8")
        llama.model_path = str(tmp_path / text / "model-00001-of-00002.gguf")
        seen.add(namespace_of(llama, n_ctx=512).weights)
    assert len(seen) == 2
    (tmp_path / "b" / "model-00002-of-00002.gguf").unlink()
    with pytest.raises(ConfigError, match="model_path"):
        namespace_of(llama, n_ctx=512)


# -- refused at construction -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"pool_bytes": 10}, "pool_bytes: 10"),
        ({"pool_bytes": 1 << 20, "lanes": 0}, "lanes: 0"),
        ({"pool_bytes": 1 << 20, "n_ctx": 8}, "n_ctx: 8"),
        ({"pool_bytes": 1 << 20, "grid": 4096}, "grid: 4096"),
        ({"pool_bytes": 70_000}, "num_pages: 1"),
        ({"pool_bytes": 1 << 20, "policy": "?"}, "policy"),
    ],
)
def test_sizes_that_cannot_be_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        LlamaEngine(shared(HYBRID), **options)


def test_a_model_that_embeds_is_refused() -> None:
    with pytest.raises(ConfigError, match="embedding=True"):
        LlamaEngine(load(HYBRID, embedding=True), pool_bytes=1 << 20)


def test_a_sliding_window_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama_cpp.llama_model_n_swa", lambda _: 1024)
    with pytest.raises(ConfigError, match="sliding-window attention; needs"):
        LlamaEngine(shared(HYBRID), pool_bytes=1 << 20)


def test_a_library_without_partial_states_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("llama_cpp.llama_state_seq_get_data_ext")
    with pytest.raises(ConfigError, match="has no llama_state_seq_get_data_ext"):
        LlamaEngine(shared(HYBRID), pool_bytes=1 << 20)


def test_a_state_in_another_form_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Sequences.take
    monkeypatch.setattr(Sequences, "take", lambda *args: np.roll(take(*args), 4))
    with pytest.raises(StateError, match="in an unknown form"):
        LlamaEngine(shared(HYBRID), pool_bytes=1 << 20)


@pytest.mark.parametrize("cut", [0, 1, 8, 40, 100])
def test_a_torn_state_is_refused(cut: int) -> None:
    sequences = Sequences(shared(HYBRID), lanes=2, n_ctx=128)
    sequences.decode(1, [5, 6, 7], 0)
    state = sequences.take(1)
    tail = sequences.take(1, 1).size - 8
    assert StateLayout.read(state, count=3, tail=tail).page_bytes == page_bytes(HYBRID)
    with pytest.raises(StateError):
        StateLayout.read(state[: cut or -1], count=3, tail=tail)
    with pytest.raises(StateError):
        StateLayout.read(state, count=4, tail=tail)
    sequences.close()


@pytest.mark.parametrize("kind", [HYBRID, DENSE, FALCON, LLAMA])
def test_the_engine_passes_the_kits_trial(kind: str) -> None:
    refuse(made(kind))


@pytest.mark.parametrize(
    ("changes", "match"),
    [({"model_type": "llama"}, "model_type: 'llama'"), ({"model_type": None}, "model_type: None")],
)
def test_another_architecture_is_not_converted(
    tmp_path: Path, changes: dict[str, Any], match: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(changes), encoding="utf-8")
    with pytest.raises(ModelError, match=match):
        convert(tmp_path, tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()
