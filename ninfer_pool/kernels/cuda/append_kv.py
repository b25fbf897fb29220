"""Write new keys and values into their pages, quantised where these are INT8."""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ninfer_pool.kernels.cuda.paging import GROUP_SIZE, PAGE, PageStrides
from ninfer_pool.kernels.pages import GROUP, KVPages

# Adding and taking away 1.5 × 2 ** 23 rounds a small fp32 number half to even, on every target.
ROUNDER = tl.constexpr(12582912.0)
HALF_MAX = tl.constexpr(65504.0)


@triton.jit
def _put(x, values, scales, DIM: tl.constexpr, BLOCK_D: tl.constexpr, GROUPED: tl.constexpr):
    """Copy one head of one token, x (DIM,), to ``values``; GROUPED codes share a scale, if any."""
    if GROUPED:
        group = tl.arange(0, BLOCK_D // GROUPED)[:, None]
        d = group * GROUPED + tl.arange(0, GROUPED)[None, :]
        number = tl.load(x + d, mask=d < DIM, other=0.0).to(tl.float32)
        largest = tl.max(tl.abs(number), axis=1, keep_dims=True)
        scale = tl.minimum(tl.div_rn(largest, 127.0), HALF_MAX).to(tl.float16)
        divisor = tl.where(scale > 0, scale.to(tl.float32), float("inf"))
        code = (tl.div_rn(number, divisor + tl.zeros_like(number)) + ROUNDER) - ROUNDER
        code = tl.minimum(tl.maximum(code, -127.0), 127.0)
        tl.store(values + d, code.to(tl.int8), mask=d < DIM)
        tl.store(scales + group, scale, mask=group * GROUPED < DIM)
    else:
        d = tl.arange(0, BLOCK_D)
        number = tl.load(x + d, mask=d < DIM, other=0.0)
        tl.store(values + d, number.to(values.dtype.element_ty), mask=d < DIM)


@triton.jit
def _append(
    k,
    v,
    slots,
    k_pages,
    v_pages,
    k_scales,
    v_scales,
    page_stride,
    scale_stride,
    k_stride,
    v_stride,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUPED: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token)
    if slot >= 0:
        page, place = slot // PAGE, head * PAGE + slot % PAGE
        values = page * page_stride + place * DIM
        scales = page * scale_stride + place * (DIM // GROUP_SIZE)
        k += token * k_stride + head * DIM
        v += token * v_stride + head * DIM
        _put(k, k_pages + values, k_scales + scales, DIM, BLOCK_D, GROUPED)
        _put(v, v_pages + values, v_scales + scales, DIM, BLOCK_D, GROUPED)


def append_kv(cache: KVPages, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """See `reference.append_kv`: one program per token and head."""
    strides = PageStrides.of(cache)
    tokens, heads, dim = k.shape
    if not tokens:
        return
    k, v = (x if x.stride()[1:] == (dim, 1) else x.contiguous() for x in (k, v))
    _append[(tokens, heads)](
        k,
        v,
        slots,
        cache.k,
        cache.v,
        strides.k_scale,
        strides.v_scale,
        strides.page_stride,
        strides.scale_stride,
        k.stride(0),
        v.stride(0),
        DIM=dim,
        BLOCK_D=triton.next_power_of_2(dim),
        GROUPED=GROUP if cache.quantised else 0,
        num_warps=1,
        enable_fp_fusion=True,
    )
