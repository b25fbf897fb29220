"""Without a card, Triton's kernels run in its interpreter: that is chosen before it is imported."""

from __future__ import annotations

import os


def has_cuda() -> bool:
    """Whether torch is installed and sees a card."""
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def choose() -> None:
    """Choose the interpreter where there is no card; whoever first imports Triton must ask."""
    if not has_cuda():
        os.environ["TRITON_INTERPRET"] = "1"
