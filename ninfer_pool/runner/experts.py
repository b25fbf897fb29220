"""The sparse feed-forward of the family's larger models: a few of many experts for each token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from ninfer_pool.runner.forms import Form
from ninfer_pool.runner.layers import Mlp


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseMlp:
    """Each row goes through ``per_token`` of E experts and through one that all share.

    ``router`` (E + 1, padded to a round number, hidden) holds the experts' rows, then the shared
    one's gate; ``gate_up`` is (E, 2 I, hidden), ``down`` (E, hidden, I). The chosen experts are
    read back from the device, so a step with experts cannot be captured in a CUDA graph.
    """

    per_token: int
    normalise: bool
    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    shared: Mlp

    def __call__(self, x: torch.Tensor, form: Form) -> torch.Tensor:
        """Map (rows, hidden) to (rows, hidden), summing over experts in order, in fp32."""
        count = len(self.gate_up)
        scores = form.linear(x, self.router).float()
        weights, chosen = torch.softmax(scores[:, :count], -1).topk(self.per_token, -1)
        if self.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        out = form.sigmoid(scores[:, count : count + 1]) * self.shared(x, form)
        for expert in torch.unique(chosen).tolist():
            one = Mlp(gate_up=self.gate_up[expert], down=self.down[expert])
            rows, place = (chosen == expert).nonzero(as_tuple=True)
            found = form.some_rows(x, rows, partial(one, form=form))
            out[rows] += found * weights[rows, place, None]
        return out.to(x.dtype)
