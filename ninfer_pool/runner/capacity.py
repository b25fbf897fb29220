"""The size of the slab, and the tokens and conversations that fit into it."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from ninfer_pool.core.sizes import format_bytes, parse_size
from ninfer_pool.errors import ConfigError, UsageError
from ninfer_pool.kernels import PAGE_TOKENS
from ninfer_pool.runner.slab import SlabLayout

CUDA_SHARE = 0.85
"""Default share of a CUDA device's free memory; the rest is for activations."""
CPU_SHARE = 0.25
MOST_ON_CPU = 4 << 30
"""Default on a CPU, whose memory other programs use as well: this share, at most so many bytes."""
TYPICAL_TOKENS = 8192
TYPICAL_IMAGES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The contents of a slab; a typical conversation is 8,192 tokens with three checkpoints."""

    num_pages: int
    page_bytes: int
    image_bytes: int
    tokens: int
    conversations: int

    @classmethod
    def of(cls, layout: SlabLayout, num_pages: int) -> Capacity:
        """Return the capacity of ``num_pages`` of a layout."""
        each = TYPICAL_TOKENS // PAGE_TOKENS + TYPICAL_IMAGES * layout.image_pages
        return cls(
            num_pages=num_pages,
            page_bytes=layout.page_bytes,
            image_bytes=layout.image_bytes,
            tokens=num_pages * PAGE_TOKENS,
            conversations=num_pages // each,
        )

    def __str__(self) -> str:
        whole = format_bytes(self.num_pages * self.page_bytes)
        return (
            f"{whole} in {self.num_pages:,} pages: {self.tokens:,} tokens of KV, or "
            f"{self.conversations:,} conversations of {TYPICAL_TOKENS:,} tokens with "
            f"{TYPICAL_IMAGES} checkpoints (a saved state takes {format_bytes(self.image_bytes)})"
        )


def pages_for(layout: SlabLayout, budget: int | str | None, *, device: torch.device) -> int:
    """Return how many pages fit a budget in bytes.

    None: 85 % of the memory now free on CUDA; a quarter of it on a CPU, at most 4 GiB.

    Raises:
        ConfigError: not a size, or too small for one lane and one saved state.
    """
    size = _free(device) if budget is None else _bytes(budget)
    pages, least = size // layout.page_bytes, 1 + layout.image_pages
    if pages < least:
        raise ConfigError(
            f"kv_budget: {format_bytes(size)}; one lane and one saved state need "
            f"{format_bytes(least * layout.page_bytes)}"
        )
    return pages


def _bytes(budget: int | str) -> int:
    try:
        return parse_size(str(budget))
    except UsageError as error:
        raise ConfigError(f"kv_budget: {error}") from None


def _free(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * CUDA_SHARE)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(MOST_ON_CPU, int(free * CPU_SHARE))
