"""Defaults of a runner's context and dtypes, and the values that it rejects."""

from __future__ import annotations

import torch

from ninfer_pool.errors import ConfigError, ModelError
from ninfer_pool.runner.model import Model


def context_of(model: Model, max_context: int | None) -> int:
    """Return ``max_context`` in tokens; None: the model's own.

    Raises:
        ConfigError: outside of 1 to the model's own.
    """
    most = model.config.max_position_embeddings
    context = most if max_context is None else max_context
    if type(context) is not int or not 1 <= context <= most:
        raise ConfigError(f"max_context: {context!r}; needs an int of 1 to the model's {most}")
    return context


def dtypes_of(device: torch.device, *, dtype: str | None, kv_dtype: str | None) -> tuple[str, str]:
    """Return the names of the model's dtype and of its KV's; None: the device's default.

    Raises:
        ModelError: bf16 on a device without it.
    """
    cpu = device.type == "cpu"
    half = "bf16" if cpu or torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    dtype, kv_dtype = dtype or ("fp32" if cpu else half), kv_dtype or half
    for name, value in (("dtype", dtype), ("kv_dtype", kv_dtype)):
        if value == "bf16" != half:
            raise ModelError(f"{name}: 'bf16'; {device} computes none, needs fp16 or fp32")
    return dtype, kv_dtype
