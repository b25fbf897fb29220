"""A differentiable forward pass of the hybrid, quick on one thread, with the published names.

The same computation as transformers' `Qwen3_5ForCausalLM`, plus the draft head: slot q (q >= 1)
reads the embedding of token q and the main model's normed output at q - 1, and predicts token
q + 1.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK = 32
DROPOUT = 0.1
"""Share of each layer's changes to the residual stream that training leaves out."""

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 416,
    "num_hidden_layers": 8,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "full_attention_interval": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_value_head_dim": 32,
    "linear_num_value_heads": 8,
    "max_position_embeddings": 32768,
    "mtp_num_hidden_layers": 1,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 100000.0,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [4, 2, 2],
    },
    "tie_word_embeddings": True,
    "use_cache": True,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "bfloat16",
}
"""The shipped config.json."""


class RMSNorm(nn.Module):
    """x / rms(x) * (1 + weight)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], 1.0 + self.weight, CONFIG["rms_norm_eps"])


class GatedNorm(nn.Module):
    """x / rms(x) * weight * silu(gate), per head."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, CONFIG["rms_norm_eps"]) * F.silu(gate)


class MLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = _linear(hidden, inner)
        self.up_proj = _linear(hidden, inner)
        self.down_proj = _linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Linear(nn.Linear):
    """y = x W^T; while training the product runs in bf16, four times as quick as fp32 here."""

    def forward(self, x: Tensor) -> Tensor:
        return _product(x, self.weight) if self.training else F.linear(x, self.weight)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x.bfloat16(), weight.bfloat16()).float()


def _linear(inputs: int, outputs: int) -> Linear:
    layer = Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=0.5 * inputs**-0.5)
    return layer


