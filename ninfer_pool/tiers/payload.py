"""How a pool reaches the bytes of its pages: what an engine gives so that tiers can move them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Protocol, TypeAlias, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from ninfer_pool.tiers.parts import Part, Run, covering_end

Row: TypeAlias = npt.NDArray[np.uint8]
"""The bytes of one page, uint8 (page_bytes,)."""
Regions: TypeAlias = tuple[tuple[int, int, int], ...]
"""Where a page's token rows lie: (offset, outer, row_bytes) for each tensor in it, which is
``page[offset:][: outer * page_tokens * row_bytes]`` seen as (outer, page_tokens, row_bytes)."""


@runtime_checkable
class Payload(Protocol):
    """An engine's pages, as bytes. Called on the thread that drives the pool, never in between
    a lease's operations; what was executed before must be seen, what comes after must not."""

    @property
    def layout(self) -> str:
        """Name what lies where in a page and in an image: equal texts, equal meaning of bytes."""

    @property
    def regions(self) -> Regions | None:
        """Where a page's token rows lie; None: partly filled pages are moved whole."""

    def read(self, pages: Sequence[int], rows: Sequence[Row]) -> None:
        """Copy pages to host memory; returns when the bytes are there."""

    def write(self, pages: Sequence[int], rows: Sequence[Row]) -> None:
        """Copy host memory to pages; ``rows`` may change once it has returned."""

    def views(self, pages: Sequence[int]) -> Sequence[Row] | None:
        """Return the pages themselves as writable rows, where they lie in host memory."""

    def allocate(self, num_pages: int) -> npt.NDArray[np.uint8]:
        """Return host memory uint8 (num_pages, page_bytes), pinned where that makes copies fast."""


class Source(Protocol):
    """Where parts come from that another tier is to store."""

    def rows(self, part: Part) -> Sequence[Row]:
        """Return a part's pages; they stay as they are until the next call."""

    def fill(self, part: Part, into: Sequence[Row]) -> None:
        """Copy a part's pages."""


class ArrayPayload:
    """Pages in one numpy array, uint8 (num_pages, page_bytes): engines on a CPU, and tests."""

    def __init__(
        self, slab: npt.NDArray[np.uint8], *, layout: str, regions: Regions | None = None
    ) -> None:
        self._slab = slab
        self._layout = layout
        self._regions = regions

    @property
    def layout(self) -> str:
        """See `Payload`."""
        return self._layout

    @property
    def regions(self) -> Regions | None:
        """See `Payload`."""
        return self._regions

    def read(self, pages: Sequence[int], rows: Sequence[Row]) -> None:
        """Copy pages out."""
        copy_rows(self.views(pages), rows)

    def write(self, pages: Sequence[int], rows: Sequence[Row]) -> None:
        """Copy pages in."""
        copy_rows(rows, self.views(pages))

    def views(self, pages: Sequence[int]) -> Sequence[Row]:
        """Return the rows of the slab."""
        return rows_of(self._slab, pages)

    def allocate(self, num_pages: int) -> npt.NDArray[np.uint8]:
        """Return plain memory."""
        return np.empty((num_pages, self._slab.shape[1]), dtype=np.uint8)


def rows_of(slab: npt.NDArray[np.uint8], pages: Sequence[int]) -> Sequence[Row]:
    """Return pages of a slab: as one array where they follow one another, else apart."""
    first, count = (pages[0], len(pages)) if pages else (0, 0)
    if count > 1 and pages[-1] == first + count - 1 and [*pages] == [*range(first, first + count)]:
        return cast(Sequence[Row], slab[first : first + count])
    return [slab[page] for page in pages]


def copy_rows(rows: Sequence[Row], into: Sequence[Row]) -> None:
    """Copy pages, in one piece where both are one array."""
    if isinstance(rows, np.ndarray) and isinstance(into, np.ndarray):
        np.copyto(into, rows)
        return
    for row, target in zip(rows, into, strict=True):
        np.copyto(target, row)


def assemble(
    runs: Sequence[Run],
    position: int,
    *,
    page_tokens: int,
    regions: Regions | None,
    rows_of: Callable[[Run], Sequence[Row]],
) -> Iterator[Row]:
    """Yield the pages that hold ``[0, position)``, in order, from those of each run.

    Where two runs share a page, the later one's rows are laid over the earlier one's. One run's
    pages are asked for at a time.
    """
    found = pieces(runs, position, page_tokens=page_tokens, regions=regions, rows_of=rows_of)
    return chain.from_iterable(found)


def pieces(
    runs: Sequence[Run],
    position: int,
    *,
    page_tokens: int,
    regions: Regions | None,
    rows_of: Callable[[Run], Sequence[Row]],
) -> Iterator[Sequence[Row]]:
    """Yield the same pages as `assemble`, those of one run together."""
    shared: Row | None = None
    for index, run in enumerate(runs):
        end = covering_end(runs, index, position)
        first, last = run.begin // page_tokens, -(-end // page_tokens)
        rows = rows_of(run)[: last - first]
        joined: list[Row] = []
        if shared is not None and len(rows):
            offset = run.begin % page_tokens
            joined = [_overlaid(shared, rows[0], regions, offset, page_tokens)]
            rows = rows[1:]
        shared = None
        if end % page_tokens and index + 1 < len(runs) and (joined or len(rows)):
            shared = (rows[-1] if len(rows) else joined.pop()).copy()
            rows = rows[:-1]
        if joined:
            yield joined
        if len(rows):
            yield rows


def _overlaid(below: Row, above: Row, regions: Regions | None, first: int, page_tokens: int) -> Row:
    """Return a page whose rows from ``first`` on are those of ``above``."""
    if regions is None:  # then every copy of a page is whole
        return above
    page = below.copy()
    for offset, outer, row_bytes in regions:
        end = offset + outer * page_tokens * row_bytes
        shape = (outer, page_tokens, row_bytes)
        page[offset:end].reshape(shape)[:, first:] = above[offset:end].reshape(shape)[:, first:]
    return page
