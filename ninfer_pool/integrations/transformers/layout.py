"""The tensors of a cache object of the library, as bytes of pages and images."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import cache_utils as library

from ninfer_pool.errors import ConfigError

ALIGN = 16
"""Bytes that every tensor inside a page or an image is aligned to."""

WITH_KV = (library.DynamicLayer, library.LinearAttentionAndFullAttentionLayer)
WITH_STATE = (library.LinearAttentionLayer, library.LinearAttentionAndFullAttentionLayer)
WITH_NOTHING = (library.DummyLayer,)
WITH_WINDOW = (
    library.DynamicSlidingWindowLayer,
    library.LinearAttentionAndSlidingWindowAttentionLayer,
)
SUPPORTED = (
    "supported: a DynamicCache of full attention, linear attention (Gated DeltaNet, Mamba, "
    "short convolutions) and layers that have both, with attention in at least one layer"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTensor:
    """A layer's tensor in a row of bytes: its first byte, dtype, shape, and the layer's device."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device

    @property
    def end(self) -> int:
        """The first byte after it."""
        return self.offset + math.prod(self.shape) * self.dtype.itemsize

    def view(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the tensor of each of ``rows``, uint8 (n, bytes), as (n, *shape), not copied."""
        typed = rows[:, self.offset : self.end].view(self.dtype)
        return torch.unflatten(typed, 1, self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyValues:
    """Keys and values of one layer in a page, each (heads, page_tokens, width)."""

    layer: int
    keys: LayerTensor
    values: LayerTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """One per-sequence tensor of one layer in an image, as the layer has it: (1, …)."""

    layer: int
    index: int
    kind: str
    """``conv`` or ``recurrent``."""
    region: LayerTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """The places of a cache's tensors in pages and images."""

    page_tokens: int
    page: tuple[KeyValues, ...]
    page_bytes: int
    image: tuple[StateTensor, ...]
    image_bytes: int
    """0 where every layer is plain attention."""


class _Packer:
    """Hands out regions one after the other."""

    def __init__(self) -> None:
        self.end = 0

    def take(self, tensor: torch.Tensor, *shape: int) -> LayerTensor:
        place = LayerTensor(offset=self.end, dtype=tensor.dtype, shape=shape, device=tensor.device)
        self.end = -(-place.end // ALIGN) * ALIGN
        return place


def layout_of(cache: Any, *, page_tokens: int) -> CacheLayout:
    """Return the layout of ``cache``, which holds some tokens of one sequence.

    Raises:
        ConfigError: a cache or a layer that cannot be split, with the reason.
    """
    check_layers(cache)
    pages, images = _Packer(), _Packer()
    kv: list[KeyValues] = []
    states: list[StateTensor] = []
    for number, layer in enumerate(cache.layers):
        if isinstance(layer, WITH_KV) and layer.is_initialized:
            keys, values = layer.keys, layer.values
            assert keys is not None
            assert values is not None
            places = [pages.take(t, t.shape[1], page_tokens, t.shape[3]) for t in (keys, values)]
            kv.append(KeyValues(layer=number, keys=places[0], values=places[1]))
        for kind, index, state in states_of(layer):
            place = images.take(state, *state.shape)
            states.append(StateTensor(layer=number, index=index, kind=kind, region=place))
    return CacheLayout(
        page_tokens=page_tokens,
        page=tuple(kv),
        page_bytes=pages.end,
        image=tuple(states),
        image_bytes=images.end,
    )


def check_layers(cache: Any) -> None:
    """Raise `ConfigError` for a cache or a layer that is not known, and why; empty or filled."""
    if type(cache) is not library.DynamicCache:
        raise ConfigError(f"cache: a {type(cache).__name__}; {SUPPORTED}")
    for number, layer in enumerate(cache.layers):
        _check_layer(number, layer)
    if not any(isinstance(layer, WITH_KV) for layer in cache.layers):
        raise ConfigError(f"cache: no layer has keys and values; {SUPPORTED}")


def _check_layer(number: int, layer: Any) -> None:
    kind = type(layer)
    if kind in WITH_WINDOW:
        raise ConfigError(
            f"cache: layer {number} is a {kind.__name__} and drops what leaves its window of "
            f"{layer.sliding_window} positions, so earlier positions cannot be resumed; {SUPPORTED}"
        )
    if kind not in (*WITH_KV, *WITH_STATE, *WITH_NOTHING):
        raise ConfigError(
            f"cache: layer {number} is a {kind.__name__}, not known here; {SUPPORTED}"
        )


def states_of(layer: Any) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Yield ``(kind, index, tensor)`` of each per-sequence tensor of a layer."""
    if isinstance(layer, WITH_STATE):
        for kind, tensors in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states)):
            for index, tensor in tensors.items():
                if tensor is not None:
                    yield kind, index, tensor


def put_state(layer: Any, *, kind: str, index: int, state: torch.Tensor) -> None:
    """Give a fresh layer one of its per-sequence tensors, through the layer's own methods."""
    if kind == "conv":
        layer.update_conv_state(state, state_idx=index, conv_kernel_size=state.shape[-1])
    else:
        layer.update_recurrent_state(state, state_idx=index)
    layer.has_previous_state[index] = True


def put_kv(layer: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Replace a layer's keys and values, each (1, heads, positions, width); none: it is empty."""
    library.DynamicLayer.reset(layer)  # of its KV alone: a layer that has both keeps its state
    if keys.shape[2]:
        layer.update(keys, values)
