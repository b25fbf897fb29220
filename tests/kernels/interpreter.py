"""Two repairs of Triton's interpreter, which knows no bfloat16 numbers, only their bits."""

# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def widen(handle: Any) -> Any:
    """A handle's numbers, bf16 as fp32: its 16 bits are fp32's upper ones."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    bits = handle.data.astype(np.uint32) << 16
    return TensorHandle(bits.view(np.float32), tl.float32)


def narrow(handle: Any) -> Any:
    """fp32 numbers as bf16, rounded half to even as cards do it (the interpreter truncates)."""
    number = np.ascontiguousarray(handle.data, dtype=np.float32)
    bits = number.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = np.where(np.isnan(number), 0x7FC0, rounded)
    return TensorHandle(rounded.astype(np.uint16).reshape(handle.data.shape), tl.bfloat16)


def repair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter multiply bf16 matrices as numbers, and round to bf16."""
    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def create_dot(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(builder, widen(a), widen(b), *rest)

    def cast_impl(builder: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            return narrow(source)
        return cast(builder, source, target)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(InterpreterBuilder, "cast_impl", cast_impl)
