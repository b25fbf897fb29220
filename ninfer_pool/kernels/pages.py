"""One layer's keys and values, as views into the pages of the slab."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

PAGE_TOKENS: Final = 64
"""Token positions per page."""

GROUP: Final = 64
"""Neighbouring elements of a head that share one scale where the storage is INT8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPages:
    """One layer's K and V: typed views, usually strided, into the slab's page bytes.

    ``k`` and ``v`` are (num_pages, G, 64, D) in the storage's dtype: G heads, D elements per head.
    For int8 (INT8-G64) ``k_scale`` and ``v_scale`` are fp16 (num_pages, G, 64, D // 64). An
    element is its code times the scale of its group. For other types they are None.
    The last dimension of each is dense.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    @property
    def quantised(self) -> bool:
        """True where the elements are INT8 codes with a scale for each group of 64."""
        return self.k_scale is not None

    @property
    def heads(self) -> int:
        """KV heads (G)."""
        return self.k.shape[1]

    @property
    def head_dim(self) -> int:
        """Elements per head (D)."""
        return self.k.shape[3]
