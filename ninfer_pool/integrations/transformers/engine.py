"""A model of the library as an engine: its caches split into pages and images, and rebuilt."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import DynamicCache

from ninfer_pool.core.config import PoolConfig
from ninfer_pool.core.identity import Namespace
from ninfer_pool.core.ledger import Pages
from ninfer_pool.core.operations import CopyPage, LoadImage, Operation, ResetLane, SaveImage
from ninfer_pool.errors import ConfigError
from ninfer_pool.integrations.transformers.layout import (
    CacheLayout,
    LayerTensor,
    StateTensor,
    put_kv,
    put_state,
    states_of,
)

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-5}
LOW_PRECISION = 5e-2
"""RMS ratio within which logits agree where a prefill was cut elsewhere or tokens were decoded:
sums run in another order then. Measured on small models of seven architectures: at most 3e-7 in
fp32, 6e-3 in bf16. This one is for bf16 and fp16."""

Table = Sequence[int] | Pages
Logits = npt.NDArray[np.float32]


def fresh_cache(model: Any) -> Any:
    """Return the empty cache that the library's own ``generate`` would make for ``model``."""
    return DynamicCache(config=model.config.get_text_config(decoder=True))


@functools.cache
def _parameters(forward: Callable[..., Any]) -> frozenset[str]:
    """Return the names of a forward's parameters."""
    return frozenset(inspect.signature(forward).parameters)


def run(model: Any, tokens: Any, cache: Any) -> torch.Tensor:
    """Run ``tokens`` after those in ``cache``; return the logits after the last, fp32 (vocab,).

    Positions are passed explicitly, as the library's ``generate`` does: not every model derives
    them from the cache's length.
    """
    begin, count = cache.get_seq_length(), len(tokens)
    ids = torch.as_tensor(np.asarray(tokens, dtype=np.int64), device=model.device)
    parameters = _parameters(type(model).forward)
    extra: dict[str, Any] = {}
    if "position_ids" in parameters:
        extra["position_ids"] = torch.arange(begin, begin + count, device=model.device)[None]
    if "logits_to_keep" in parameters:
        extra["logits_to_keep"] = 1
    with torch.no_grad():
        found = model(input_ids=ids[None], cache=cache, use_cache=True, return_dict=True, **extra)
    last: torch.Tensor = found.logits[0, -1].float()
    return last


class _Lane:
    """A running sequence: the library's cache object, and the table of its KV's pages."""

    __slots__ = ("cache", "table")

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.table: Table | None = None


