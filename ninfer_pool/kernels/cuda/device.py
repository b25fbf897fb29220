"""The properties of a device that choose a kernel's tiles, next to its shapes."""

from __future__ import annotations

import torch


def capability(x: torch.Tensor) -> int:
    """Return the compute capability of x's device, 90 for 9.0; 80 for the interpreter's CPU."""
    if x.device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(x.device)
    return 10 * major + minor


def precision(x: torch.Tensor) -> str:
    """Return the form of products of fp32 matrices: three tf32 products where the device has them.

    Both forms keep fp32's accuracy; plain tf32 (10 bits) would not.
    """
    return "tf32x3" if capability(x) >= 80 else "ieee"


def attention_tile(q: torch.Tensor) -> tuple[int, int]:
    """Return the rows of q (…, D) and the positions that one step of attention multiplies.

    Tiles of q, K and V fit 64 KiB of shared memory before 8.0, else 99 KiB. Before 8.0 Triton
    multiplies without tensor cores and unrolls each product, so tiles are smaller there.
    """
    row_bytes = q.shape[-1] * q.element_size()
    rooms = (8192, 8192) if capability(q) < 80 else (16384, 32768)
    rows, columns = (max(16, min(64, room // row_bytes)) for room in rooms)
    return 1 << rows.bit_length() - 1, 1 << columns.bit_length() - 1


def stages(q: torch.Tensor) -> int:
    """Return how many tiles of pages are loaded at once: two where shared memory allows."""
    return 2 if capability(q) >= 80 and q.element_size() == 2 else 1
