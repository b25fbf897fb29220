"""Functions of one element whose bits do not depend on where the element lies in its tensor.

On CPU torch's own ``sigmoid``, ``silu`` and ``softplus`` round the last elements of a tensor, with
which no vector register is filled, otherwise than the rest; rows of a decode step would then
depend on their place. ``exp``, ``log1p`` and arithmetic in fp32 do not, so these are made of them.
All compute in fp32 and round once, to x's dtype.
"""

from __future__ import annotations

import torch


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Return 1 / (1 + exp(-x))."""
    return (1 / (1 + torch.exp(-x.float()))).to(x.dtype)


def silu(x: torch.Tensor) -> torch.Tensor:
    """Return x / (1 + exp(-x))."""
    y = x.float()
    return (y / (1 + torch.exp(-y))).to(x.dtype)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """Return log(1 + exp(x)), without overflow."""
    y = x.float()
    return (torch.log1p(torch.exp(-y.abs())) + y.clamp(min=0)).to(x.dtype)
