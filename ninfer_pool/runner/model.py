"""The forward pass of the hybrid model: prefill of one lane, decode of many, the draft head."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ninfer_pool.errors import ModelError, PromptError
from ninfer_pool.kernels import KVPages
from ninfer_pool.runner.assemble import Parts, assemble
from ninfer_pool.runner.batch import RowBatch
from ninfer_pool.runner.config import ModelConfig
from ninfer_pool.runner.draft import DraftHead
from ninfer_pool.runner.forms import PREFILL, ROWS
from ninfer_pool.runner.layers import LinearAttention
from ninfer_pool.runner.rotary import Rotary
from ninfer_pool.runner.slab import LaneState
from ninfer_pool.runner.weights import Weights

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

EmbeddingSpan = tuple[int, int, torch.Tensor]
"""Rows [begin, end) of a call's tokens, and their embeddings (end - begin, hidden)."""


class Steps(NamedTuple):
    """The states after a decode call: of each linear layer, after each of S steps.

    ``recurrent[l]`` is (B, S, Hv, Dk, Dv) fp32, ``conv[l]`` (B, S, C, W - 1).
    """

    recurrent: list[torch.Tensor]
    conv: list[torch.Tensor]

    def keep(self, state: LaneState, lanes: Iterable[tuple[int, int]]) -> None:
        """Make the state after step s (from 0) lane b's, for each (b, s) of ``lanes``."""
        pairs: list[tuple[Any, Any]] = list(lanes)
        if self.recurrent and self.recurrent[0].is_cuda:  # fewer, larger copies
            index = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).to(self.recurrent[0].device)
            pairs = [(index[:, 0], index[:, 1])]
        for layer, (recurrent, conv) in enumerate(zip(self.recurrent, self.conv, strict=True)):
            for lane, step in pairs:
                state.recurrent[lane, layer] = recurrent[lane, step]
                state.conv[lane, layer] = conv[lane, step]


def digest_of(config: ModelConfig, weights: Weights) -> str:
    """Return a digest of the weights and of the config's fields."""
    return hashlib.sha256(f"{weights.digest()} {config!r}".encode()).hexdigest()


