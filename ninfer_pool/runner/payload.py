"""The store's pages as bytes, for tiers and files."""

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

    On a CPU the pages themselves are handed out. On CUDA copies run on the current stream, so
    after what was computed and before what will be, and host memory is pinned.
    """

    def __init__(self, store: Slab) -> None:
        self._slab = store.slab
        self._cuda = store.device.type == "cuda"
        self._array = None if self._cuda else store.slab.numpy()
        layout = store.layout
        page = ",".join(map(_name, layout.page))
        image = ",".join(map(_name, layout.image))
        self._layout = f"ninfer-1;{layout.kv_dtype};page:{page};image:{image}"
        self._regions = tuple(
            (r.offset, r.shape[0], r.dtype.itemsize * r.shape[2]) for r in layout.page
        )

    @property
    def layout(self) -> str:
        """Every tensor in a page and in an image: where, what type, what shape."""
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
            torch.from_numpy(row).copy_(self._slab[page], non_blocking=True)
        torch.cuda.current_stream(self._slab.device).synchronize()

    def write(self, pages: Sequence[int], rows: Sequence[Row]) -> None:
        """Copy host memory to pages."""
        if self._array is not None:
            copy_rows(rows, rows_of(self._array, pages))
            return
        for page, row in zip(pages, rows, strict=True):
            self._slab[page].copy_(torch.from_numpy(row), non_blocking=True)
        torch.cuda.current_stream(self._slab.device).synchronize()

    def views(self, pages: Sequence[int]) -> Sequence[Row] | None:
        """Return the pages themselves; None on CUDA."""
        return None if self._array is None else rows_of(self._array, pages)

    def allocate(self, num_pages: int) -> npt.NDArray[np.uint8]:
        """Return host memory, pinned on CUDA."""
        shape = (num_pages, self._slab.shape[1])
        if self._cuda:
            pinned: npt.NDArray[np.uint8] = torch.empty(
                shape, dtype=torch.uint8, pin_memory=True
            ).numpy()
            return pinned
        return np.empty(shape, dtype=np.uint8)


def _name(region: Region) -> str:
    shape = "x".join(map(str, region.shape))
    return f"{region.offset}:{str(region.dtype).removeprefix('torch.')}:{shape}"
