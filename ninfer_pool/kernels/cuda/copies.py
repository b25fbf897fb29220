"""Copies of whole pages: within the slab, and between the slab and a lane's state."""

# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 2048
"""Words that one program copies."""


@triton.jit
def _copy(
    source,
    target,
    source_rows,
    target_rows,
    words,
    source_stride,
    target_stride,
    BLOCK: tl.constexpr,
    GATHER: tl.constexpr,
    SCATTER: tl.constexpr,
):
    """One program: BLOCK words of one row; with GATHER or SCATTER that side is indexed."""
    row = tl.program_id(0).to(tl.int64)
    source_row = tl.load(source_rows + row) if GATHER else row
    target_row = tl.load(target_rows + row) if SCATTER else row
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + source_row * source_stride + word, mask=word < words)
    tl.store(target + target_row * target_stride + word, value, mask=word < words)


def _launch(
    source: torch.Tensor,
    target: torch.Tensor,
    source_rows: torch.Tensor | None,
    target_rows: torch.Tensor | None,
) -> None:
    """Copy rows of uint8 (·, page_bytes), as 8-byte words where the page has whole ones."""
    rows = source_rows if source_rows is not None else target_rows
    assert rows is not None
    if not len(rows):
        return
    if all(_whole_words(x) for x in (source, target)):
        source, target = source.view(torch.int64), target.view(torch.int64)
    words = source.shape[1]
    _copy[(len(rows), triton.cdiv(words, BLOCK))](
        source,
        target,
        rows if source_rows is None else source_rows,
        rows if target_rows is None else target_rows,
        words,
        source.stride(0),
        target.stride(0),
        BLOCK=BLOCK,
        GATHER=source_rows is not None,
        SCATTER=target_rows is not None,
        num_warps=4,
        enable_fp_fusion=True,
    )


def _whole_words(x: torch.Tensor) -> bool:
    """Return whether rows of bytes begin and end at 8-byte words."""
    return not any(n % 8 for n in (x.shape[1], x.stride(0), x.storage_offset()))


def copy_pages(slab: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """See `reference.copy_pages`."""
    _launch(slab, slab, sources, targets)


def save_image(slab: torch.Tensor, pages: torch.Tensor, buffer: torch.Tensor) -> None:
    """See `reference.save_image`."""
    _launch(buffer, slab, None, pages)


def load_image(slab: torch.Tensor, pages: torch.Tensor, buffer: torch.Tensor) -> None:
    """See `reference.load_image`."""
    _launch(slab, buffer, pages, None)
