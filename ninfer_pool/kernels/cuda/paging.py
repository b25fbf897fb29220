"""Parts that the attention kernels share: a page's tile, and one step of the running softmax."""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ninfer_pool.kernels.pages import GROUP, PAGE_TOKENS, KVPages

PAGE = tl.constexpr(PAGE_TOKENS)
GROUP_SIZE = tl.constexpr(GROUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageStrides:
    """The strides by which a kernel addresses `KVPages`; within a page (G, 64, D) is dense."""

    page_stride: int
    """Elements from one page to the next, the same for K and V."""
    scale_stride: int
    k_scale: torch.Tensor
    """The scales, or K itself where there are none; a kernel then never reads it."""
    v_scale: torch.Tensor

    @classmethod
    def of(cls, cache: KVPages) -> PageStrides:
        """Return the strides of ``cache``, checked."""
        k, v = cache.k, cache.v
        k_scale = k if cache.k_scale is None else cache.k_scale
        v_scale = v if cache.v_scale is None else cache.v_scale
        assert k.stride() == v.stride(), "K and V have equal strides"
        assert k_scale.stride() == v_scale.stride(), "their scales have equal strides"
        for x in (k, k_scale):
            inner = (PAGE_TOKENS * x.shape[3], x.shape[3], 1)
            assert x.stride()[1:] == inner, "a page's heads, tokens and elements are dense"
        return cls(
            page_stride=k.stride(0),
            scale_stride=k_scale.stride(0),
            k_scale=k_scale,
            v_scale=v_scale,
        )


@triton.jit
def load_tile(
    values,
    scales,
    page,
    place,
    valid,
    page_stride,
    scale_stride,
    dtype: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    """Return tokens (N,) of one layer's K or V as a tile (N, BLOCK_D) of ``dtype``.

    A token is stored in ``page`` (N,) at ``place`` (N,) = head × 64 + offset. Only ``valid`` (N,)
    ones are read; the others are zeros.
    """
    d = tl.arange(0, BLOCK_D)[None, :]
    mask = valid[:, None] & (d < DIM)
    tile = tl.load(values + (page * page_stride + place * DIM)[:, None] + d, mask=mask, other=0)
    if QUANTISED:
        n: tl.constexpr = valid.shape[0]
        groups: tl.constexpr = BLOCK_D // GROUP_SIZE
        group = tl.arange(0, groups)[None, :]
        start = (page * scale_stride + place * (DIM // GROUP_SIZE))[:, None]
        inside = valid[:, None] & (group * GROUP_SIZE < DIM)
        scale = tl.load(scales + start + group, mask=inside, other=0.0).to(tl.float32)
        grouped = tl.reshape(tile.to(tl.float32), (n, groups, GROUP_SIZE))
        tile = tl.reshape(grouped * scale[:, :, None], (n, BLOCK_D))
    return tile.to(dtype)


@triton.jit
def attend(q, k, v, seen, scale, highest, total, acc, PRECISION: tl.constexpr):
    """Fold the scores of q (M, D) with k, v (N, D) into the running softmax (Milakov 2018).

    ``highest`` (M,) is the largest score so far, ``total`` the sum of exp2(score - highest), acc
    (M, D) the same sum weighted by v. ``scale`` includes log2(e). A score not ``seen`` weighs 0.
    """
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    score = tl.where(seen, score, float("-inf"))
    higher = tl.maximum(highest, tl.max(score, axis=1))
    # A row without scores so far keeps -inf: subtract 0 there, because -inf - -inf is NaN.
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp2(score - base[:, None])
    shrink = tl.exp2(highest - base)
    total = total * shrink + tl.sum(weight, axis=1)
    acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return higher, total, acc
