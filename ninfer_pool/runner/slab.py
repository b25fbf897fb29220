"""The page slab and the lanes' working state: where the core's operations are carried out.

Everything retained lies in pages of one slab, uint8 (num_pages, page_bytes); a lane's state is one
contiguous buffer with typed views into it, so saving or loading an image is one copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ninfer_pool import kernels
from ninfer_pool.core.operations import CopyPage, LoadImage, Operation, ResetLane, SaveImage
from ninfer_pool.errors import ConfigError
from ninfer_pool.kernels import GROUP, PAGE_TOKENS, KVPages

KV_TYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8-g64": torch.int8,
}
ALIGN = 16
"""Bytes that every tensor inside a page or an image is aligned to."""
MOST_LANES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneState:
    """The linear layers' state: of one lane, or of B lanes with B before every shape.

    ``recurrent`` (Ll, Hv, Dk, Dv) fp32; ``conv`` (Ll, C, W - 1) in the model's dtype, the
    convolution's last inputs, oldest first. May be views.
    """

    recurrent: torch.Tensor
    conv: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a model's pages and images must hold.

    ``attention_layers`` with K and V of ``kv_heads`` x ``head_dim`` each, the draft head's layer
    included; the shapes of `LaneState`; ``hidden`` and ``dtype`` of the model's output.
    """

    attention_layers: int
    kv_heads: int
    head_dim: int
    recurrent_shape: tuple[int, ...]
    conv_shape: tuple[int, ...]
    hidden: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A tensor inside a page or image: its first byte, dtype and shape."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        """The byte after its last."""
        return self.offset + math.prod(self.shape) * self.dtype.itemsize

    def view(self, rows: torch.Tensor) -> torch.Tensor:
        """Return it in each of ``rows``, uint8 (n, bytes), as (n, *shape) without a copy."""
        typed = rows[:, self.offset : self.end].view(self.dtype)
        return torch.unflatten(typed, 1, self.shape)


def _pack(parts: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> tuple[list[Region], int]:
    regions, end = [], 0
    for dtype, shape in parts:
        regions.append(Region(offset=-(-end // ALIGN) * ALIGN, dtype=dtype, shape=shape))
        end = regions[-1].end
    return regions, -(-end // ALIGN) * ALIGN


class SlabLayout:
    """What a page and an image of one model hold, and how many bytes each takes.

    A page holds `PAGE_TOKENS` positions of K and V of every layer that has them; with
    ``int8-g64`` each followed by its scales. An image holds the recurrent state (fp32), the
    convolution's columns and the hidden tail.

    Raises:
        ConfigError: an unknown ``kv_dtype``, or heads that INT8 groups do not fit.
    """

    def __init__(self, sizes: Sizes, *, kv_dtype: str) -> None:
        if kv_dtype not in KV_TYPES:
            raise ConfigError(f"kv_dtype: {kv_dtype!r}; needs one of {', '.join(KV_TYPES)}")
        if kv_dtype == "int8-g64" and sizes.head_dim % GROUP:
            raise ConfigError(
                f"kv_dtype: int8-g64 with head_dim {sizes.head_dim}; needs a multiple of {GROUP}"
            )
        self.kv_dtype = kv_dtype
        one = (sizes.kv_heads, PAGE_TOKENS, sizes.head_dim)
        each = [(KV_TYPES[kv_dtype], one)]
        if kv_dtype == "int8-g64":
            each.append((torch.float16, (*one[:2], sizes.head_dim // GROUP)))
        self._of_layer = 2 * len(each)
        self.page, self.page_bytes = _pack(each * 2 * sizes.attention_layers)
        state = [
            (torch.float32, sizes.recurrent_shape),
            (sizes.dtype, sizes.conv_shape),
            (sizes.dtype, (sizes.hidden,)),
        ]
        self.image, self.image_bytes = _pack(state)

    @property
    def image_pages(self) -> int:
        """Pages that an image takes."""
        return -(-self.image_bytes // self.page_bytes)

    def caches(self, slab: torch.Tensor) -> list[KVPages]:
        """Return each layer's K and V in the slab."""
        views = [region.view(slab) for region in self.page]
        groups = [views[i : i + self._of_layer] for i in range(0, len(views), self._of_layer)]
        if self._of_layer == 2:
            return [KVPages(k=k, v=v) for k, v in groups]
        return [KVPages(k=k, k_scale=ks, v=v, v_scale=vs) for k, ks, v, vs in groups]


class Slab:
    """A slab of pages and the working state of every lane, on one device.

    ``caches`` holds one `KVPages` a layer; ``states`` all lanes' `LaneState` and ``tails`` their
    hidden tails (lanes, hidden), the model's output at the lane's last position. All are views.
    """

    def __init__(
        self, layout: SlabLayout, *, num_pages: int, lanes: int, device: str | torch.device = "cpu"
    ) -> None:
        if not 1 <= lanes <= MOST_LANES:
            raise ConfigError(f"lanes: {lanes}; needs 1 to {MOST_LANES}")
        self.layout = layout
        self.lanes = lanes
        self.slab = torch.zeros(num_pages, layout.page_bytes, dtype=torch.uint8, device=device)
        self.caches = layout.caches(self.slab)
        rows = (lanes, layout.image_pages * layout.page_bytes)
        self._working = torch.zeros(rows, dtype=torch.uint8, device=device)
        recurrent, conv, tail = (region.view(self._working) for region in layout.image)
        self.states = LaneState(recurrent=recurrent, conv=conv)
        self.tails = tail

    @property
    def device(self) -> torch.device:
        """Where the slab lies."""
        return self.slab.device

    def state(self, lane: int) -> LaneState:
        """Return one lane's state: views, so that what is written there is the lane's."""
        return LaneState(recurrent=self.states.recurrent[lane], conv=self.states.conv[lane])

    def execute(self, operations: Iterable[Operation]) -> None:
        """Carry out the core's operations in order; copies that follow one another go as one."""
        copies: list[CopyPage] = []
        for operation in operations:
            if isinstance(operation, CopyPage):
                copies.append(operation)
                continue
            self._copy(copies)
            self._one(operation)
        self._copy(copies)

    def _one(self, operation: SaveImage | LoadImage | ResetLane) -> None:
        working = self._working[operation.lane].view(-1, self.layout.page_bytes)
        if isinstance(operation, ResetLane):
            working.zero_()
        elif isinstance(operation, SaveImage):
            kernels.save_image(self.slab, self.ids(operation.pages), working)
        else:
            kernels.load_image(self.slab, self.ids(operation.pages), working)

    def _copy(self, copies: list[CopyPage]) -> None:
        if copies:
            sources = self.ids([copy.source for copy in copies])
            kernels.copy_pages(self.slab, sources, self.ids([copy.target for copy in copies]))
            copies.clear()

    def ids(self, pages: Sequence[int]) -> torch.Tensor:
        """Return page ids as int64 on the device."""
        return torch.tensor(pages, dtype=torch.int64, device=self.device)
