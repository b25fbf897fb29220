"""What a kernel's tiles depend on beside its shapes."""

from __future__ import annotations

import torch


def capability(x: torch.Tensor) -> int:
    """Return the compute capability of x's device, 90 for 9.0; 80 for the interpreter's CPU."""
    if x.device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(x.device)
    return 10 * major + minor


def precision(x: torch.Tensor) -> str:
    """Return how products of fp32 matrices are made: three tf32 products where there are any.

    Both ways keep fp32's accuracy; plain tf32 (10 bits) would not.
    """
    return "tf32x3" if capability(x) >= 80 else "ieee"


def attention_tile(q: torch.Tensor) -> tuple[int, int]:
    """Return the rows of q (…, D) and the positions that one step of attention multiplies.

    So many that tiles of q, K and V fit 64 KiB of shared memory before 8.0, else 99 KiB; before 8.0
    Triton multiplies without tensor cores, each product in the code, which wants to stay short.
    """
    row_bytes = q.shape[-1] * q.element_size()
    rooms = (8192, 8192) if capability(q) < 80 else (16384, 32768)
    rows, columns = (max(16, min(64, room // row_bytes)) for room in rooms)
    return 1 << rows.bit_length() - 1, 1 << columns.bit_length() - 1


def stages(q: torch.Tensor) -> int:
    """Return how many tiles of pages are on their way at once: two where memory has the room."""
    return 2 if capability(q) >= 80 and q.element_size() == 2 else 1
