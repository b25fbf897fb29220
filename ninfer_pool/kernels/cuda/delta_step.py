"""The gated delta rule token by token, keeping the state after each."""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ninfer_pool.kernels.reference import NORM_EPS

EPS = tl.constexpr(NORM_EPS)


@triton.jit
def _step(
    q,
    k,
    v,
    g,
    beta,
    state,
    out,
    states,
    q_scale,
    STEPS: tl.constexpr,
    REPEATS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One program: BLOCK_V value columns of one head of one lane, its state in registers."""
    lane, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heads = tl.num_programs(1)
    i = tl.arange(0, BLOCK_K)
    j = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k, in_v = i < KEY_DIM, j < VALUE_DIM
    cell = i[:, None] * VALUE_DIM + j[None, :]
    in_cell = in_k[:, None] & in_v[None, :]
    size = KEY_DIM * VALUE_DIM
    s = tl.load(state + (lane * heads + head) * size + cell, mask=in_cell, other=0.0)
    for step in range(STEPS):
        row = (lane * STEPS + step) * heads + head
        key_row = (row // REPEATS) * KEY_DIM
        query = tl.load(q + key_row + i, mask=in_k, other=0.0).to(tl.float32)
        key = tl.load(k + key_row + i, mask=in_k, other=0.0).to(tl.float32)
        value = tl.load(v + row * VALUE_DIM + j, mask=in_v, other=0.0).to(tl.float32)
        query *= tl.rsqrt(tl.sum(query * query, axis=0) + EPS) * q_scale
        key *= tl.rsqrt(tl.sum(key * key, axis=0) + EPS)
        s *= tl.exp(tl.load(g + row))
        change = (value - tl.sum(s * key[:, None], axis=0)) * tl.load(beta + row)
        s += key[:, None] * change[None, :]
        seen = tl.sum(s * query[:, None], axis=0)
        tl.store(out + row * VALUE_DIM + j, seen.to(out.dtype.element_ty), mask=in_v)
        tl.store(states + row * size + cell, s, mask=in_cell)


def delta_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.delta_step`."""
    lanes, steps, key_heads, key_dim = k.shape
    heads, value_dim = v.shape[2:]
    q, k, v, g, beta, state = (x.contiguous() for x in (q, k, v, g, beta, state))
    out = torch.empty_like(v)
    states = state.new_empty((lanes, steps, *state.shape[1:]))
    block_v = min(32, triton.next_power_of_2(value_dim))
    _step[(lanes, heads, triton.cdiv(value_dim, block_v))](
        q,
        k,
        v,
        g,
        beta,
        state,
        out,
        states,
        key_dim**-0.5,
        STEPS=steps,
        REPEATS=heads // key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_K=triton.next_power_of_2(key_dim),
        BLOCK_V=block_v,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out, states
