"""Builds the layers from a folder's tensors, fused so that a layer needs few products."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ninfer_pool.runner import tensors
from ninfer_pool.runner.config import ModelConfig
from ninfer_pool.runner.draft import DraftParts
from ninfer_pool.runner.experts import SparseMlp
from ninfer_pool.runner.layers import (
    FeedForward,
    FullAttention,
    Layer,
    LinearAttention,
    Mlp,
    Norm,
)
from ninfer_pool.runner.weights import Weights

MULTIPLE = 16
"""Rows of a fused projection come in multiples of this, as vector units like them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """All that a forward pass multiplies by; ``head`` is the embedding where those are tied."""

    embedding: torch.Tensor
    head: torch.Tensor
    layers: tuple[Layer, ...]
    norm: Norm
    draft: DraftParts | None


def assemble(
    config: ModelConfig, weights: Weights, *, device: torch.device, dtype: torch.dtype
) -> Parts:
    """Check the folder's tensors and build the layers from them, cast to ``dtype``.

    Norm factors, A_log and dt_bias are kept in fp32: what is computed from them is.

    Raises:
        ModelError: lists tensors that are missing, unknown or do not fit.
    """
    expected = tensors.expected_tensors(config, weights.names)
    weights.check(expected, optional=[tensors.HEAD])
    builder = _Builder(config, weights, device=device, dtype=dtype)
    embedding = builder.cast(tensors.EMBEDDING)
    return Parts(
        embedding=embedding,
        head=embedding if config.tie_word_embeddings else builder.cast(tensors.HEAD),
        layers=tuple(builder.layer(index) for index in range(len(config.layer_types))),
        norm=builder.norm(tensors.FINAL_NORM),
        draft=builder.draft() if tensors.has_draft_head(weights.names) else None,
    )


def _round_up(rows: torch.Tensor) -> torch.Tensor:
    return F.pad(rows, (0, 0, 0, -len(rows) % MULTIPLE))


