"""Products and elementwise functions in two forms: the fast one, and one that treats rows alike.

On a CPU torch's ``silu``, ``sigmoid`` and ``softplus`` use another formula for a tensor's last
few elements and for the edges of each thread's part. Where several threads share a product of a
few rows, another kernel may compute the last rows. A chunk of a prefill has one shape cold and
warm, so neither changes its bits (`PREFILL`). A row of a decode step must not depend on its place
among the rows, so `ROWS` avoids both.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

MULTIPLE = 4
"""`ROWS` pads products to a multiple of this many rows. Measured: any other count up to 12 may be
split over threads so that rows differ by their place (MKL's fp32 product, 2, 6 and 8 threads)."""


class Form:
    """The fast form: torch's own functions."""

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return x weightᵀ, (rows, in) and (out, in) -> (rows, out) in x's dtype."""
        return F.linear(x, weight)

    def sigmoid(self, x: torch.Tensor) -> torch.Tensor:
        """Return sigmoid(x) in fp32."""
        return torch.sigmoid(x.float())

    def softplus(self, x: torch.Tensor) -> torch.Tensor:
        """Return log(1 + exp(x)) in fp32."""
        return F.softplus(x.float())

    def silu_product(self, gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) × x in fp32."""
        return F.silu(gate.float()).mul_(x)

    def some_rows(
        self,
        x: torch.Tensor,
        rows: torch.Tensor,
        function: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Return ``function`` of the rows of x with the indices ``rows``."""
        return function(x[rows])


class RowForm(Form):
    """The form whose results for a row have the same bits wherever the row is located."""

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return x weightᵀ, on a CPU with the rows padded to a multiple of `MULTIPLE`."""
        rows = len(x)
        if x.is_cuda or rows == 1 or rows % MULTIPLE == 0:
            return F.linear(x, weight)
        return F.linear(F.pad(x, (0, 0, 0, -rows % MULTIPLE)), weight)[:rows]

    def sigmoid(self, x: torch.Tensor) -> torch.Tensor:
        """Return 1 / (1 + exp(-x)) in fp32."""
        return torch.neg(x.float()).exp_().add_(1).reciprocal_()

    def softplus(self, x: torch.Tensor) -> torch.Tensor:
        """Return log(1 + exp(-|x|)) + max(x, 0) in fp32."""
        x = x.float()
        return torch.neg(x.abs()).exp_().log1p_().add_(torch.relu(x))

    def silu_product(self, gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return gate / (1 + exp(-gate)) × x in fp32."""
        gate = gate.float()
        below = torch.neg(gate).exp_().add_(1)
        return torch.div(gate, below, out=below).mul_(x)

    def some_rows(
        self,
        x: torch.Tensor,
        rows: torch.Tensor,
        function: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Return rows of ``function(x)``: a row's bits depend on the number of rows computed."""
        return function(x)[rows]


PREFILL = Form()
ROWS = RowForm()
