"""Which implementation a call runs: the reference on CPU, Triton on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

OLDEST_CAPABILITY: Final = (7, 0)
"""Triton compiles for it and later: see tests/kernels/test_compile.py. Older cards run the
reference."""

_FILES: Final = {
    "conv_prefill": "conv",
    "conv_step": "conv",
    "copy_pages": "copies",
    "first_difference": "compare",
    "load_image": "copies",
    "save_image": "copies",
}
"""The file in cuda/ of each operation whose file has another name."""


def dispatched(operation: Callable[P, R]) -> Callable[P, R]:
    """Return ``operation`` of the reference, run by Triton where its tensors are on CUDA.

    Triton is imported by the first such call. Where it is not installed, or does not support the
    card, the reference runs there too.
    """

    @wraps(operation)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        x = next(x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
        if x.is_cuda and _runs_triton(x.device):
            with torch.cuda.device(x.device):
                result: R = _in_triton(operation.__name__)(*args, **kwargs)
                return result
        return operation(*args, **kwargs)

    return run


@cache
def _runs_triton(device: torch.device) -> bool:
    """Return whether Triton is installed and compiles for this card."""
    if find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= OLDEST_CAPABILITY


@cache
def _in_triton(name: str) -> Callable[..., Any]:
    """Return the launcher of an operation."""
    module = import_module(f"ninfer_pool.kernels.cuda.{_FILES.get(name, name)}")
    launcher: Callable[..., Any] = getattr(module, name)
    return launcher
