"""The page slab and the lanes' working state: where the pool's operations are carried out.

All retained data is stored in pages of one slab, uint8 (num_pages, page_bytes). A lane's state is
one contiguous buffer with typed views into it, so saving or loading an image is one copy.
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
from ninfer_pool.runner.config import ModelConfig

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

    ``recurrent`` is fp32 (Ll, Hv, Dk, Dv). ``conv`` (Ll, C, W - 1), in the model's dtype, holds
    the convolution's last inputs, oldest first. Both may be views.
    """

    recurrent: torch.Tensor
    conv: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A tensor in a page or image: its first byte, dtype and shape."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        """The first byte after it."""
        return self.offset + math.prod(self.shape) * self.dtype.itemsize

    def view(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the tensor of each of ``rows``, uint8 (n, bytes), as (n, *shape), not copied."""
        typed = rows[:, self.offset : self.end].view(self.dtype)
        return torch.unflatten(typed, 1, self.shape)


def _pack(parts: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> tuple[list[Region], int]:
    regions, end = [], 0
    for dtype, shape in parts:
        regions.append(Region(offset=-(-end // ALIGN) * ALIGN, dtype=dtype, shape=shape))
        end = regions[-1].end
    return regions, -(-end // ALIGN) * ALIGN


class SlabLayout:
    """The tensors in a page and in an image of one model, and the bytes that each takes.

    A page holds `PAGE_TOKENS` positions of K and V of every layer that has them; with
    ``int8-g64`` each followed by its scales. An image holds the recurrent state (fp32), the
    convolution's columns and the hidden tail.

    Args:
        dtype: of the model's output and of its convolution columns.
        kv_dtype: one of `KV_TYPES`.
        draft_layers: layers of the draft head, whose KV is stored after the model's.

    Raises:
        ConfigError: an unknown ``kv_dtype``, or heads that INT8 groups do not fit.
    """

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, kv_dtype: str, draft_layers: int
    ) -> None:
        heads, dim = config.num_key_value_heads, config.head_dim
        quantised = kv_dtype == "int8-g64"
        if kv_dtype not in KV_TYPES:
            raise ConfigError(f"kv_dtype: {kv_dtype!r}; needs one of {', '.join(KV_TYPES)}")
        if quantised and dim % GROUP:
            raise ConfigError(
                f"kv_dtype: {kv_dtype} with head_dim {dim}; needs a multiple of {GROUP}"
            )
        self.kv_dtype = kv_dtype
        tensors = [(KV_TYPES[kv_dtype], (heads, PAGE_TOKENS, dim))]
        if quantised:
            tensors.append((torch.float16, (heads, PAGE_TOKENS, dim // GROUP)))
        self._per_layer = 2 * len(tensors)
        layers = config.num_attention_layers + draft_layers
        self.page, self.page_bytes = _pack(tensors * 2 * layers)
        state = [
            (torch.float32, config.recurrent_shape),
            (dtype, config.conv_shape),
            (dtype, (config.hidden_size,)),
        ]
        self.image, self.image_bytes = _pack(state)

    @property
    def image_pages(self) -> int:
        """Pages per image."""
        return -(-self.image_bytes // self.page_bytes)

    def caches(self, pages: torch.Tensor) -> list[KVPages]:
        """Return each layer's K and V as views of ``pages``, uint8 (num_pages, page_bytes)."""
        views = [region.view(pages) for region in self.page]
        groups = [views[i : i + self._per_layer] for i in range(0, len(views), self._per_layer)]
        if self._per_layer == 2:
            return [KVPages(k=k, v=v) for k, v in groups]
        return [KVPages(k=k, k_scale=ks, v=v, v_scale=vs) for k, ks, v, vs in groups]


class Slab:
    """A slab of pages and the working state of every lane, on one device.

    Attributes:
        pages: uint8 (num_pages, page_bytes).
        caches: one `KVPages` per layer, views of the pages.
        states: the `LaneState` of all lanes, views.
        tails: (lanes, hidden), the model's output at each lane's last position, a view.

    Raises:
        ConfigError: not 1 to 8 lanes.
    """

    def __init__(
        self, layout: SlabLayout, *, num_pages: int, lanes: int, device: str | torch.device = "cpu"
    ) -> None:
        if not 1 <= lanes <= MOST_LANES:
            raise ConfigError(f"lanes: {lanes}; needs 1 to {MOST_LANES}")
        self.layout = layout
        self.lanes = lanes
        self.pages = torch.zeros(num_pages, layout.page_bytes, dtype=torch.uint8, device=device)
        self.caches = layout.caches(self.pages)
        rows = (lanes, layout.image_pages * layout.page_bytes)
        self._working = torch.zeros(rows, dtype=torch.uint8, device=device)
        recurrent, conv, self.tails = (region.view(self._working) for region in layout.image)
        self.states = LaneState(recurrent=recurrent, conv=conv)

    @property
    def device(self) -> torch.device:
        """The device of the pages and the states."""
        return self.pages.device

    def state(self, lane: int) -> LaneState:
        """Return one lane's state as views: a write to them changes the lane."""
        return LaneState(recurrent=self.states.recurrent[lane], conv=self.states.conv[lane])

    def execute(self, operations: Iterable[Operation]) -> None:
        """Carry out the pool's operations in order; neighbouring page copies are one launch."""
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
            kernels.save_image(self.pages, self.ids(operation.pages), working)
        else:
            kernels.load_image(self.pages, self.ids(operation.pages), working)

    def _copy(self, copies: list[CopyPage]) -> None:
        if copies:
            sources = self.ids([copy.source for copy in copies])
            kernels.copy_pages(self.pages, sources, self.ids([copy.target for copy in copies]))
            copies.clear()

    def ids(self, pages: Sequence[int]) -> torch.Tensor:
        """Return page ids as int64 on the device."""
        return torch.tensor(pages, dtype=torch.int64, device=self.device)