def rotary(length: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each (length, rotary dims); text has the same position on all axes."""
    rope = CONFIG["rope_parameters"]
    dims = int(CONFIG["head_dim"] * rope["partial_rotary_factor"])
    frequency = rope["rope_theta"] ** -(torch.arange(0, dims, 2).float() / dims)
    angle = torch.arange(length).float()[:, None] * frequency
    angle = torch.cat((angle, angle), -1)
    return angle.cos(), angle.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    dims = cos.shape[-1]
    turned, rest = x[..., :dims], x[..., dims:]
    half = dims // 2
    crossed = torch.cat((-turned[..., half:], turned[..., :half]), -1)
    return torch.cat((turned * cos + crossed * sin, rest), -1)


class FullAttention(nn.Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.heads, self.groups, self.dim = (
            c["num_attention_heads"],
            c["num_key_value_heads"],
            c["head_dim"],
        )
        self.q_proj = _linear(c["hidden_size"], self.heads * self.dim * 2)
        self.k_proj = _linear(c["hidden_size"], self.groups * self.dim)
        self.v_proj = _linear(c["hidden_size"], self.groups * self.dim)
        self.o_proj = _linear(self.heads * self.dim, c["hidden_size"])
        self.q_norm = RMSNorm(self.dim)
        self.k_norm = RMSNorm(self.dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, gate = self.q_proj(x).view(batch, length, self.heads, 2 * self.dim).chunk(2, -1)
        k = self.k_proj(x).view(batch, length, self.groups, self.dim)
        v = self.v_proj(x).view(batch, length, self.groups, self.dim).transpose(1, 2)
        q = _rotate(self.q_norm(q).transpose(1, 2), cos, sin)
        k = _rotate(self.k_norm(k).transpose(1, 2), cos, sin)
        share = self.heads // self.groups
        k, v = (t.repeat_interleave(share, dim=1) for t in (k, v))
        if self.training:
            q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).float()
        out = out.transpose(1, 2).reshape(batch, length, -1)
        gated: Tensor = self.o_proj(out * torch.sigmoid(gate.reshape(batch, length, -1)))
        return gated


class LinearAttention(nn.Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.key_heads, self.heads = c["linear_num_key_heads"], c["linear_num_value_heads"]
        self.key_dim, self.value_dim = c["linear_key_head_dim"], c["linear_value_head_dim"]
        keys, values = self.key_heads * self.key_dim, self.heads * self.value_dim
        self.widths = [keys, keys, values]
        channels, width = 2 * keys + values, c["linear_conv_kernel_dim"]
        self.conv1d = nn.Conv1d(channels, channels, width, groups=channels, bias=False)
        self.in_proj_qkv = _linear(c["hidden_size"], channels)
        self.in_proj_z = _linear(c["hidden_size"], values)
        self.in_proj_b = _linear(c["hidden_size"], self.heads)
        self.in_proj_a = _linear(c["hidden_size"], self.heads)
        self.out_proj = _linear(values, c["hidden_size"])
        self.norm = GatedNorm(self.value_dim)
        # Decay per token spread over 3e-4 ... 0.3: some heads forget in words, some in pages.
        rate = torch.logspace(math.log10(3e-4), math.log10(0.3), self.heads)
        step = torch.logspace(math.log10(3e-3), math.log10(0.1), self.heads)
        self.dt_bias = nn.Parameter(torch.log(torch.expm1(step)))
        self.A_log = nn.Parameter(torch.log(rate / step))
        with torch.no_grad():  # start near a plain pass-through of the newest token
            self.conv1d.weight.normal_(std=0.2)
            self.conv1d.weight[:, :, -1] += 0.7

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        mixed = F.silu(_causal_conv(self.in_proj_qkv(x), self.conv1d.weight))
        q, k, v = torch.split(mixed, self.widths, -1)
        q = _unit(q.view(batch, length, self.key_heads, self.key_dim)) * self.key_dim**-0.5
        k = _unit(k.view(batch, length, self.key_heads, self.key_dim))
        v = v.view(batch, length, self.heads, self.value_dim)
        share = self.heads // self.key_heads
        q, k = (t.repeat_interleave(share, dim=2) for t in (q, k))
        beta = torch.sigmoid(self.in_proj_b(x))
        decay = -self.A_log.exp() * F.softplus(self.in_proj_a(x) + self.dt_bias)
        out = delta_rule(q, k, v, decay, beta)
        z = self.in_proj_z(x).view(batch, length, self.heads, self.value_dim)
        gated: Tensor = self.out_proj(self.norm(out, z).reshape(batch, length, -1))
        return gated


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class _CausalConv(torch.autograd.Function):
    """Convolve (B, T, C) along T with (C, 1, W), nothing before the first token.

    Written out because slicing under autograd fills a whole tensor with zeros for each tap.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        taps = weight[:, 0].t().contiguous()
        width, length = len(taps), x.shape[1]
        padded = F.pad(x, (0, 0, width - 1, 0))
        ctx.save_for_backward(padded, taps)
        out = padded[:, :length] * taps[0]
        for tap in range(1, width):
            out.addcmul_(padded[:, tap : tap + length], taps[tap])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        padded, taps = ctx.saved_tensors
        (grad,) = grads
        width, length = len(taps), grad.shape[1]
        ahead = F.pad(grad, (0, 0, 0, width - 1))
        inputs = ahead[:, width - 1 :] * taps[0]
        for tap in range(1, width):
            shift = width - 1 - tap
            inputs.addcmul_(ahead[:, shift : shift + length], taps[tap])
        weights = [(grad * padded[:, tap : tap + length]).sum((0, 1)) for tap in range(width)]
        return inputs, torch.stack(weights, -1)[:, None]


def _causal_conv(x: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = _CausalConv.apply(x, weight)  # type: ignore[no-untyped-call]
    return out


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Gated delta rule in chunks; q, k (B, T, H, Dk), v (B, T, H, Dv), decay, beta (B, T, H).

    Within a chunk the updates solve one unit triangular system (Yang et al., "Gated Delta
    Networks", arXiv 2412.06464); chunks follow one another through the state (Dk, Dv).
    """
    batch, length, heads, _ = q.shape
    tail = -length % CHUNK
    if tail:
        q, k, v = (F.pad(t, (0, 0, 0, 0, 0, tail)) for t in (q, k, v))
        decay, beta = (F.pad(t, (0, 0, 0, tail)) for t in (decay, beta))
    chunks = (length + tail) // CHUNK

    def chunked(t: Tensor) -> Tensor:
        return t.reshape(batch, chunks, CHUNK, heads, -1).permute(1, 0, 3, 2, 4).contiguous()

    q, k, v = chunked(q), chunked(k), chunked(v)
    beta, total = chunked(beta), chunked(decay).cumsum(3)  # (N, B, H, C, 1)
    between = total - total.transpose(-1, -2)
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    weights = torch.where(causal, between, -torch.inf).exp()
    k_beta = k * beta
    grown = total.exp()
    system = torch.tril((k_beta @ k.transpose(-1, -2)) * weights, -1)
    system = system + torch.eye(CHUNK)
    solved = torch.linalg.solve_triangular(
        system, torch.cat((v * beta, k_beta * grown), -1), upper=False, unitriangular=True
    )
    values, reads = solved.split((v.shape[-1], k.shape[-1]), -1)
    within = (q @ k.transpose(-1, -2)) * weights
    q_grown = q * grown
    last = total[..., -1:, :]
    k_left = (k * (last - total).exp()).transpose(-1, -2)
    kept = last.exp()
    state = torch.zeros(batch, heads, k.shape[-1], v.shape[-1])
    outs = []
    # unbind, not indexing: its backward is one stack, not a zeroed tensor for every chunk.
    steps = (t.unbind(0) for t in (q_grown, within, values, reads, k_left, kept))
    for query, inner, value, read, left, keep in zip(*steps, strict=True):
        fresh = value - read @ state
        outs.append(query @ state + inner @ fresh)
        state = state * keep + left @ fresh
    out = torch.stack(outs).permute(1, 0, 3, 2, 4)
    return out.reshape(batch, length + tail, heads, -1)[:, :length]


class Layer(nn.Module):
    def __init__(self, c: dict[str, Any], kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "linear_attention":
            self.linear_attn = LinearAttention(c)
        else:
            self.self_attn = FullAttention(c)
        self.mlp = MLP(c["hidden_size"], c["intermediate_size"])
        self.input_layernorm = RMSNorm(c["hidden_size"])
        self.post_attention_layernorm = RMSNorm(c["hidden_size"])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.input_layernorm(x)
        if self.kind == "linear_attention":
            x = x + self._drop(self.linear_attn(normed))
        else:
            x = x + self._drop(self.self_attn(normed, cos, sin))
        return x + self._drop(self.mlp(self.post_attention_layernorm(x)))

    def _drop(self, change: Tensor) -> Tensor:
        return F.dropout(change, DROPOUT, self.training)


class Trunk(nn.Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.layers = nn.ModuleList(Layer(c, kind) for kind in c["layer_types"])
        self.norm = RMSNorm(c["hidden_size"])

    def forward(self, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.norm(x)
        return out


class DraftHead(nn.Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        hidden = c["hidden_size"]
        self.fc = _linear(2 * hidden, hidden)
        self.pre_fc_norm_embedding = RMSNorm(hidden)
        self.pre_fc_norm_hidden = RMSNorm(hidden)
        self.layers = nn.ModuleList([Layer(c, "full_attention")])
        self.norm = RMSNorm(hidden)

    def forward(self, embedded: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Slots 1 ... T-1: embedded tokens 1 ... and hidden 0 ...; returns the normed outputs."""
        x = torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)), -1)
        out: Tensor = self.norm(self.layers[0](self.fc(x), cos, sin))
        return out


class TinyModel(nn.Module):
    """The whole model; `state_dict` has the published tensor names, the head is tied."""

    def __init__(self, config: dict[str, Any] = CONFIG) -> None:
        super().__init__()
        self.model = Trunk(config)
        self.mtp = DraftHead(config)
        with torch.no_grad():  # every layer starts as a small change of its input
            for name, weight in self.named_parameters():
                if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                    weight.mul_(0.3)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return (hidden (B, T, H), draft hidden of slots 1 ... T-1 (B, T-1, H)), both normed."""
        cos, sin = rotary(tokens.shape[1])
        hidden = self.model(tokens, cos, sin)
        embedded = self.model.embed_tokens(tokens[:, 1:])
        draft = self.mtp(embedded, hidden[:, :-1], cos[1:], sin[1:])
        return hidden, draft

    def head(self, hidden: Tensor) -> Tensor:
        """Return logits over the vocabulary."""
        weight = self.model.embed_tokens.weight
        return _product(hidden, weight) if self.training else F.linear(hidden, weight)
