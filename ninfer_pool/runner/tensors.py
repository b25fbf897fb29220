"""Which tensors a model's folder must hold, under their published names, and of what shape."""

from __future__ import annotations

from collections.abc import Collection

from ninfer_pool.runner.config import Experts, ModelConfig
from ninfer_pool.runner.weights import Shape

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
DRAFT = "mtp."
DRAFT_LAYER = "mtp.layers.0."


def layer_prefix(index: int) -> str:
    """What the names of one layer's tensors begin with."""
    return f"model.layers.{index}."


def expected_tensors(config: ModelConfig, names: Collection[str]) -> dict[str, Shape]:
    """Return the shape of every tensor that a folder with ``names`` must hold.

    The names decide what a config leaves open: whether there is a draft head, and whether
    experts lie one by one or stacked.
    """
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {
        EMBEDDING: (config.vocab_size, hidden),
        FINAL_NORM: (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    for index, kind in enumerate(config.layer_types):
        prefix = layer_prefix(index)
        attention = _linear(config) if kind == "linear_attention" else _full(config)
        inner = {**attention, **_norms(config), **_feed_forward(config, names, prefix, index)}
        shapes |= {prefix + name: shape for name, shape in inner.items()}
    if has_draft_head(names):
        shapes |= _draft(config, names)
    return shapes


def has_draft_head(names: Collection[str]) -> bool:
    """Whether any tensor of a draft head is there; then all of them must be."""
    return any(name.startswith(DRAFT) for name in names)


def _norms(config: ModelConfig) -> dict[str, Shape]:
    shape = (config.hidden_size,)
    return {"input_layernorm.weight": shape, "post_attention_layernorm.weight": shape}


def _full(config: ModelConfig) -> dict[str, Shape]:
    hidden, dim = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    return {
        "self_attn.q_proj.weight": (2 * queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (dim,),
        "self_attn.k_norm.weight": (dim,),
    }


def _linear(config: ModelConfig) -> dict[str, Shape]:
    hidden, heads, values = config.hidden_size, config.linear_num_value_heads, config.value_dim
    channels, width = config.conv_channels, config.linear_conv_kernel_dim
    shapes: dict[str, Shape] = {
        "linear_attn.conv1d.weight": (channels, 1, width),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (config.linear_value_head_dim,),
        "linear_attn.out_proj.weight": (hidden, values),
    }
    if config.model_type == "qwen3_next":
        parts = {"qkvz": channels + values, "ba": 2 * heads}
    else:
        parts = {"qkv": channels, "z": values, "b": heads, "a": heads}
    named = {f"linear_attn.in_proj_{part}.weight": (n, hidden) for part, n in parts.items()}
    return {**shapes, **named}


def _mlp(hidden: int, inner: int, prefix: str) -> dict[str, Shape]:
    return {
        f"{prefix}gate_proj.weight": (inner, hidden),
        f"{prefix}up_proj.weight": (inner, hidden),
        f"{prefix}down_proj.weight": (hidden, inner),
    }


def _feed_forward(
    config: ModelConfig, names: Collection[str], prefix: str, index: int
) -> dict[str, Shape]:
    if config.experts is None or not config.sparse[index]:
        return _mlp(config.hidden_size, config.intermediate_size, "mlp.")
    return _sparse(config.hidden_size, config.experts, f"{prefix}mlp.experts.gate_up_proj" in names)


def _sparse(hidden: int, experts: Experts, stacked: bool) -> dict[str, Shape]:  # noqa: FBT001
    inner, count = experts.intermediate_size, experts.count
    shapes: dict[str, Shape] = {
        "mlp.gate.weight": (count, hidden),
        "mlp.shared_expert_gate.weight": (1, hidden),
        **_mlp(hidden, experts.shared_intermediate_size, "mlp.shared_expert."),
    }
    if stacked:
        shapes["mlp.experts.gate_up_proj"] = (count, 2 * inner, hidden)
        shapes["mlp.experts.down_proj"] = (count, hidden, inner)
    else:
        for expert in range(count):
            shapes |= _mlp(hidden, inner, f"mlp.experts.{expert}.")
    return shapes


def _draft(config: ModelConfig, names: Collection[str]) -> dict[str, Shape]:
    hidden = config.hidden_size
    last = len(config.layer_types)
    inner = {
        **_full(config),
        **_norms(config),
        **_feed_forward(config, names, DRAFT_LAYER, last),
    }
    return {
        "mtp.fc.weight": (hidden, 2 * hidden),
        "mtp.pre_fc_norm_embedding.weight": (hidden,),
        "mtp.pre_fc_norm_hidden.weight": (hidden,),
        "mtp.norm.weight": (hidden,),
        **{DRAFT_LAYER + name: shape for name, shape in inner.items()},
    }
