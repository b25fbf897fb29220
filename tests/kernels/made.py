"""Inputs for the kernels' tests: seeded numbers, and pages that are poison until written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ninfer_pool.kernels import GROUP, PAGE_TOKENS, KVPages, reference

STORAGES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8-g64": torch.int8,
}


class Numbers:
    """Seeded tensors, the same for every device: made on CPU, then moved."""

    def __init__(self, seed: int, device: str = "cpu") -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.device = device

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Standard normal."""
        return torch.randn(shape, generator=self.generator).to(self.device, dtype)

    def between(self, low: float, high: float, *shape: int) -> torch.Tensor:
        """Uniform in [low, high)."""
        x = torch.rand(shape, generator=self.generator) * (high - low) + low
        return x.to(self.device)

    def order(self, n: int) -> torch.Tensor:
        """A permutation of range(n)."""
        return torch.randperm(n, generator=self.generator).to(self.device)


def poisoned_pages(
    storage: str, *, pages: int, heads: int, dim: int, device: str = "cpu"
) -> KVPages:
    """Pages as views into a slab whose every float is NaN, with other bytes between them."""
    dtype = STORAGES[storage]
    size = heads * PAGE_TOKENS * dim

    def view(slab: torch.Tensor, place: int, last: int) -> torch.Tensor:
        inner = heads * PAGE_TOKENS * last
        return slab[:, place * inner : (place + 1) * inner].view(pages, heads, PAGE_TOKENS, last)

    if dtype != torch.int8:
        slab = torch.full((pages, 3 * size), torch.nan, dtype=dtype, device=device)
        return KVPages(k=view(slab, 0, dim), v=view(slab, 1, dim))
    codes = torch.full((pages, 3 * size), -128, dtype=dtype, device=device)
    groups = dim // GROUP
    scales = torch.full((pages, 3 * size // GROUP), torch.nan, dtype=torch.float16, device=device)
    return KVPages(
        k=view(codes, 0, dim),
        v=view(codes, 1, dim),
        k_scale=view(scales, 0, groups),
        v_scale=view(scales, 1, groups),
    )


def stored(cache: KVPages) -> list[torch.Tensor]:
    """All tensors of the pages."""
    tensors = (cache.k, cache.v, cache.k_scale, cache.v_scale)
    return [x for x in tensors if x is not None]


def slots_of(table: torch.Tensor, tokens: int) -> torch.Tensor:
    """The slots of positions 0 … tokens - 1 in the pages of ``table``."""
    position = torch.arange(tokens, device=table.device)
    return table[position // PAGE_TOKENS] * PAGE_TOKENS + position % PAGE_TOKENS


def fill(cache: KVPages, table: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Write positions 0, 1, … of k and v (T, G, D) with the reference."""
    reference.append_kv(cache, k, v, slots_of(table, len(k)))


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The sizes of one attention layer."""

    query: int
    kv: int
    dim: int


@dataclass(frozen=True, kw_only=True)
class Linear:
    """The sizes of one linear-attention layer."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int


class Delta(NamedTuple):
    """What the gated delta rule reads beside its state."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor


def delta_inputs(
    numbers: Numbers, sizes: Linear, *rows: int, dtype: torch.dtype = torch.float32
) -> Delta:
    """Inputs for ``rows`` tokens, their decays from hardly any to strong."""
    keys = (*rows, sizes.key_heads, sizes.key_dim)
    rate = numbers.between(-8.0, 0.0, sizes.value_heads).exp()
    return Delta(
        q=numbers.normal(*keys, dtype=dtype),
        k=numbers.normal(*keys, dtype=dtype),
        v=numbers.normal(*rows, sizes.value_heads, sizes.value_dim, dtype=dtype),
        g=-rate * numbers.between(0.1, 1.0, *rows, sizes.value_heads),
        beta=numbers.between(0.0, 1.0, *rows, sizes.value_heads),
    )


def error_ratio(x: torch.Tensor, right: torch.Tensor) -> float:
    """Root mean square of the difference, as a ratio of the right answer's own."""
    x, right = x.double().cpu(), right.double().cpu()
    return float((x - right).square().mean().sqrt() / right.square().mean().sqrt().clamp(1e-30))
