"""Small random models, made so that their state matters, as folders or loaded.

With the usual initialisation the state forgets within a step and zeroing it changes nothing. Here
decay rates spread over 3e-4 … 0.3 a step, matrices are four times as large as usual, and the
convolution passes its input on at full strength.
"""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ninfer_pool.runner.assemble import DRAFT_LAYER, HEAD, expected_tensors
from ninfer_pool.runner.config import ModelConfig
from ninfer_pool.runner.model import Model

SMALL: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "mtp_num_hidden_layers": 1,
    "eos_token_id": 0,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
}
"""Three linear layers and one of full attention, with a draft head."""

MATRIX_STD = 4 * 0.02
RATES = (3e-4, 0.3)


def small_config(**overrides: object) -> dict[str, Any]:
    """Return `SMALL` with some fields changed; a field of None is left out."""
    values = {**SMALL, **overrides}
    if values["model_type"] == "qwen3_next":
        values["architectures"] = ["Qwen3NextForCausalLM"]
    return {name: value for name, value in values.items() if value is not None}


def random_tensors(config: dict[str, Any], *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return every tensor that a folder of this config holds, fp32."""
    parsed = ModelConfig.parse(config)
    layers = [f"model.layers.{i}." for i in range(len(parsed.layer_types))]
    layers += [DRAFT_LAYER] if parsed.mtp_num_hidden_layers else []
    names = [f"{prefix}mlp.experts.gate_up_proj" for prefix in layers]  # experts lie stacked
    generator = torch.Generator().manual_seed(seed)
    shapes = expected_tensors(parsed, names)
    return {name: _random(name, shape, generator) for name, shape in sorted(shapes.items())}


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if name.endswith("A_log"):
        low, high = (math.log(rate) for rate in RATES)
        return torch.rand(shape, generator=generator) * (high - low) + low
    x = torch.randn(shape, generator=generator)
    if name.endswith("conv1d.weight"):
        return x * 0.5
    if name.endswith("dt_bias"):
        return 1 + x * 0.1
    if len(shape) == 1:  # norms: the gated one's weight is the factor, the others' one less
        return x * 0.1 + name.endswith("linear_attn.norm.weight")
    # Wide enough that logits of different tokens lie apart.
    return x * (0.3 if "embed_tokens" in name or name == HEAD else MATRIX_STD)


def random_folder(
    folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Path:
    """Write a random model's config and weights to ``folder`` and return it."""
    config = small_config(**overrides)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = random_tensors(config, seed=seed)
    save_file({k: v.to(dtype) for k, v in tensors.items()}, folder / "model.safetensors")
    return folder


def random_model(
    seed: int = 0,
    *,
    dtype: str = "fp32",
    device: str | torch.device = "cpu",
    **overrides: Any,
) -> Model:
    """Return a random model, loaded."""
    with tempfile.TemporaryDirectory() as folder:
        return Model.load(
            random_folder(Path(folder), seed=seed, **overrides), device=device, dtype=dtype
        )
