"""Causal depthwise convolution with silu, continued from the columns before."""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _input(x, columns, stride, t, c, mask, WIDTH: tl.constexpr):
    """Return input t of channels c: from ``columns`` where t < 0, else from ``x``."""
    before = tl.load(columns + c * (WIDTH - 1) + (t + WIDTH - 1), mask=mask & (t < 0), other=0.0)
    return tl.where(t < 0, before, tl.load(x + t * stride + c, mask=mask & (t >= 0), other=0.0))


# The address of a lane's columns must not choose between variants of the kernel.
@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["columns"])
def _convolve(
    x,
    weight,
    columns,
    y,
    after,
    stride,
    tokens,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One program: BLOCK_T tokens of BLOCK_C channels of one lane.

    Writes the columns after each token where EACH, else after the last only.
    """
    lane = tl.program_id(2).to(tl.int64)
    x += lane * tokens * stride
    columns += lane * CHANNELS * (WIDTH - 1)
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    c = (tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    mask = (t < tokens) & (c < CHANNELS)
    total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for j in tl.static_range(WIDTH):
        tap = tl.load(weight + c * WIDTH + j, mask=c < CHANNELS, other=0.0).to(tl.float32)
        value = _input(x, columns, stride, t + (j - WIDTH + 1), c, mask, WIDTH)
        total += value.to(tl.float32) * tap
    result = total * tl.sigmoid(total)
    tl.store(y + (lane * tokens + t) * CHANNELS + c, result.to(y.dtype.element_ty), mask=mask)
    kept = mask if EACH else mask & (t == tokens - 1)
    place = lane * tokens + t if EACH else lane + t * 0
    for j in tl.static_range(WIDTH - 1):
        value = _input(x, columns, stride, t + (j - WIDTH + 2), c, kept, WIDTH)
        tl.store(after + (place * CHANNELS + c) * (WIDTH - 1) + j, value, mask=kept)


def _launch(
    x: torch.Tensor, weight: torch.Tensor, columns: torch.Tensor, after: torch.Tensor
) -> torch.Tensor:
    """Convolve x (B, T, C) and fill ``after``; return y (B, T, C)."""
    lanes, tokens, channels = x.shape
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.stride(2) != 1 or (lanes > 1 and x.stride(0) != tokens * x.stride(1)):
        x = x.contiguous()
    block_t, block_c = min(16, triton.next_power_of_2(tokens)), 128
    grid = (triton.cdiv(tokens, block_t), triton.cdiv(channels, block_c), lanes)
    _convolve[grid](
        x,
        weight.contiguous(),
        columns.contiguous(),
        y,
        after,
        x.stride(1),
        tokens,
        CHANNELS=channels,
        WIDTH=weight.shape[1],
        EACH=after.dim() == 4,
        BLOCK_T=block_t,
        BLOCK_C=block_c,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return y


def conv_prefill(
    x: torch.Tensor, weight: torch.Tensor, columns: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.conv_prefill`."""
    after = torch.empty_like(columns, memory_format=torch.contiguous_format)
    return _launch(x[None], weight, columns, after)[0], after


def conv_step(
    x: torch.Tensor, weight: torch.Tensor, columns: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.conv_step`."""
    after = columns.new_empty((*x.shape, columns.shape[2]))
    return _launch(x, weight, columns, after), after
