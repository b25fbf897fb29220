"""The draft head: one layer that predicts the token after next from the model's last output."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ninfer_pool.kernels import KVPages
from ninfer_pool.runner.batch import RowBatch
from ninfer_pool.runner.forms import ROWS, Form
from ninfer_pool.runner.layers import FullAttention, Layer, Norm
from ninfer_pool.runner.rotary import Rotary


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftParts:
    """The draft head's weights; ``join`` is (hidden, 2 hidden)."""

    embedding_norm: Norm
    hidden_norm: Norm
    join: torch.Tensor
    layer: Layer
    attention: FullAttention
    norm: Norm


class DraftHead:
    """Slot q, from 1, joins token q and the model's output at q - 1, and predicts token q + 1.

    It attends to slots [1, q] of its own layer's KV. Its output is normed: `Model.logits` takes
    it, and so does the next slot in place of the model's output where there is none yet.
    """

    FIRST = 1
    """The first slot that is ever written: slot 0 has no output before it."""

    def __init__(self, *, parts: DraftParts, rotary: Rotary) -> None:
        self._parts = parts
        self._rotary = rotary

    def _join(self, embeddings: torch.Tensor, hidden: torch.Tensor, form: Form) -> torch.Tensor:
        parts = self._parts
        both = (parts.embedding_norm(embeddings), parts.hidden_norm(hidden))
        return form.linear(torch.cat(both, -1), parts.join)

    @torch.inference_mode()
    def write(
        self,
        embeddings: torch.Tensor,
        hidden: torch.Tensor,
        *,
        positions: torch.Tensor,
        cache: KVPages,
        slots: torch.Tensor,
        form: Form,
    ) -> None:
        """Write K and V of T slots and predict nothing.

        Args:
            embeddings: (T, hidden), of the tokens at those slots.
            hidden: (T, hidden), the model's output one position before each.
            positions: int64 (3, T), the three rotary axes.
            slots: int64 (T,), page × 64 + offset; -1 writes nothing.
            form: `PREFILL` for a chunk of one lane, `ROWS` for rows of any lanes.
        """
        parts = self._parts
        x, angles = self._join(embeddings, hidden, form), self._rotary.angles(positions)
        parts.attention.write(
            parts.layer.before(x), angles=angles, cache=cache, slots=slots, form=form
        )

    @torch.inference_mode()
    def decode(
        self, embeddings: torch.Tensor, hidden: torch.Tensor, rows: RowBatch, *, cache: KVPages
    ) -> torch.Tensor:
        """Run one slot of each of R rows, row r at slot ``lengths[r] - 1``.

        ``embeddings`` and ``hidden`` (R, hidden) as in `write`. Returns (R, hidden).
        """
        parts, x = self._parts, self._join(embeddings, hidden, ROWS)
        angles = self._rotary.angles(rows.positions)
        h = parts.attention.decode(
            parts.layer.before(x), rows, angles=angles, cache=cache, first=self.FIRST
        )
        return parts.norm(parts.layer.add(x, h, ROWS))
