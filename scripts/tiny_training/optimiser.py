"""Muon for the matrices, Adam for the rest, under one warmup-stable-decay schedule by the clock."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

MUON_RATE = 0.02
ADAM_RATE = 0.004
WEIGHT_DECAY = 0.05
MOMENTUM = 0.95


def rate_scale(done: float) -> float:
    """Return the rate's factor after `done` (0 ... 1) of the time: 1 % warmup, 20 % decay."""
    return max(0.02, min(1.0, done / 0.01, (1.0 - done) / 0.2))


class Muon(torch.optim.Optimizer):
    """Momentum with an orthogonalised step (Jordan et al., 2024); for 2-d weights of layers."""

    def __init__(self, weights: list[nn.Parameter], *, lr: float) -> None:
        super().__init__(weights, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Move every weight by one orthogonalised step; `closure` is torch's, and not called."""
        for group in self.param_groups:
            for weight in group["params"]:
                mean = self.state[weight].setdefault("mean", torch.zeros_like(weight))
                mean.lerp_(weight.grad, 1 - MOMENTUM)
                step = orthogonal(weight.grad.lerp(mean, MOMENTUM))
                tall = max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5
                weight.mul_(1 - group["lr"] * WEIGHT_DECAY)
                weight.add_(step, alpha=-group["lr"] * tall)


def orthogonal(matrix: Tensor) -> Tensor:
    """Return nearly U V^T of matrix = U S V^T, by five steps of a quintic iteration in bf16."""
    x = matrix.bfloat16()
    flat = x.shape[0] > x.shape[1]
    x = x.T if flat else x
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    step: Tensor = (x.T if flat else x).float()
    return step


def optimisers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return Muon over the layers' matrices and Adam over embedding, norms, gates, convolutions."""
    matrices: list[nn.Parameter] = []
    embedding: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, weight in model.named_parameters():
        if "embed_tokens" in name:
            embedding.append(weight)
        elif weight.ndim == 2 and min(weight.shape) > 8:
            matrices.append(weight)
        else:
            rest.append(weight)
    adam = torch.optim.AdamW(
        [
            {"params": embedding, "weight_decay": WEIGHT_DECAY},
            {"params": rest, "weight_decay": 0.0},
        ],
        lr=ADAM_RATE,
        betas=(0.9, 0.95),
    )
    made: list[torch.optim.Optimizer] = [Muon(matrices, lr=MUON_RATE), adam]
    for optimiser in made:
        for group in optimiser.param_groups:
            group["full_lr"] = group["lr"]
    return made


def set_rates(made: list[torch.optim.Optimizer], done: float) -> None:
    """Set every group's learning rate for this share of the time."""
    for optimiser in made:
        for group in optimiser.param_groups:
            group["lr"] = group["full_lr"] * rate_scale(done)
