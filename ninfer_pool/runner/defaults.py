"""What a runner takes where nothing is said, and what it refuses."""

from __future__ import annotations

import torch

from ninfer_pool.errors import ConfigError, ModelError
from ninfer_pool.runner.model import Model


def context_of(model: Model, asked: int | None) -> int:
    """Return the context window asked for; None: the model's own."""
    most = model.config.max_position_embeddings
    if asked is None:
        return most
    if type(asked) is not int or not 1 <= asked <= most:
        raise ConfigError(f"max_context: {asked!r}; needs an int of 1 to the model's {most}")
    return asked


def dtypes_of(device: torch.device, *, dtype: str | None, kv_dtype: str | None) -> tuple[str, str]:
    """Return the model's dtype and its KV's, where None what suits the device."""
    cpu = device.type == "cpu"
    half = "bf16" if cpu or torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    dtype, kv_dtype = dtype or ("fp32" if cpu else half), kv_dtype or half
    for name, value in (("dtype", dtype), ("kv_dtype", kv_dtype)):
        if value == "bf16" != half:
            raise ModelError(f"{name}: 'bf16'; {device} computes none, needs fp16 or fp32")
    return dtype, kv_dtype
