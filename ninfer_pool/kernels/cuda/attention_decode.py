"""Attention of single new tokens, each over its own lane's pages and its own length.

A row's positions are cut into pieces of a fixed number of pages, counted from position 0. One
kernel attends within each piece, another joins a row's pieces in order. So a row's bits depend
on nothing but itself, and lengths stay on the device, as a CUDA graph needs.
"""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ninfer_pool.kernels.cuda.device import attention_tile, precision, stages
from ninfer_pool.kernels.cuda.paging import PAGE, PageStrides, attend, load_tile
from ninfer_pool.kernels.pages import KVPages

PIECE = 8
"""Pages that one program attends to."""


@triton.jit
def _attend_piece(
    q,
    highests,
    totals,
    sums,
    k,
    v,
    k_scale,
    v_scale,
    page_stride,
    scale_stride,
    tables,
    table_stride,
    lengths,
    first,
    scale,
    REPEATS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    PIECE: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    """One program: the query heads of one KV head of one row, over one piece of its pages."""
    row, kv_head, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    dtype: tl.constexpr = q.dtype.element_ty
    length = tl.load(lengths + row)
    begin = tl.maximum(first, piece * PIECE * PAGE) // BLOCK_N
    end = tl.cdiv(tl.minimum(length, (piece + 1) * PIECE * PAGE), BLOCK_N)
    h, d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)[None, :]
    head = (row * tl.num_programs(1) + kv_head) * REPEATS + h
    inside = (h[:, None] < REPEATS) & (d < DIM)
    query = tl.load(q + head[:, None] * DIM + d, mask=inside, other=0.0)
    highest = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    for index in range(begin, end):
        position = index * BLOCK_N + tl.arange(0, BLOCK_N)
        valid = (position >= first) & (position < length)
        page = tl.load(tables + row * table_stride + position // PAGE, mask=valid, other=0)
        place = kv_head * PAGE + position % PAGE
        key = load_tile(
            k, k_scale, page, place, valid, page_stride, scale_stride,
            dtype, DIM, BLOCK_D, QUANTISED,
        )  # fmt: skip
        value = load_tile(
            v, v_scale, page, place, valid, page_stride, scale_stride,
            dtype, DIM, BLOCK_D, QUANTISED,
        )  # fmt: skip
        seen = valid[None, :]
        highest, total, acc = attend(query, key, value, seen, scale, highest, total, acc, PRECISION)
    if begin < end:
        place = head * tl.num_programs(2) + piece
        tl.store(highests + place, highest, mask=h < REPEATS)
        tl.store(totals + place, total, mask=h < REPEATS)
        tl.store(sums + place[:, None] * DIM + d, acc, mask=inside)


@triton.jit
def _join_pieces(
    out,
    highests,
    totals,
    sums,
    lengths,
    first,
    pieces,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PIECE: tl.constexpr,
):
    """One program: one head of one row; rescales its pieces to the largest score so far."""
    row, d = tl.program_id(0), tl.arange(0, BLOCK_D)
    head = row * tl.num_programs(1) + tl.program_id(1)
    length = tl.load(lengths + row)
    highest, total = float("-inf"), 0.0
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for piece in range(first // (PAGE * PIECE), tl.cdiv(length, PAGE * PIECE)):
        place = head * pieces + piece
        new = tl.load(highests + place)
        higher = tl.maximum(highest, new)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        old, gain = tl.exp2(highest - base), tl.exp2(new - base)
        total = total * old + tl.load(totals + place) * gain
        acc = acc * old + tl.load(sums + place * DIM + d, mask=d < DIM, other=0.0) * gain
        highest = higher
    result = (acc / tl.where(total > 0, total, 1.0)).to(out.dtype.element_ty)
    tl.store(out + head * DIM + d, result, mask=d < DIM)


def attention_decode(
    q: torch.Tensor,
    cache: KVPages,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    first: int = 0,
) -> torch.Tensor:
    """See `reference.attention_decode`. Flash-decoding (Dao and others 2023) with fixed pieces."""
    strides = PageStrides.of(cache)
    rows, heads, dim = q.shape
    pieces, repeats = triton.cdiv(tables.shape[1], PIECE), heads // cache.heads
    q, out = q.contiguous(), torch.empty_like(q, memory_format=torch.contiguous_format)
    highests, totals = q.new_empty((2, rows, heads, pieces), dtype=torch.float32)
    sums = q.new_empty((rows, heads, pieces, dim), dtype=torch.float32)
    block_d = triton.next_power_of_2(max(dim, 16))
    _attend_piece[(rows, cache.heads, pieces)](
        q,
        highests,
        totals,
        sums,
        cache.k,
        cache.v,
        strides.k_scale,
        strides.v_scale,
        strides.page_stride,
        strides.scale_stride,
        tables,
        tables.stride(0),
        lengths,
        first,
        scale * math.log2(math.e),
        REPEATS=repeats,
        DIM=dim,
        BLOCK_D=block_d,
        BLOCK_H=triton.next_power_of_2(max(repeats, 16)),
        BLOCK_N=attention_tile(q)[1],
        PRECISION=precision(q),
        PIECE=PIECE,
        QUANTISED=cache.quantised,
        num_warps=4,
        enable_fp_fusion=True,
        num_stages=stages(q),
    )
    _join_pieces[(rows, heads)](
        out,
        highests,
        totals,
        sums,
        lengths,
        first,
        pieces,
        DIM=dim,
        BLOCK_D=block_d,
        PIECE=PIECE,
        num_warps=1,
        enable_fp_fusion=True,
    )
    return out
