"""The rows of one decode step: R tokens of any lanes, each with its own pages and length."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from ninfer_pool.kernels import PAGE_TOKENS


@dataclass(slots=True, kw_only=True)
class RowBatch:
    """The inputs of R rows, all int64; rows that are never set are padding.

    Args:
        tokens: (R,).
        positions: (3, R), the three rotary axes.
        tables: (R, P), the page ids of each row's lane.
        lengths: (R,), row r attends to the positions [0, lengths[r]), its own included.
        slots: (R,), page × 64 + offset where each row's K and V are written; -1 writes nothing.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    tables: torch.Tensor
    lengths: torch.Tensor
    slots: torch.Tensor

    @classmethod
    def empty(cls, rows: int, width: int, device: torch.device) -> RowBatch:
        """Return ``rows`` rows of padding with tables of ``width`` pages."""

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        return cls(
            tokens=zeros(rows),
            positions=zeros(3, rows),
            tables=zeros(rows, width),
            lengths=zeros(rows),
            slots=zeros(rows) - 1,
        )

    def set(
        self, row: int, *, token: int, position: int, table: torch.Tensor, offset: int = 0
    ) -> None:
        """Fill one row; ``offset`` is added to ``position`` to give the rotary position."""
        self.tokens[row] = token
        self.positions[:, row] = position + offset
        self.tables[row, : len(table)] = table
        self.lengths[row] = position + 1
        page, place = divmod(position, PAGE_TOKENS)
        self.slots[row] = table[page] * PAGE_TOKENS + place

    def copy_(self, other: RowBatch) -> None:
        """Copy the values of a batch whose tables are as wide or narrower."""
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            mine[..., : theirs.shape[-1]].copy_(theirs)
