"""Builds the layers from a folder's tensors, fused so that a layer needs few products.

The builder runs twice. The first run, on tensors without data, lists the names and shapes that a
folder must hold. The second run reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
import torch.nn.functional as F

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
from ninfer_pool.runner.weights import Shape, Weights

HEAD = "lm_head.weight"
DRAFT = "mtp."
DRAFT_LAYER = "mtp.layers.0."
MULTIPLE = 16
"""Rows of a fused projection are padded to a multiple of this, for vector units."""

Read = Callable[[str, Shape], torch.Tensor]
"""Returns a tensor by its published name; the shape is the one that it must have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """All weights of a forward pass; ``head`` is the embedding where those are tied."""

    embedding: torch.Tensor
    head: torch.Tensor
    layers: tuple[Layer, ...]
    norm: Norm
    draft: DraftParts | None


def assemble(
    config: ModelConfig, weights: Weights, *, device: torch.device, dtype: torch.dtype
) -> Parts:
    """Check the folder's tensors and build the layers from them, cast to ``dtype``.

    Norm factors, A_log and dt_bias stay in fp32, as do the values computed from them.

    Raises:
        ModelError: lists tensors that are missing, unknown or do not fit.
    """
    weights.check(expected_tensors(config, weights.names), optional=[HEAD])
    builder = _Builder(config, weights.names, lambda name, _: weights.get(name))
    return builder.parts(device=device, dtype=dtype)


def expected_tensors(config: ModelConfig, names: Collection[str]) -> dict[str, Shape]:
    """Return the shape of every tensor that a folder with ``names`` must hold.

    The names decide what a config leaves open: whether there is a draft head, and whether
    experts are stored one by one or stacked.
    """
    shapes: dict[str, Shape] = {}

    def read(name: str, shape: Shape) -> torch.Tensor:
        shapes[name] = shape
        return torch.empty(shape, device="meta")

    _Builder(config, names, read).parts(device=torch.device("meta"), dtype=torch.float32)
    return shapes


def _round_up(rows: torch.Tensor) -> torch.Tensor:
    return F.pad(rows, (0, 0, 0, -len(rows) % MULTIPLE))


