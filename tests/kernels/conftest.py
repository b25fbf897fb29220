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


if not has_cuda():
    os.environ["TRITON_INTERPRET"] = "1"

# Helpers without doctests, which collection would import even where torch or triton is missing.
collect_ignore = ["cases.py", "compile_kernels.py", "interpreter.py", "made.py"]