class TransformersEngine:
    """Fulfils `ninfer_pool.testing.adapter.EngineAdapter` for a model of the library.

    The slab is one uint8 (num_pages, page_bytes) on the model's device; a page holds K and V of
    its positions over all layers that have them. A lane is one cache object of the library's
    own class. The KV in a page equals that of the cache object byte for byte.
    """

    def __init__(
        self, model: Any, *, config: PoolConfig, layout: CacheLayout, namespace: Namespace
    ) -> None:
        self.model, self.config, self.layout, self.namespace = model, config, layout, namespace
        self.tolerance = TOLERANCE.get(model.dtype, LOW_PRECISION)
        self.vocab_size: int = model.config.get_text_config(decoder=True).vocab_size
        size = (config.num_pages, config.page_bytes)
        with torch.inference_mode(mode=False):  # else it could only be written in that mode
            self.slab = torch.zeros(size, dtype=torch.uint8, device=model.device)
            self._pages = [
                (kv, kv.keys.view(self.slab), kv.values.view(self.slab)) for kv in layout.page
            ]
        self._lanes = [_Lane(fresh_cache(model)) for _ in range(config.lanes)]

    # -- computing -------------------------------------------------------------------------

    def prefill(self, tokens: Any, *, lane: int, begin: int, table: Table) -> Logits:
        """Compute positions ``[begin, begin + len(tokens))`` and write their KV into pages.

        ``table`` has the page ids. Returns the logits after the last token, fp32 (vocab,).
        """
        last = run(self.model, tokens, self.continued(lane, begin=begin, table=table))
        self.store(lane, begin=begin, table=table)
        return last.cpu().numpy()

    def decode(self, token: int, *, lane: int, begin: int, table: Table) -> Logits:
        """Compute the position ``begin`` alone: see `prefill`."""
        return self.prefill([token], lane=lane, begin=begin, table=table)

    def continued(self, lane: int, *, begin: int, table: Table) -> Any:
        """Return the lane's cache object with the KV of exactly the positions ``[0, begin)``.

        The KV is read from the pages unless this table's own run has left it there: a plain
        model gets no operation when another request takes its lane.
        """
        held = self._lanes[lane]
        if held.table is not table or self.position(lane) != begin:
            pages = self._ids(table[: -(-begin // self.config.page_tokens)])
            for kv, keys, values in self._pages:
                parts = [(kv.keys, keys), (kv.values, values)]
                put_kv(held.cache.layers[kv.layer], *(_read(*p, pages, begin) for p in parts))
            held.table = table
        return held.cache

    def position(self, lane: int) -> int:
        """Return the number of positions in the lane's cache object."""
        length: int = self._lanes[lane].cache.get_seq_length()
        return length

    def store(self, lane: int, *, begin: int, table: Table) -> None:
        """Write the KV of the lane's positions from ``begin`` on into the pages of ``table``."""
        size, cache = self.config.page_tokens, self._lanes[lane].cache
        at = np.arange(begin, cache.get_seq_length())
        pages = self._ids(np.asarray(table)[at // size])
        slots = self._ids(at % size)
        for kv, keys, values in self._pages:
            layer = cache.layers[kv.layer]
            for place, rows, held in (
                (kv.keys, keys, layer.keys),
                (kv.values, values, layer.values),
            ):
                _check(place, held, (1, place.shape[0], held.shape[2], place.shape[2]))
                new = held[0, :, begin:].transpose(0, 1)
                rows[pages, :, slots] = new.to(self.slab.device)

    def _ids(self, numbers: Any) -> torch.Tensor:
        ids = np.asarray(numbers, dtype=np.int64)
        return torch.from_numpy(ids).to(self.slab.device)

    # -- the pool's operations -------------------------------------------------------------

    def execute(self, operations: Iterable[Operation]) -> None:
        """Carry out the pool's operations in order."""
        for operation in operations:
            match operation:
                case CopyPage(source, target):
                    self.copy_page(source, target)
                case SaveImage(lane, pages):
                    self.save_image(lane, pages)
                case LoadImage(pages, lane):
                    self.load_image(lane, pages)
                case ResetLane(lane):
                    self.reset(lane)

    def save_image(self, lane: int, pages: Sequence[int]) -> None:
        """Write the lane's convolution and recurrent states to ``pages``."""
        row = torch.zeros(1, len(pages) * self.config.page_bytes, dtype=torch.uint8)
        row = row.to(self.slab.device)
        layers = self._lanes[lane].cache.layers
        for state in self.layout.image:
            state.region.view(row)[0].copy_(_state(layers[state.layer], state))
        self.slab[self._ids(pages)] = row.view(len(pages), -1)

    def load_image(self, lane: int, pages: Sequence[int]) -> None:
        """Replace the lane's cache object by a new one with the states in ``pages``."""
        self.reset(lane)
        row = self.slab[self._ids(pages)].view(1, -1)
        for state in self.layout.image:
            held = state.region.view(row)[0].to(state.region.device)
            layer = self._lanes[lane].cache.layers[state.layer]
            put_state(layer, kind=state.kind, index=state.index, state=held)

    def reset(self, lane: int) -> None:
        """Replace the lane's cache object by an empty one."""
        self._lanes[lane] = _Lane(fresh_cache(self.model))

    def copy_page(self, source: int, target: int) -> None:
        """Copy all bytes of a page."""
        self.slab[target] = self.slab[source]

    def read_page(self, page: int) -> bytes:
        """Return a page's bytes."""
        return self.slab[page].cpu().numpy().tobytes()

    def poison_page(self, page: int) -> None:
        """Fill a page with bytes that are NaN in every float type."""
        self.slab[page] = 0xFF


def _read(place: LayerTensor, rows: torch.Tensor, pages: torch.Tensor, count: int) -> torch.Tensor:
    """Return the first ``count`` positions in ``pages``, shaped as in the library's layers."""
    heads = rows[pages].transpose(0, 1).flatten(1, 2)[:, :count]
    return heads[None].to(place.device)


def _state(layer: Any, wanted: StateTensor) -> torch.Tensor:
    for kind, index, tensor in states_of(layer):
        if (kind, index) == (wanted.kind, wanted.index):
            _check(wanted.region, tensor, wanted.region.shape)
            return tensor
    raise ConfigError(f"cache: layer {wanted.layer} has no {wanted.kind} state")


def _check(place: LayerTensor, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tensor.dtype != place.dtype or tuple(tensor.shape) != shape:
        raise ConfigError(
            f"cache: {tensor.dtype} {tuple(tensor.shape)}; at construction it was {place.dtype} "
            f"{shape}: a model that was changed needs a pool of its own"
        )
