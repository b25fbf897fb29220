"""The parts of a decoder layer, each in two forms: prefill of one lane, decode of many.

Decode flattens B lanes × S steps to R rows. A row's bits may not depend on its place among the
rows or on its neighbours. So every product is one over all R rows, and functions whose rounding
depends on the place have a second form in `ninfer_pool.runner.forms`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ninfer_pool import kernels
from ninfer_pool.kernels import KVPages
from ninfer_pool.runner.batch import RowBatch
from ninfer_pool.runner.forms import PREFILL, ROWS, Form
from ninfer_pool.runner.rotary import Angles, rotate


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """RMS norm over the last dimension, in fp32; ``weight`` fp32 is the whole factor."""

    weight: torch.Tensor
    eps: float

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normed x in fp32."""
        x = x.float()
        length: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        mean = length.square_().div_(x.shape[-1])
        return torch.mul(x, mean.add_(self.eps).rsqrt_()).mul_(self.weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normed x in x's dtype."""
        return self.scale(x).to(x.dtype)


class FeedForward(Protocol):
    """The second half of a layer."""

    def __call__(self, x: torch.Tensor, form: Form) -> torch.Tensor:
        """Map (rows, hidden) to (rows, hidden), each row independently."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """SwiGLU: ``gate_up`` (2 I, hidden) holds the gate first; ``down`` is (hidden, I)."""

    gate_up: torch.Tensor
    down: torch.Tensor

    def __call__(self, x: torch.Tensor, form: Form) -> torch.Tensor:
        """Map (rows, hidden) to (rows, hidden)."""
        gate, up = form.linear(x, self.gate_up).chunk(2, -1)
        return form.linear(form.silu_product(gate, up).to(x.dtype), self.down)


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttention:
    """Gated attention over pages: q and k normed and rotated, the result times sigmoid(gate).

    ``project`` (2 H D + 2 G D, hidden) holds q, k, v, gate in this order; ``norm`` has a factor
    (H + G, D) for q and k together; ``out`` is (hidden, H D).
    """

    heads: int
    kv_heads: int
    head_dim: int
    project: torch.Tensor
    norm: Norm
    out: torch.Tensor

    @property
    def scale(self) -> float:
        """The factor of the scores."""
        return float(self.head_dim**-0.5)

    def inputs(
        self, x: torch.Tensor, angles: Angles, form: Form
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Map x (rows, hidden) to q (rows, H, D), k, v (rows, G, D) and gate (rows, H D)."""
        both, dim = self.heads + self.kv_heads, self.head_dim
        sizes = [both * dim, self.kv_heads * dim, self.heads * dim]
        qk, v, gate = torch.split(form.linear(x, self.project), sizes, -1)
        turned = rotate(self.norm.scale(torch.unflatten(qk, -1, (both, dim))), angles).to(x.dtype)
        q, k = torch.split(turned, [self.heads, self.kv_heads], 1)
        return q, k, torch.unflatten(v, -1, (self.kv_heads, dim)), gate

    def write(
        self, x: torch.Tensor, *, angles: Angles, cache: KVPages, slots: torch.Tensor, form: Form
    ) -> None:
        """Write K and V of x (rows, hidden) to their slots; return nothing."""
        begin, rows = self.heads * self.head_dim, self.kv_heads * self.head_dim
        both = form.linear(x, self.project[begin : begin + 2 * rows])
        k, v = torch.unflatten(both, -1, (2, self.kv_heads, self.head_dim)).unbind(1)
        norm = Norm(weight=self.norm.weight[self.heads :], eps=self.norm.eps)
        kernels.append_kv(cache, rotate(norm.scale(k), angles).to(x.dtype), v, slots)

    def finish(self, seen: torch.Tensor, gate: torch.Tensor, form: Form) -> torch.Tensor:
        """Map attention's result (rows, H, D) and gate (rows, H D) to (rows, hidden)."""
        gated = form.sigmoid(gate).mul_(seen.flatten(1)).to(seen.dtype)
        return form.linear(gated, self.out)

    def prefill(
        self,
        x: torch.Tensor,
        *,
        angles: Angles,
        cache: KVPages,
        table: torch.Tensor,
        begin: int,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """Run T tokens of one lane from position ``begin``: x (T, hidden) -> (T, hidden)."""
        q, k, v, gate = self.inputs(x, angles, PREFILL)
        kernels.append_kv(cache, k, v, slots)
        seen = kernels.attention_prefill(q, cache, table, begin=begin, scale=self.scale)
        return self.finish(seen, gate, PREFILL)

    def decode(
        self,
        x: torch.Tensor,
        rows: RowBatch,
        *,
        angles: Angles,
        cache: KVPages,
        first: int = 0,
    ) -> torch.Tensor:
        """Run R rows over the positions from ``first`` on: x (R, hidden) -> (R, hidden)."""
        q, k, v, gate = self.inputs(x, angles, ROWS)
        kernels.append_kv(cache, k, v, rows.slots)
        seen = kernels.attention_decode(
            q, cache, rows.tables, rows.lengths, scale=self.scale, first=first
        )
        return self.finish(seen, gate, ROWS)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """Gated DeltaNet: projections, causal convolution, delta rule, gated norm.

    ``project`` holds q, k, v (C rows together), z (Hv Dv), b, a (Hv each), and rows of zeros up
    to a round number; ``conv`` is (C, W); ``rate`` is -exp(A_log) and ``bias`` dt_bias, fp32 (Hv,).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    project: torch.Tensor
    conv: torch.Tensor
    rate: torch.Tensor
    bias: torch.Tensor
    norm: Norm
    out: torch.Tensor

    def inputs(
        self, x: torch.Tensor, form: Form
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Map x (rows, hidden) to qkv (rows, C), z (rows, Hv Dv), g and beta fp32 (rows, Hv)."""
        heads, channels = self.value_heads, len(self.conv)
        sizes = [channels, heads * self.value_dim, heads, heads]
        whole = form.linear(x, self.project)
        qkv, z, b, a = torch.split(whole[:, : sum(sizes)], sizes, -1)
        return qkv, z, form.softplus(a.float() + self.bias).mul_(self.rate), form.sigmoid(b)

    def heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split (…, C) into q, k (…, Hk, Dk) and v (…, Hv, Dv)."""
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        q, k, v = torch.split(qkv, [keys, keys, values], -1)
        shape = (self.key_heads, self.key_dim)
        v = torch.unflatten(v, -1, (self.value_heads, self.value_dim))
        return torch.unflatten(q, -1, shape), torch.unflatten(k, -1, shape), v

    def finish(self, out: torch.Tensor, z: torch.Tensor, form: Form) -> torch.Tensor:
        """Map the rule's output (rows, Hv, Dv) and z (rows, Hv Dv) to (rows, hidden)."""
        gated = form.silu_product(z, self.norm.scale(out).flatten(1)).to(out.dtype)
        return form.linear(gated, self.out)

    def prefill(
        self, x: torch.Tensor, *, recurrent: torch.Tensor, conv: torch.Tensor
    ) -> torch.Tensor:
        """Run T tokens of one lane: x (T, hidden) -> (T, hidden).

        Changes ``recurrent`` (Hv, Dk, Dv) and ``conv`` (C, W - 1) to the state at their end.
        """
        qkv, z, g, beta = self.inputs(x, PREFILL)
        qkv, columns = kernels.conv_prefill(qkv, self.conv, conv)
        out, state = kernels.delta_prefill(*self.heads(qkv), g, beta, recurrent)
        recurrent.copy_(state)
        conv.copy_(columns)
        return self.finish(out, z, PREFILL)

    def decode(
        self, x: torch.Tensor, *, recurrent: torch.Tensor, conv: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run S steps of B lanes: x (B S, hidden) -> (B S, hidden), and the states after each.

        ``recurrent`` (B, Hv, Dk, Dv) and ``conv`` (B, C, W - 1) are not changed. The states
        after each step are (B, S, Hv, Dk, Dv) and (B, S, C, W - 1).
        """
        lanes = (len(recurrent), -1)
        qkv, z, g, beta = self.inputs(x, ROWS)
        qkv, columns = kernels.conv_step(torch.unflatten(qkv, 0, lanes), self.conv, conv)
        g, beta = torch.unflatten(g, 0, lanes), torch.unflatten(beta, 0, lanes)
        out, states = kernels.delta_step(*self.heads(qkv), g, beta, recurrent)
        return self.finish(out.flatten(0, 1), z, ROWS), states, columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One decoder layer: norm, attention of either kind, norm, feed-forward, both residual."""

    before: Norm
    attention: FullAttention | LinearAttention
    between: Norm
    feed_forward: FeedForward

    def add(self, x: torch.Tensor, attended: torch.Tensor, form: Form) -> torch.Tensor:
        """Return the layer's output from its input and attention's output, all (rows, hidden)."""
        x = x + attended
        return x + self.feed_forward(self.between(x), form)
