"""Rotary positions: part of each head turned by an angle, over one axis or three."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ninfer_pool.runner.config import ModelConfig


class Angles(NamedTuple):
    """Cosine and sine of each row's angles, fp32 (rows, 1, rotary_dim / 2)."""

    cos: torch.Tensor
    sin: torch.Tensor


class Rotary:
    """Turns positions into angles.

    Pair j of the rotary dimensions turns by ``theta ** (-2j / rotary_dim)`` times the position
    on its axis. The axes time, height and width alternate, each for the pairs of its section.
    The remaining pairs turn with time (the interleaved three-axis form of Qwen3-VL).
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        pairs = config.rotary_dim // 2
        exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
        axes = torch.zeros(pairs, dtype=torch.int64)
        for axis in (1, 2) if config.sections else ():
            axes[axis : 3 * config.sections[axis] : 3] = axis  # type: ignore[index]
        self._rates = (1.0 / config.rope_theta**exponents).unsqueeze(1).to(device)
        self._axes = axes.to(device)

    def angles(self, positions: torch.Tensor) -> Angles:
        """Return the angles of positions, int64 (3, rows)."""
        turns = (positions.float()[self._axes] * self._rates).T.unsqueeze(1)
        return Angles(turns.cos(), turns.sin())


def rotate(x: torch.Tensor, angles: Angles) -> torch.Tensor:
    """Turn the first dimensions of each head of x, fp32 (rows, heads, D), in place."""
    pairs = angles.cos.shape[-1]
    left, right = x[..., :pairs], x[..., pairs : 2 * pairs]
    turned = left * angles.cos - right * angles.sin
    right.mul_(angles.cos).add_(left * angles.sin)
    left.copy_(turned)
    return x
