"""The first difference of two token sequences on the device."""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096
"""Tokens that one program compares."""


@triton.jit(do_not_specialize=["n"])
def _first_difference(a, b, firsts, n, BLOCK: tl.constexpr):
    """One program: the first difference within BLOCK tokens, or n."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    left = tl.load(a + i, mask=i < n, other=0)
    right = tl.load(b + i, mask=i < n, other=0)
    tl.store(firsts + tl.program_id(0), tl.min(tl.where(left != right, i, n), axis=0))


def first_difference(a: torch.Tensor, b: torch.Tensor) -> int:
    """See `reference.first_difference`. The result is read back, which synchronises."""
    n = len(a)
    if not n:
        return 0
    firsts = a.new_empty(triton.cdiv(n, BLOCK))
    _first_difference[(len(firsts),)](
        a, b, firsts, n, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=True
    )
    return int(firsts.min())
