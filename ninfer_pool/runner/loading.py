"""Loading a model for a command line: errors name the option and fit one line."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ninfer_pool.errors import PoolError, UsageError
from ninfer_pool.runner import TINY, Runner

OPTIONS = {
    name: "--" + name.replace("_", "-")
    for name in (
        *("draft_tokens", "dtype", "kv_budget", "kv_dtype", "lanes", "max_context"),
        *("max_entries", "min_chunk", "policy", "affinity"),
        *("host_budget", "disk_dir", "disk_budget"),
    )
} | {"grid": "--prefill-chunk"}
"""The option of each field that a command line sets."""


def load_runner(model: str | None, *, kv_budget: str | None, device: str, **options: Any) -> Runner:
    """Load a model with room for its KV; ``options`` as `Runner.from_pretrained` takes them.

    Raises:
        PoolError: a device, folder or size that cannot be used.
    """
    check_device(device)
    try:
        with options_named():
            return Runner.from_pretrained(
                model or TINY, device=device, kv_budget=kv_budget, **options
            )
    except (MemoryError, RuntimeError) as error:
        if "memory" not in str(error):  # any other text is our own bug
            raise
        budget = kv_budget or "the default budget"
        raise UsageError(f"--kv-budget: no memory for the model and {budget}; give less") from None


@contextmanager
def options_named() -> Iterator[None]:
    """Replace the field at the start of a `PoolError` by its command line option."""
    try:
        yield
    except PoolError as error:
        field, colon, rest = str(error).partition(": ")
        if not colon or field not in OPTIONS:
            raise
        raise UsageError(f"{OPTIONS[field]}: {rest}") from error


def check_device(name: str) -> None:
    """Reject a device that this machine does not have.

    Raises:
        UsageError: neither the CPU nor a CUDA device of this machine.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device: {name!r}; needs cpu, cuda or cuda:N")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a driver that is too old warns and is then unavailable
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise UsageError(f"--device: {name!r}; this machine has {count} CUDA devices for torch")
