"""Host memory as a tier: one slab of pages, taken and given back page by page."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ninfer_pool.core.config import PoolConfig
from ninfer_pool.tiers.parts import Draft, Part, pages_in
from ninfer_pool.tiers.payload import Payload, Row, Source, copy_rows, rows_of

Ids: TypeAlias = npt.NDArray[np.int32]


class HostMemory:
    """The medium of the host tier. Without a ``payload`` it only counts (simulation).

    A run takes every page that it touches, so at most one page more than its tokens fill; an
    image takes what it takes on the device. Nothing is ever allocated after the start.
    """

    def __init__(self, config: PoolConfig, payload: Payload | None, *, budget_bytes: int) -> None:
        self._config = config
        self.budget = budget_bytes // config.page_bytes * config.page_bytes
        count = self.budget // config.page_bytes
        self._slab = None if payload is None else payload.allocate(count)
        self._free = np.arange(count - 1, -1, -1, dtype=np.int32)
        self._top = count
        self._lock = Lock()  # a fetch from disk takes pages on a thread of its own

    @property
    def used(self) -> int:
        """Bytes taken."""
        return (len(self._free) - self._top) * self._config.page_bytes

    def size(self, part: Part) -> int:
        """Return the bytes that a part takes."""
        return pages_in(part, self._config) * self._config.page_bytes

    def overhead(self, draft: Draft) -> int:
        """Return 0: what an entry takes beside its parts is not in the slab."""
        return 0

    def reclaim(self, size: int) -> None:
        """Nothing here is of no use."""

    def take(self, part: Part) -> Ids:
        """Take pages for a part; the caller has made room."""
        count = pages_in(part, self._config)
        with self._lock:
            assert count <= self._top, "no room was made in the host tier"
            self._top -= count
            return self._free[self._top : self._top + count][::-1].copy()

    def write(self, part: Part, source: Source) -> Ids:
        """Copy a part in."""
        place = self.take(part)
        try:
            source.fill(part, self.views(place))
        except BaseException:
            self.free(place)
            raise
        return place

    def read(
        self, part: Part, place: Ids, into: Sequence[Row], *, tokens: bytes, upto: int
    ) -> None:
        """Copy a part's pages out."""
        copy_rows(self.views(place)[: len(into)], into)

    def free(self, place: Ids) -> None:
        """Give a part's pages back."""
        with self._lock:
            end = self._top + len(place)
            self._free[self._top : end] = place[::-1]  # ascending when taken again
            self._top = end

    def commit(self, draft: Draft, places: dict[Part, Ids]) -> None:
        """Nothing here outlives the process."""

    def confirm(self, name: str) -> None:
        """Nothing here outlives the process."""

    def withdraw(self) -> None:
        """Nothing here outlives the process."""

    def remove(self, name: str) -> None:
        """Nothing here outlives the process."""

    def views(self, place: Ids) -> Sequence[Row]:
        """Return a part's pages, writable."""
        return [] if self._slab is None else rows_of(self._slab, place.tolist())

    def check(self, places: Sequence[Ids]) -> None:
        """Recount what is free and taken; AssertionError names what is off."""
        every = np.concatenate([self._free[: self._top], *places])
        assert len(np.unique(every)) == len(every) == len(self._free), "host pages miscounted"
