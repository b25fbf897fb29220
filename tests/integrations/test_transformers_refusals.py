"""What cannot be served from a pool is refused, with the reason; and nothing is mistaken for
another model's."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch
from transformers import GenerationConfig

from ninfer_pool import ConfigError, PromptError
from ninfer_pool.integrations.transformers import PooledModel, generate, weights_digest
from ninfer_pool.integrations.transformers.layout import layout_of
from tests.integrations.architectures import REFUSED, fresh, shared

IDS = torch.arange(1, 21)[None]
THREE_BEAMS = GenerationConfig(num_beams=3)  # type: ignore[no-untyped-call]


def pooled(model: Any, **options: Any) -> PooledModel:
    """A small pool for a model."""
    return PooledModel(model, num_pages=80, page_tokens=8, **options)


@pytest.fixture(scope="module")
def served() -> PooledModel:
    """A pool that no test fills."""
    return pooled(shared("qwen3_5"))


# -- at construction -----------------------------------------------------------------------


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_served_is_refused_with_the_reason(name: str) -> None:
    build, reason = REFUSED[name]
    with pytest.raises(ConfigError, match=reason):
        PooledModel(build().eval(), num_pages=80)


def test_a_refusal_says_what_is_supported() -> None:
    with pytest.raises(ConfigError, match="supported: a DynamicCache of full attention"):
        PooledModel(REFUSED["a sliding window"][0]().eval(), num_pages=80)


def test_a_cache_class_that_is_not_known_is_refused() -> None:
    class Cache:
        layers: tuple[Any, ...] = ()

    with pytest.raises(ConfigError, match="cache: a Cache; supported"):
        layout_of(Cache(), page_tokens=8)


def test_state_outside_the_cache_shows_in_the_trial() -> None:
    """A model that counts its own calls: its logits depend on more than the cache tells."""
    model = fresh("llama")
    seen: list[Any] = []

    def remember(_: Any, inputs: Any, output: Any) -> Any:
        seen.append(output)
        return output + sum(past.mean() for past in seen[-2:-1])

    model.model.layers[0].mlp.register_forward_hook(remember)
    with pytest.raises(ConfigError, match="part of its state is elsewhere"):
        pooled(model)


def test_a_forward_that_forgets_the_state_shows_in_the_trial() -> None:
    """Some layers go on from a state with one token only: several tokens start anew."""
    model = fresh("qwen3_5")
    layer, proper = model.model.layers[0].linear_attn, model.model.layers[0].linear_attn.forward

    def forgetful(hidden_states: Any, cache: Any = None, **told: Any) -> Any:
        cache = cache if hidden_states.shape[1] == 1 else None
        return proper(hidden_states, cache=cache, **told)

    layer.forward = forgetful
    with pytest.raises(ConfigError, match=r"part of its state is elsewhere|has no conv state"):
        pooled(model)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "needs one of the two"),
        ({"pool_bytes": 1 << 20, "num_pages": 9}, "needs one of the two"),
        ({"pool_bytes": 100}, "one page takes"),
        ({"pool_bytes": "1 GB"}, "one page takes"),
        ({"num_pages": 1}, "one page and one image need"),
        ({"num_pages": 80, "page_tokens": 0}, "page_tokens: 0"),
        ({"num_pages": 80, "lanes": 0}, "lanes: 0"),
    ],
)
def test_sizes_that_cannot_be(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        PooledModel(shared("qwen3_5"), **options)


def test_bytes_of_the_slab_are_what_was_asked_for() -> None:
    made = PooledModel(shared("qwen3_5"), pool_bytes=100_000, page_tokens=8)
    assert made.engine.slab.numel() == 100_000 // made.pool.config.page_bytes * (
        made.pool.config.page_bytes
    )


def test_adapters_must_be_named() -> None:
    model = fresh("llama")
    model._hf_peft_config_loaded = True
    with pytest.raises(ConfigError, match="name the active one"):
        pooled(model)
    assert pooled(model, adapter="chat-lora").namespace().adapter == "chat-lora"


def test_a_model_in_training_mode_is_refused_at_both_times() -> None:
    model = fresh("llama").train()
    with pytest.raises(ConfigError, match="eval"):
        pooled(model)
    made = pooled(model.eval())
    model.train()
    with pytest.raises(ConfigError, match="eval"):
        made.generate(IDS, max_new_tokens=1)


# -- at a call -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_beams": 2}, "num_beams: 2"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences: 2"),
        ({"generation_config": THREE_BEAMS}, "num_beams: 3"),
        ({"use_cache": False}, "use_cache: False"),
        ({"cache_implementation": "static"}, "the pool brings the cache"),
        ({"prompt_lookup_num_tokens": 3}, "rejected drafts"),
        ({"prefill_chunk_size": 4}, "grid"),
        ({"token_healing": True}, "changes the prompt"),
        ({"cache": object()}, "cache: not an argument"),
        ({"past_key_values": object()}, "past_key_values: not an argument"),
        ({"pixel_values": torch.zeros(1)}, "by token ids alone"),
        ({"inputs_embeds": torch.zeros(1, 2, 32)}, "by token ids alone"),
        ({"position_ids": IDS}, "position_ids: not an argument"),
        ({"assistant_model": object()}, "assistant_model: not an argument"),
        ({"max_new_token": 3}, "max_new_token: not an argument"),
    ],
)
def test_an_option_that_cannot_be_served(
    served: PooledModel, options: dict[str, Any], reason: str
) -> None:
    before = served.pool.stats()
    with pytest.raises(PromptError, match=reason):
        served.generate(IDS, **options)
    assert served.pool.stats() == before


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        (IDS.repeat(2, 1), r"\(2, 20\); needs \(1, n\)"),
        (IDS[0], r"\(20,\); needs \(1, n\)"),
        (IDS[:, :0], r"\(1, 0\)"),
        (IDS.float(), "integer tensor"),
        (IDS.tolist(), "integer tensor"),
        (IDS + 90, "needs ids of 0 to 96"),
        (-IDS, "needs ids of 0 to 96"),
    ],
)
def test_a_prompt_that_is_not_one_sequence(served: PooledModel, ids: Any, reason: str) -> None:
    with pytest.raises(PromptError, match=reason):
        served.generate(ids, max_new_tokens=1)


@pytest.mark.parametrize("mask", [torch.tensor([[0] * 3 + [1] * 17]), torch.ones(1, 5)])
def test_left_padding_is_refused(served: PooledModel, mask: Any) -> None:
    with pytest.raises(PromptError, match="padding cannot be resumed"):
        served.generate(IDS, attention_mask=mask, max_new_tokens=1)


def test_what_the_library_would_mask_is_not_taken_for_text() -> None:
    model = fresh("llama")
    model.generation_config.pad_token_id = 7
    made = pooled(model)
    with pytest.raises(PromptError, match="pad token 7"):
        made.generate(IDS, max_new_tokens=1)
    _, report = made.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=1)
    assert report.prompt_tokens == 20


def test_a_pool_of_another_model_is_refused(served: PooledModel) -> None:
    with pytest.raises(ConfigError, match="of this model"):
        generate(shared("llama"), IDS, pool=served)
    with pytest.raises(ConfigError, match="of this model"):
        generate(shared("llama"), IDS, pool=served.pool)  # type: ignore[arg-type]


# -- identity ------------------------------------------------------------------------------


def test_weights_are_read_once_and_again_when_they_change() -> None:
    model = fresh("falcon_h1")
    first = weights_digest(model)
    assert first.startswith("sha256:")
    assert first == weights_digest(model) == weights_digest(fresh("falcon_h1"))
    assert first != weights_digest(fresh("falcon_h1", seed=4))
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1
    assert weights_digest(model) != first


def test_a_digest_is_not_worked_out_where_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hashlib.sha256", None)
    made = pooled(fresh("llama"), weights="sha256:known")
    assert made.namespace().weights == "sha256:known"


@pytest.mark.parametrize("name", ["llama", "granitemoehybrid"])
def test_changed_weights_share_nothing_with_what_they_were(name: str) -> None:
    model = fresh(name)
    made = pooled(model)
    first, _ = made.generate(IDS, max_new_tokens=3)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.5)
    output, report = made.generate(first, max_new_tokens=3)
    assert (report.reused_tokens, report.reason) == (0, "identity:weights")
    assert torch.equal(output, model.generate(first, max_new_tokens=3))


def test_another_attention_implementation_shares_nothing() -> None:
    model = fresh("llama")
    made = pooled(model)
    first, _ = made.generate(IDS, max_new_tokens=3)
    model.set_attn_implementation("eager")
    _, report = made.generate(first, max_new_tokens=3)
    assert (report.reused_tokens, report.reason) == (0, "identity:kv_dtype")


def test_another_dtype_is_refused_and_not_converted() -> None:
    model = fresh("llama")
    made = pooled(model)
    model.to(torch.bfloat16)
    with pytest.raises(ConfigError, match="a model that was changed needs a pool of its own"):
        made.generate(IDS, max_new_tokens=3)
    assert not made.pool.running


def test_nothing_crosses_a_salt() -> None:
    made = pooled(shared("qwen3_5"))
    made.generate(IDS, max_new_tokens=3, salt="one")
    for salt in (None, "two"):
        _, report = made.generate(IDS, max_new_tokens=3, salt=salt, retain=False)
        assert (report.reused_tokens, report.reason) == (0, "no_entry")
    assert made.generate(IDS, max_new_tokens=3, salt="one").report.reused_tokens == 19
