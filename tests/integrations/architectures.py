"""Small models of the library with random weights: one of each kind that is served, and others."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import transformers as hf

torch.set_num_threads(1)  # more are not faster on models of this size
VOCABULARY = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
DELTA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 16}
MAMBA: dict[str, Any] = {
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
}


def _llama() -> Any:
    return hf.LlamaForCausalLM(hf.LlamaConfig(num_hidden_layers=2, head_dim=8, **SIZES))


def _qwen3() -> Any:
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(num_hidden_layers=2, head_dim=8, **SIZES))


def _qwen3_5() -> Any:
    return hf.Qwen3_5ForCausalLM(hf.Qwen3_5TextConfig(**DELTA, **SIZES))


def _qwen3_next() -> Any:
    config = hf.Qwen3NextConfig(**DELTA, **EXPERTS, shared_expert_intermediate_size=16, **SIZES)
    return hf.Qwen3NextForCausalLM(config)


def _falcon_h1() -> Any:
    config = hf.FalconH1Config(
        num_hidden_layers=2, mamba_d_ssm=32, mamba_n_heads=4, **MAMBA, **SIZES
    )
    return hf.FalconH1ForCausalLM(config)


def _bamba() -> Any:
    config = hf.BambaConfig(
        num_hidden_layers=2, attn_layer_indices=[1], mamba_n_heads=8, **MAMBA, **SIZES
    )
    return hf.BambaForCausalLM(config)


def _granite() -> Any:
    config = hf.GraniteMoeHybridConfig(
        num_hidden_layers=3,
        layer_types=["mamba", "attention", "mamba"],
        mamba_n_heads=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=16,
        **MAMBA,
        **SIZES,
    )
    return hf.GraniteMoeHybridForCausalLM(config)


BUILDERS: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "qwen3_5": _qwen3_5,
    "qwen3_next": _qwen3_next,
    "falcon_h1": _falcon_h1,
    "bamba": _bamba,
    "granitemoehybrid": _granite,
}
PLAIN = ("llama", "qwen3")
HYBRID = tuple(name for name in BUILDERS if name not in PLAIN)


def fresh(name: str, *, seed: int = 3) -> Any:
    """A model of its own, in eval mode and fp32."""
    torch.manual_seed(seed)
    return BUILDERS[name]().eval()


@cache
def shared(name: str, *, seed: int = 3) -> Any:
    """The same model for every test that leaves it as it is."""
    return fresh(name, seed=seed)


def _mistral() -> Any:
    return hf.MistralForCausalLM(hf.MistralConfig(num_hidden_layers=2, sliding_window=8, **SIZES))


def _mamba() -> Any:
    return hf.MambaForCausalLM(
        hf.MambaConfig(num_hidden_layers=2, hidden_size=16, vocab_size=VOCABULARY, state_size=4)
    )


def _t5() -> Any:
    config = hf.T5Config(
        num_layers=1, d_model=16, d_kv=8, d_ff=16, num_heads=2, vocab_size=VOCABULARY
    )
    return hf.T5ForConditionalGeneration(config)


def _longrope() -> Any:
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    config = hf.LlamaConfig(num_hidden_layers=1, rope_parameters=scaled, **SIZES)
    return hf.LlamaForCausalLM(config)


def _rwkv() -> Any:
    config = hf.RwkvConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, attention_hidden_size=16
    )
    return hf.RwkvForCausalLM(config)


def _bert() -> Any:
    config = hf.BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    return hf.BertModel(config)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a sliding window": (_mistral, "drops what leaves its window of 8 positions"),
    "no attention at all": (_mamba, "no layer has keys and values|LinearAttention"),
    "encoder and decoder": (_t5, "encoder-decoder"),
    "a rope that grows": (_longrope, "unequal KV"),
    "a cache of its own": (_rwkv, "no state comes out|cache class of its own"),
    "no language model": (_bert, "needs a causal PreTrainedModel"),
    "no model": (lambda: torch.nn.Linear(2, 2), "needs a causal PreTrainedModel"),
}
"""Models that cannot be served, and what the refusal says."""
