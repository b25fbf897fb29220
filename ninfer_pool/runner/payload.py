"""The slab's pages as bytes, for tiers and files."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ninfer_pool.runner.slab import Region, Slab
from ninfer_pool.tiers import Regions, Row
from ninfer_pool.tiers.payload import copy_rows, rows_of


class SlabPayload:
    """A `Payload` over a `Slab`.

    On a CPU rows are views of the pages. On CUDA host memory is pinned, and copies run on the
    current stream: after the work already queued there and before any later work.
    """

    def __init__(self, slab: Slab) -> None:
        self._pages = slab.pages
        self._array = None if slab.pages.is_cuda else slab.pages.numpy()
        layout = slab.layout
        page = ",".join(map(_name, layout.page))
        image = ",".join(map(_name, layout.image))
        self._layout = f"ninfer-1;{layout.kv_dtype};page:{page};image:{image}"
        self._regions = tuple(
            (r.offset, r.shape[0], r.dtype.itemsize * r.shape[2]) for r in layout.page
        )

    @property
    def layout(self) -> str:
        """The offset, dtype and shape of every tensor in a page and in an image."""
        return self._layout

    @property
    def regions(self) -> Regions:
        """Each layer's K and V, and their scales: (kv_heads, page_tokens, …)."""
        return self._regions

    def read(self, pages: Sequence[int], rows: Sequence[Row]) -> None:
        """Copy pages to host memory."""
        if self._array is not None:
            copy_rows(rows_of(self._array, pages), rows)
            return
        for page, row in zip(pages, rows, strict=True):
            torch.from_numpy(row).copy_(self._pages[page], non_blocking=True)
        torch.cuda.current_stream(self._pages.device).synchronize()

    def write(self, pages: Sequence[int], rows: Sequence[Row]) -> None:
        """Copy host memory to pages."""
        if self._array is not None:
            copy_rows(rows, rows_of(self._array, pages))
            return
        for page, row in zip(pages, rows, strict=True):
            self._pages[page].copy_(torch.from_numpy(row), non_blocking=True)
        torch.cuda.current_stream(self._pages.device).synchronize()

    def views(self, pages: Sequence[int]) -> Sequence[Row] | None:
        """Return the pages themselves; None on CUDA."""
        return None if self._array is None else rows_of(self._array, pages)

    def allocate(self, num_pages: int) -> npt.NDArray[np.uint8]:
        """Return host memory, uint8 (num_pages, page_bytes), pinned on CUDA."""
        shape = (num_pages, self._pages.shape[1])
        if self._array is not None:
            return np.empty(shape, dtype=np.uint8)
        pinned: npt.NDArray[np.uint8] = torch.empty(
            shape, dtype=torch.uint8, pin_memory=True
        ).numpy()
        return pinned


def _name(region: Region) -> str:
    shape = "x".join(map(str, region.shape))
    return f"{region.offset}:{str(region.dtype).removeprefix('torch.')}:{shape}"