class _Builder:
    """Reads tensors and puts them together."""

    def __init__(
        self, config: ModelConfig, weights: Weights, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.config = config
        self.weights = weights
        self.names = weights.names
        self.device = device
        self.dtype = dtype

    def cast(self, name: str) -> torch.Tensor:
        # A copy even where nothing is to cast: the file's bytes are mapped and lie unaligned.
        return self.weights.get(name).to(self.device, self.dtype, copy=True)

    def keep(self, name: str) -> torch.Tensor:
        return self.weights.get(name).to(self.device, torch.float32)

    def norm(self, name: str) -> Norm:
        """The family's norm, whose factor is one more than its weight."""
        return Norm(weight=1 + self.keep(name), eps=self.config.rms_norm_eps)

    def layer(self, index: int) -> Layer:
        prefix = tensors.layer_prefix(index)
        linear = self.config.layer_types[index] == "linear_attention"
        attention = self.linear(prefix) if linear else self.full(prefix)
        return self.around(prefix, attention)

    def around(self, prefix: str, attention: FullAttention | LinearAttention) -> Layer:
        return Layer(
            before=self.norm(prefix + "input_layernorm.weight"),
            attention=attention,
            between=self.norm(prefix + "post_attention_layernorm.weight"),
            feed_forward=self.feed_forward(prefix),
        )

    def feed_forward(self, prefix: str) -> FeedForward:
        prefix += "mlp."
        return self.sparse(prefix) if prefix + "gate.weight" in self.names else self.mlp(prefix)

    def sparse(self, prefix: str) -> SparseMlp:
        experts = self.config.experts
        assert experts is not None
        router = [self.cast(prefix + name) for name in ("gate.weight", "shared_expert_gate.weight")]
        if prefix + "experts.gate_up_proj" in self.names:
            gate_up, down = (
                self.cast(f"{prefix}experts.{part}_proj") for part in ("gate_up", "down")
            )
        else:
            each = [self.mlp(f"{prefix}experts.{i}.") for i in range(experts.count)]
            gate_up = torch.stack([one.gate_up for one in each])
            down = torch.stack([one.down for one in each])
        return SparseMlp(
            per_token=experts.per_token,
            normalise=experts.normalise,
            router=_round_up(torch.cat(router)),
            gate_up=gate_up,
            down=down,
            shared=self.mlp(prefix + "shared_expert."),
        )

    def mlp(self, prefix: str) -> Mlp:
        gate, up = (self.cast(f"{prefix}{part}_proj.weight") for part in ("gate", "up"))
        return Mlp(gate_up=torch.cat((gate, up)), down=self.cast(f"{prefix}down_proj.weight"))

    def full(self, prefix: str) -> FullAttention:
        """Lie q, k, v, gate side by side; published, each query head's gate follows its q."""
        config, prefix = self.config, prefix + "self_attn."
        heads, kv_heads, dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        q, k, v = (self.cast(f"{prefix}{part}_proj.weight") for part in "qkv")
        q, gate = q.view(heads, 2, dim, -1).unbind(1)
        factors = (
            self.norm(f"{prefix}{part}_norm.weight").weight.expand(count, dim)
            for part, count in (("q", heads), ("k", kv_heads))
        )
        return FullAttention(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=dim,
            project=torch.cat((q.flatten(0, 1), k, v, gate.flatten(0, 1))),
            norm=Norm(weight=torch.cat(tuple(factors)), eps=config.rms_norm_eps),
            out=self.cast(prefix + "o_proj.weight"),
        )

    def linear(self, prefix: str) -> LinearAttention:
        config, prefix = self.config, prefix + "linear_attn."
        fused = config.model_type == "qwen3_next"
        parts = self.split_projections(prefix) if fused else self.projections(prefix)
        return LinearAttention(
            key_heads=config.linear_num_key_heads,
            value_heads=config.linear_num_value_heads,
            key_dim=config.linear_key_head_dim,
            value_dim=config.linear_value_head_dim,
            project=_round_up(torch.cat(parts)),
            conv=self.cast(prefix + "conv1d.weight").squeeze(1).contiguous(),
            rate=-self.keep(prefix + "A_log").exp(),
            bias=self.keep(prefix + "dt_bias"),
            norm=Norm(weight=self.keep(prefix + "norm.weight"), eps=config.rms_norm_eps),
            out=self.cast(prefix + "out_proj.weight"),
        )

    def projections(self, prefix: str) -> list[torch.Tensor]:
        return [self.cast(f"{prefix}in_proj_{part}.weight") for part in ("qkv", "z", "b", "a")]

    def split_projections(self, prefix: str) -> list[torch.Tensor]:
        """Sort Qwen3-Next's rows, which come key head by key head, by what they make."""
        config = self.config
        keys, repeats = config.linear_num_key_heads, config.linear_num_value_heads
        repeats //= keys
        dim, values = config.linear_key_head_dim, repeats * config.linear_value_head_dim
        qkvz, ba = (
            torch.unflatten(self.cast(f"{prefix}in_proj_{part}.weight"), 0, (keys, -1))
            for part in ("qkvz", "ba")
        )
        parts = [
            *torch.split(qkvz, [dim, dim, values, values], 1),
            *torch.split(ba, [repeats, repeats], 1),
        ]
        return [part.flatten(0, 1) for part in parts]

    def draft(self) -> DraftParts:
        attention = self.full(tensors.DRAFT_LAYER)
        return DraftParts(
            embedding_norm=self.norm("mtp.pre_fc_norm_embedding.weight"),
            hidden_norm=self.norm("mtp.pre_fc_norm_hidden.weight"),
            join=self.cast("mtp.fc.weight"),
            layer=self.around(tensors.DRAFT_LAYER, attention),
            attention=attention,
            norm=self.norm("mtp.norm.weight"),
        )
