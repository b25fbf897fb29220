"""The gated delta rule over many tokens, in chunks, from any state to the state at the end.

Within a chunk of tokens, d the log decay summed from its begin, token i writes

    u_i = beta_i (v_i - exp(d_i) Sᵀ k_i - sum over j < i of exp(d_i - d_j) (k_i·k_j) u_j)

One kernel prepares all chunks and heads side by side: the inverse of each triangular system and the
attention within the chunk. Another walks the chunks in order, a block of the state's columns in
registers (Yang, Kautz and Hatamizadeh 2024, Gated Delta Networks, section 3.3).
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ninfer_pool.kernels.cuda.device import precision
from ninfer_pool.kernels.reference import NORM_EPS

CHUNK = 32
"""Tokens of a chunk: half the reference's, whose tiles would not fit every card's shared memory."""
SIZE = tl.constexpr(CHUNK)
EPS = tl.constexpr(NORM_EPS)


@triton.jit
def _unit(x, row, tokens, stride, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Load a chunk's q or k (SIZE, BLOCK) of one head, each row scaled to length one."""
    d = tl.arange(0, BLOCK)[None, :]
    mask = (row < tokens)[:, None] & (d < DIM)
    x = tl.load(x + row[:, None] * stride + d, mask=mask, other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, axis=1) + EPS)[:, None]


@triton.jit(do_not_specialize=["tokens"])
def _prepare(
    q,
    k,
    g,
    beta,
    inverses,
    withins,
    tokens,
    q_stride,
    k_stride,
    q_scale,
    REPEATS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: the two matrices of one chunk of one head, each (SIZE, SIZE).

    The inverse of I + beta_i exp(d_i - d_j) k_i·k_j (j < i), and exp(d_i - d_j) q_i·k_j (j <= i).
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    heads = tl.num_programs(1)
    i = tl.arange(0, SIZE)
    row = (i + chunk * SIZE).to(tl.int64)
    key = _unit(k + (head // REPEATS) * KEY_DIM, row, tokens, k_stride, KEY_DIM, BLOCK_K)
    query = _unit(q + (head // REPEATS) * KEY_DIM, row, tokens, q_stride, KEY_DIM, BLOCK_K)
    d = tl.cumsum(tl.load(g + head + row * heads, mask=row < tokens, other=0.0), axis=0)
    below = i[:, None] >= i[None, :]
    between = tl.exp(tl.where(below, d[:, None] - d[None, :], float("-inf")))
    rate = tl.load(beta + head + row * heads, mask=row < tokens, other=0.0)
    system = tl.dot(key, tl.trans(key), input_precision=PRECISION) * between * rate[:, None]
    system = tl.where(i[:, None] > i[None, :], system, 0.0)
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    # Forward substitution: once row j of the inverse is final, take it off the rows below.
    for j in range(SIZE - 1):
        column = tl.sum(tl.where(i[None, :] == j, system, 0.0), axis=1)
        final = tl.sum(tl.where(i[:, None] == j, inverse, 0.0), axis=0)
        inverse -= column[:, None] * final[None, :]
    within = tl.dot(query * q_scale, tl.trans(key), input_precision=PRECISION) * between
    cells = (chunk * heads + head).to(tl.int64) * SIZE * SIZE + i[:, None] * SIZE + i[None, :]
    tl.store(inverses + cells, inverse)
    tl.store(withins + cells, within)


# The address of a lane's state must not choose between variants of the kernel.
@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["state"])
def _scan(
    q,
    k,
    v,
    g,
    beta,
    inverses,
    withins,
    state,
    out,
    last,
    tokens,
    q_stride,
    k_stride,
    v_stride,
    q_scale,
    REPEATS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: BLOCK_V value columns of one head, over all chunks."""
    head, heads = tl.program_id(0), tl.num_programs(0)
    i, in_k = tl.arange(0, SIZE), tl.arange(0, BLOCK_K)
    j = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    cell = head * KEY_DIM * VALUE_DIM + in_k[:, None] * VALUE_DIM + j[None, :]
    in_cell = (in_k < KEY_DIM)[:, None] & (j < VALUE_DIM)[None, :]
    s = tl.load(state + cell, mask=in_cell, other=0.0)
    q += (head // REPEATS) * KEY_DIM
    k += (head // REPEATS) * KEY_DIM
    for chunk in range(tl.cdiv(tokens, SIZE)):
        row = (i + chunk * SIZE).to(tl.int64)
        inside = (row < tokens)[:, None] & (j < VALUE_DIM)[None, :]
        key = _unit(k, row, tokens, k_stride, KEY_DIM, BLOCK_K)
        query = _unit(q, row, tokens, q_stride, KEY_DIM, BLOCK_K) * q_scale
        d = tl.cumsum(tl.load(g + head + row * heads, mask=row < tokens, other=0.0), axis=0)
        rate = tl.load(beta + head + row * heads, mask=row < tokens, other=0.0)[:, None]
        since_begin, whole = tl.exp(d)[:, None], tl.sum(tl.where(i == SIZE - 1, d, 0.0), axis=0)
        value = tl.load(v + row[:, None] * v_stride + head * VALUE_DIM + j, mask=inside, other=0.0)
        known = tl.dot(key, s, input_precision=PRECISION) * since_begin
        target = (value.to(tl.float32) - known) * rate
        cells = (chunk * heads + head).to(tl.int64) * SIZE * SIZE + i[:, None] * SIZE + i[None, :]
        u = tl.dot(tl.load(inverses + cells), target, input_precision=PRECISION)
        seen = tl.dot(query, s, input_precision=PRECISION) * since_begin
        seen = tl.dot(tl.load(withins + cells), u, seen, input_precision=PRECISION)
        place = out + (row[:, None] * heads + head) * VALUE_DIM + j
        tl.store(place, seen.to(out.dtype.element_ty), mask=inside)
        key *= tl.exp(whole - d)[:, None]
        s = tl.dot(tl.trans(key), u, s * tl.exp(whole), input_precision=PRECISION)
    tl.store(last + cell, s, mask=in_cell)


def delta_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.delta_prefill`."""
    tokens, key_heads, key_dim = k.shape
    heads, value_dim = v.shape[1:]
    q, k, v = (x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous() for x in (q, k, v))
    g, beta, state = g.contiguous(), beta.contiguous(), state.contiguous()
    chunks = triton.cdiv(tokens, CHUNK)
    inverses, withins = state.new_empty((2, chunks, heads, CHUNK, CHUNK))
    out, last = v.new_empty(v.shape), torch.empty_like(state)
    block_k, block_v = triton.next_power_of_2(max(key_dim, 16)), 16
    _prepare[(chunks, heads)](
        q,
        k,
        g,
        beta,
        inverses,
        withins,
        tokens,
        q.stride(0),
        k.stride(0),
        key_dim**-0.5,
        REPEATS=heads // key_heads,
        KEY_DIM=key_dim,
        BLOCK_K=block_k,
        PRECISION=precision(q),
        num_warps=4,
        enable_fp_fusion=True,
    )
    _scan[(heads, triton.cdiv(value_dim, block_v))](
        q,
        k,
        v,
        g,
        beta,
        inverses,
        withins,
        state,
        out,
        last,
        tokens,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        key_dim**-0.5,
        REPEATS=heads // key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        PRECISION=precision(q),
        num_warps=4,
        enable_fp_fusion=True,
        num_stages=1,
    )
    return out, last
