"""The draft head: one layer that guesses the token after next from the model's last output."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ninfer_pool.kernels import KVPages
from ninfer_pool.runner.forms import PREFILL, ROWS, Form
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
    """Slot q, from 1, joins token q and the model's output at q - 1, and guesses token q + 1.

    It attends to slots [1, q] of its own layer's KV. What it returns is normed: `Model.logits`
    takes it, and so does the next slot as the model's output where there is none yet.
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
    ) -> None:
        """Write K and V of T slots of one lane, as prefill rounds, and guess nothing.

        ``embeddings`` (T, hidden) of the tokens at those slots, ``hidden`` (T, hidden) the
        model's output one position before each; the rest as in `Model.prefill`, for one cache.
        """
        self._write(embeddings, hidden, positions, cache, slots, PREFILL)

    @torch.inference_mode()
    def write_rows(
        self,
        embeddings: torch.Tensor,
        hidden: torch.Tensor,
        *,
        positions: torch.Tensor,
        cache: KVPages,
        slots: torch.Tensor,
    ) -> None:
        """Write K and V of R slots of any lanes and guess nothing; otherwise as `decode`."""
        self._write(embeddings, hidden, positions, cache, slots, ROWS)

    def _write(
        self,
        embeddings: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        cache: KVPages,
        slots: torch.Tensor,
        form: Form,
    ) -> None:
        parts = self._parts
        x, angles = self._join(embeddings, hidden, form), self._rotary.angles(positions)
        parts.attention.write(
            parts.layer.before(x), angles=angles, cache=cache, slots=slots, form=form
        )

    @torch.inference_mode()
    def decode(
        self,
        embeddings: torch.Tensor,
        hidden: torch.Tensor,
        *,
        positions: torch.Tensor,
        cache: KVPages,
        tables: torch.Tensor,
        lengths: torch.Tensor,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """Run one slot of each of R rows, row r at slot ``lengths[r] - 1``.

        ``embeddings`` and ``hidden`` (R, hidden) as in `write`, ``positions`` int64 (3, R), the
        rest as in `Model.decode`. Returns (R, hidden).
        """
        parts, x = self._parts, self._join(embeddings, hidden, ROWS)
        h = parts.attention.decode(
            parts.layer.before(x),
            angles=self._rotary.angles(positions),
            cache=cache,
            tables=tables,
            lengths=lengths,
            slots=slots,
            first=self.FIRST,
        )
        return parts.norm(parts.layer.add(x, h, ROWS))
