"""Products and elementwise functions in two forms: the fast one, and one that treats rows alike.

On CPU torch's ``silu``, ``sigmoid`` and ``softplus`` compute a tensor's last few elements, and the
edges of each thread's part, by another formula than the rest, and where several threads share a
product of a few rows, the last rows may fall to another kernel than the first. A chunk of a
prefill has one shape cold and warm, so that does no harm there (`PREFILL`). A row of a decode step
must not depend on its place among the rows, so there neither may happen (`ROWS`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

MULTIPLE = 4
"""Rows of a product come in multiples of this: measured, any other count up to 12 may be split
over threads so that rows differ by their place (MKL's fp32 product, 2, 6 and 8 threads)."""


RowFunction = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The functions of one form.

    ``linear(x, weight)`` is x weightᵀ in x's dtype; the others return fp32: ``sigmoid`` and
    ``softplus`` of any shape, and ``silu_product(gate, x)``, silu(gate) × x.
    ``some_rows(x, rows, f)`` is f of the rows of x that are named.
    """

    linear: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    sigmoid: Callable[[torch.Tensor], torch.Tensor]
    softplus: Callable[[torch.Tensor], torch.Tensor]
    silu_product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    some_rows: Callable[[torch.Tensor, torch.Tensor, RowFunction], torch.Tensor]


def _linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight)


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x.float())


def _softplus(x: torch.Tensor) -> torch.Tensor:
    return F.softplus(x.float())


def _silu_product(gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.silu(gate.float()).mul_(x)


def _gather(x: torch.Tensor, rows: torch.Tensor, function: RowFunction) -> torch.Tensor:
    return function(x[rows])


def _row_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rows = len(x)
    if x.is_cuda or rows == 1 or rows % MULTIPLE == 0:
        return F.linear(x, weight)
    return F.linear(F.pad(x, (0, 0, 0, -rows % MULTIPLE)), weight)[:rows]


def _row_sigmoid(x: torch.Tensor) -> torch.Tensor:
    return torch.neg(x.float()).exp_().add_(1).reciprocal_()


def _row_softplus(x: torch.Tensor) -> torch.Tensor:
    x = x.float()
    return torch.neg(x.abs()).exp_().log1p_().add_(torch.relu(x))


def _row_silu_product(gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    gate = gate.float()
    below = torch.neg(gate).exp_().add_(1)
    return torch.div(gate, below, out=below).mul_(x)


def _row_gather(x: torch.Tensor, rows: torch.Tensor, function: RowFunction) -> torch.Tensor:
    """A row's bits depend on how many there are, so all go through and some are taken."""
    return function(x)[rows]


PREFILL = Form(
    linear=_linear,
    sigmoid=_sigmoid,
    softplus=_softplus,
    silu_product=_silu_product,
    some_rows=_gather,
)
ROWS = Form(
    linear=_row_linear,
    sigmoid=_row_sigmoid,
    softplus=_row_softplus,
    silu_product=_row_silu_product,
    some_rows=_row_gather,
)