class Model:
    """A hybrid model's weights and its forward pass; keeps no state between calls.

    T tokens, B lanes, S steps per lane in one call, R = B S rows. A row's bits depend on its own
    lane alone, given R. ``draft_head`` is None where the folder holds none.
    """

    def __init__(self, config: ModelConfig, parts: Parts, *, digest: str = "") -> None:
        self.config = config
        self.digest = digest
        self.dtype = parts.embedding.dtype
        self.device = parts.embedding.device
        self.draft_head: DraftHead | None = None
        self._embedding = parts.embedding
        self._head = parts.head
        self._layers = parts.layers
        self._norm = parts.norm
        self._rotary = Rotary(config, self.device)
        if parts.draft is not None:
            self.draft_head = DraftHead(parts=parts.draft, rotary=self._rotary)

    @classmethod
    def load(
        cls, folder: str | Path, *, device: str | torch.device = "cpu", dtype: str = "fp32"
    ) -> Model:
        """Read a Hugging Face folder: ``config.json`` and ``*.safetensors``.

        Raises:
            ModelError: not such a folder, an architecture or dtype that is not supported, or a
                list of tensors that are unknown, missing or of another shape.
        """
        if dtype not in DTYPES:
            raise ModelError(f"dtype: {dtype!r}; needs one of {', '.join(DTYPES)}")
        config = ModelConfig.read(folder)
        weights = Weights.open(folder)
        parts = assemble(config, weights, device=torch.device(device), dtype=DTYPES[dtype])
        return cls(config, parts, digest=digest_of(config, weights))

    def embed(self, tokens: torch.Tensor, *, spans: Sequence[EmbeddingSpan] = ()) -> torch.Tensor:
        """Return the embeddings (T, hidden) of tokens, int64 (T,), with those of spans in place.

        Raises:
            PromptError: a span out of range, or embeddings of another shape or dtype.
        """
        rows = F.embedding(tokens, self._embedding)
        for begin, end, embeddings in spans:
            self._check_span(begin, end, embeddings, len(tokens))
            rows[begin:end] = embeddings.to(self.device)
        return rows

    def _check_span(self, begin: int, end: int, embeddings: torch.Tensor, tokens: int) -> None:
        if not 0 <= begin < end <= tokens:
            raise PromptError(f"span: [{begin}, {end}); needs rows within [0, {tokens})")
        shape, needed = tuple(embeddings.shape), (end - begin, self.config.hidden_size)
        if shape != needed:
            raise PromptError(f"embeddings of span [{begin}, {end}): {shape}; needs {needed}")
        if embeddings.dtype != self.dtype:
            found = f"embeddings of span [{begin}, {end}): {embeddings.dtype}"
            raise PromptError(f"{found}; needs the model's {self.dtype}")

    @torch.inference_mode()
    def prefill(
        self,
        x: torch.Tensor,
        *,
        positions: torch.Tensor,
        lane: LaneState,
        cache: Sequence[KVPages],
        table: torch.Tensor,
        begin: int,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """Run T tokens of one lane that stands at ``begin``: x (T, hidden) -> (T, hidden).

        Args:
            x: embeddings, see `embed`.
            positions: int64 (3, T), the three rotary axes.
            lane: the state at ``begin``; becomes the state at ``begin + T``.
            cache: one `KVPages` for each full-attention layer, in order.
            table: page ids, int64, of at least the positions [0, begin + T).
            slots: int64 (T,), where each token's K and V are written: page × 64 + offset.

        Returns:
            The last layer's output after the final norm: what `logits` and the draft head take.
        """
        angles = self._rotary.angles(positions)
        linear, pages = 0, iter(cache)
        for layer in self._layers:
            h, attention = layer.before(x), layer.attention
            if isinstance(attention, LinearAttention):
                recurrent, conv = lane.recurrent[linear], lane.conv[linear]
                h, linear = attention.prefill(h, recurrent=recurrent, conv=conv), linear + 1
            else:
                h = attention.prefill(
                    h, angles=angles, cache=next(pages), table=table, begin=begin, slots=slots
                )
            x = layer.add(x, h, PREFILL)
        return self._norm(x)

    @torch.inference_mode()
    def decode(
        self, x: torch.Tensor, rows: RowBatch, *, state: LaneState, cache: Sequence[KVPages]
    ) -> tuple[torch.Tensor, Steps]:
        """Run S tokens of each of B lanes at once: R = B S rows, row b S + s that of lane b.

        Args:
            x: embeddings (R, hidden), see `embed`.
            rows: positions, pages, lengths and slots of the R rows.
            state: of B lanes, before the first step; not changed: see `Steps.keep`.
            cache: one `KVPages` for each full-attention layer, in order.

        Returns:
            The output after the final norm (B, S, hidden), and the state after each step.
        """
        steps, pages = Steps([], []), iter(cache)
        angles = self._rotary.angles(rows.positions)
        for layer in self._layers:
            h, attention = layer.before(x), layer.attention
            if isinstance(attention, LinearAttention):
                linear = len(steps.recurrent)
                recurrent, conv = state.recurrent[:, linear], state.conv[:, linear]
                h, after, columns = attention.decode(h, recurrent=recurrent, conv=conv)
                steps.recurrent.append(after)
                steps.conv.append(columns)
            else:
                h = attention.decode(h, rows, angles=angles, cache=next(pages))
            x = layer.add(x, h, ROWS)
        return torch.unflatten(self._norm(x), 0, (len(state.recurrent), -1)), steps

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits (…, vocab) of hidden (…, hidden), the main model's or the draft's."""
        rows = ROWS.linear(hidden.reshape(-1, hidden.shape[-1]), self._head)
        return rows.float().view(*hidden.shape[:-1], -1)
