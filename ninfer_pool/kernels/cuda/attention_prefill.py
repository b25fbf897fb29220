"""Causal attention of a chunk of new tokens over the pages of one lane."""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ninfer_pool.kernels.cuda.device import attention_tile, precision, stages
from ninfer_pool.kernels.cuda.paging import PAGE, PageStrides, attend, load_tile
from ninfer_pool.kernels.pages import KVPages


# The address of a lane's table must not choose between variants of the kernel.
@triton.jit(
    do_not_specialize=["begin", "tokens", "first"], do_not_specialize_on_alignment=["table"]
)
def _attention(
    q,
    out,
    k,
    v,
    k_scale,
    v_scale,
    page_stride,
    scale_stride,
    table,
    q_stride,
    begin,
    tokens,
    first,
    scale,
    HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    """One program: BLOCK_T tokens of one query head, tile by tile from `first` to the last."""
    dtype: tl.constexpr = q.dtype.element_ty
    head = tl.program_id(1)
    kv_head = head // REPEATS
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = (rows[:, None] < tokens) & (d < DIM)
    number = rows.to(tl.int64)[:, None]
    query = tl.load(q + number * q_stride + head * DIM + d, mask=inside, other=0.0)
    end = begin + tl.minimum((tl.program_id(0) + 1) * BLOCK_T, tokens)
    highest = tl.full((BLOCK_T,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_T,), tl.float32)
    acc = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for index in range(first // BLOCK_N, tl.cdiv(end, BLOCK_N)):
        position = index * BLOCK_N + tl.arange(0, BLOCK_N)
        valid = (position >= first) & (position < end)
        page = tl.load(table + position // PAGE, mask=valid, other=0)
        place = kv_head * PAGE + position % PAGE
        key = load_tile(
            k, k_scale, page, place, valid, page_stride, scale_stride,
            dtype, DIM, BLOCK_D, QUANTISED,
        )  # fmt: skip
        value = load_tile(
            v, v_scale, page, place, valid, page_stride, scale_stride,
            dtype, DIM, BLOCK_D, QUANTISED,
        )  # fmt: skip
        seen = valid[None, :] & (position[None, :] <= begin + rows[:, None])
        highest, total, acc = attend(query, key, value, seen, scale, highest, total, acc, PRECISION)
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    target = out + (number * HEADS + head) * DIM + d
    tl.store(target, result.to(out.dtype.element_ty), mask=inside)


def attention_prefill(
    q: torch.Tensor,
    cache: KVPages,
    table: torch.Tensor,
    *,
    begin: int,
    scale: float,
    first: int = 0,
) -> torch.Tensor:
    """See `reference.attention_prefill`. The softmax runs online, in base two (Milakov 2018)."""
    strides = PageStrides.of(cache)
    tokens, heads, dim = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    q = q if q.stride()[1:] == (dim, 1) else q.contiguous()
    rows, columns = attention_tile(q)
    _attention[(triton.cdiv(tokens, rows), heads)](
        q,
        out,
        cache.k,
        cache.v,
        strides.k_scale,
        strides.v_scale,
        strides.page_stride,
        strides.scale_stride,
        table,
        q.stride(0),
        begin,
        tokens,
        first,
        scale * math.log2(math.e),
        HEADS=heads,
        REPEATS=heads // cache.heads,
        DIM=dim,
        BLOCK_D=triton.next_power_of_2(max(dim, 16)),
        BLOCK_T=rows,
        BLOCK_N=columns,
        PRECISION=precision(q),
        QUANTISED=cache.quantised,
        num_warps=4,
        enable_fp_fusion=True,
        num_stages=stages(q),
    )
    return out