class _Builder:
    """Reads tensors and joins them to layers."""

    def __init__(self, config: ModelConfig, names: Collection[str], read: Read) -> None:
        self.config = config
        self.names = names
        self.read = read

    def parts(self, *, device: torch.device, dtype: torch.dtype) -> Parts:
        self.device, self.dtype = device, dtype
        config, hidden = self.config, self.config.hidden_size
        vocabulary = (config.vocab_size, hidden)
        embedding = self.cast("model.embed_tokens.weight", *vocabulary)
        return Parts(
            embedding=embedding,
            head=embedding if config.tie_word_embeddings else self.cast(HEAD, *vocabulary),
            layers=tuple(self.layer(index) for index in range(len(config.layer_types))),
            norm=self.norm("model.norm.weight", hidden),
            draft=self.draft() if any(name.startswith(DRAFT) for name in self.names) else None,
        )

    def cast(self, name: str, *shape: int) -> torch.Tensor:
        # A copy even where the dtype fits: the file's bytes are mapped and not aligned.
        return self.read(name, shape).to(self.device, self.dtype, copy=True)

    def keep(self, name: str, *shape: int) -> torch.Tensor:
        return self.read(name, shape).to(self.device, torch.float32)

    def norm(self, name: str, size: int) -> Norm:
        """Return the family's norm, whose factor is one more than its weight."""
        return Norm(weight=1 + self.keep(name, size), eps=self.config.rms_norm_eps)

    def layer(self, index: int) -> Layer:
        prefix = f"model.layers.{index}."
        linear = self.config.layer_types[index] == "linear_attention"
        attention = self.linear(prefix) if linear else self.full(prefix)
        return self.around(prefix, index, attention)

    def around(self, prefix: str, index: int, attention: FullAttention | LinearAttention) -> Layer:
        config, hidden = self.config, self.config.hidden_size
        sparse = config.experts is not None and config.sparse[index]
        feed_forward: FeedForward = (
            self.sparse(prefix + "mlp.")
            if sparse
            else self.mlp(prefix + "mlp.", config.intermediate_size)
        )
        return Layer(
            before=self.norm(prefix + "input_layernorm.weight", hidden),
            attention=attention,
            between=self.norm(prefix + "post_attention_layernorm.weight", hidden),
            feed_forward=feed_forward,
        )

    def sparse(self, prefix: str) -> SparseMlp:
        experts, hidden = self.config.experts, self.config.hidden_size
        assert experts is not None
        count, inner = experts.count, experts.intermediate_size
        router = [
            self.cast(prefix + "gate.weight", count, hidden),
            self.cast(prefix + "shared_expert_gate.weight", 1, hidden),
        ]
        if prefix + "experts.gate_up_proj" in self.names:
            gate_up = self.cast(prefix + "experts.gate_up_proj", count, 2 * inner, hidden)
            down = self.cast(prefix + "experts.down_proj", count, hidden, inner)
        else:
            each = [self.mlp(f"{prefix}experts.{i}.", inner) for i in range(count)]
            gate_up = torch.stack([one.gate_up for one in each])
            down = torch.stack([one.down for one in each])
        return SparseMlp(
            per_token=experts.per_token,
            normalise=experts.normalise,
            router=_round_up(torch.cat(router)),
            gate_up=gate_up,
            down=down,
            shared=self.mlp(prefix + "shared_expert.", experts.shared_intermediate_size),
        )

    def mlp(self, prefix: str, inner: int) -> Mlp:
        hidden = self.config.hidden_size
        gate, up = (self.cast(f"{prefix}{p}_proj.weight", inner, hidden) for p in ("gate", "up"))
        down = self.cast(f"{prefix}down_proj.weight", hidden, inner)
        return Mlp(gate_up=torch.cat((gate, up)), down=down)

    def full(self, prefix: str) -> FullAttention:
        """Join q, k, v, gate in this order; published, each query head's gate follows its q."""
        config, prefix = self.config, prefix + "self_attn."
        hidden, dim = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        q = self.cast(prefix + "q_proj.weight", 2 * heads * dim, hidden)
        k, v = (self.cast(f"{prefix}{p}_proj.weight", kv_heads * dim, hidden) for p in "kv")
        q, gate = q.view(heads, 2, dim, -1).unbind(1)
        factors = [
            self.norm(f"{prefix}{part}_norm.weight", dim).weight.expand(count, dim)
            for part, count in (("q", heads), ("k", kv_heads))
        ]
        return FullAttention(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=dim,
            project=torch.cat((q.flatten(0, 1), k, v, gate.flatten(0, 1))),
            norm=Norm(weight=torch.cat(factors), eps=config.rms_norm_eps),
            out=self.cast(prefix + "o_proj.weight", hidden, heads * dim),
        )

    def linear(self, prefix: str) -> LinearAttention:
        config, prefix = self.config, prefix + "linear_attn."
        heads, channels = config.linear_num_value_heads, config.conv_channels
        fused = config.model_type == "qwen3_next"
        parts = self.fused_projections(prefix) if fused else self.projections(prefix)
        conv = self.cast(prefix + "conv1d.weight", channels, 1, config.linear_conv_kernel_dim)
        norm = self.keep(prefix + "norm.weight", config.linear_value_head_dim)
        return LinearAttention(
            key_heads=config.linear_num_key_heads,
            value_heads=heads,
            key_dim=config.linear_key_head_dim,
            value_dim=config.linear_value_head_dim,
            project=_round_up(torch.cat(parts)),
            conv=conv.squeeze(1).contiguous(),
            rate=-self.keep(prefix + "A_log", heads).exp(),
            bias=self.keep(prefix + "dt_bias", heads),
            norm=Norm(weight=norm, eps=config.rms_norm_eps),
            out=self.cast(prefix + "out_proj.weight", config.hidden_size, config.value_dim),
        )

    def projections(self, prefix: str) -> list[torch.Tensor]:
        config, heads = self.config, self.config.linear_num_value_heads
        rows = {"qkv": config.conv_channels, "z": config.value_dim, "b": heads, "a": heads}
        return [self.projection(prefix, part, count) for part, count in rows.items()]

    def projection(self, prefix: str, part: str, rows: int) -> torch.Tensor:
        return self.cast(f"{prefix}in_proj_{part}.weight", rows, self.config.hidden_size)

    def fused_projections(self, prefix: str) -> list[torch.Tensor]:
        """Order Qwen3-Next's rows, published key head by key head, by the tensor they produce."""
        config = self.config
        keys = config.linear_num_key_heads
        repeats = config.linear_num_value_heads // keys
        dim, values = config.linear_key_head_dim, repeats * config.linear_value_head_dim
        qkvz = self.projection(prefix, "qkvz", config.conv_channels + config.value_dim)
        ba = self.projection(prefix, "ba", 2 * config.linear_num_value_heads)
        parts = [
            *torch.split(torch.unflatten(qkvz, 0, (keys, -1)), [dim, dim, values, values], 1),
            *torch.split(torch.unflatten(ba, 0, (keys, -1)), [repeats, repeats], 1),
        ]
        return [part.flatten(0, 1) for part in parts]

    def draft(self) -> DraftParts:
        hidden, attention = self.config.hidden_size, self.full(DRAFT_LAYER)
        return DraftParts(
            embedding_norm=self.norm("mtp.pre_fc_norm_embedding.weight", hidden),
            hidden_norm=self.norm("mtp.pre_fc_norm_hidden.weight", hidden),
            join=self.cast("mtp.fc.weight", hidden, 2 * hidden),
            layer=self.around(DRAFT_LAYER, len(self.config.layer_types), attention),
            attention=attention,
            norm=self.norm("mtp.norm.weight", hidden),
        )
