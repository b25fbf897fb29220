"""Without a card, Triton's kernels run in its interpreter."""

from __future__ import annotations

from tests import triton_mode

triton_mode.choose()

# Helpers without doctests, which collection would import even where torch or triton is missing.
collect_ignore = ["cases.py", "compile_kernels.py", "interpreter.py", "made.py"]
