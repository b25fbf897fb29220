"""Does an engine's `Payload` do what tiers and files count on?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ninfer_pool.core.config import PoolConfig
from ninfer_pool.testing.host import ConformanceError
from ninfer_pool.tiers.payload import Payload

Bytes = npt.NDArray[np.uint8]


def check_payload(payload: Payload, config: PoolConfig, *, pages: Sequence[int]) -> None:
    """Write, read and look at some free pages; ConformanceError names the fault.

    Args:
        payload: the engine's.
        config: of its pool.
        pages: at least three ids of pages that nothing uses; their content is lost.

    >>> from ninfer_pool.tiers import ArrayPayload
    >>> slab = np.zeros((8, 512), dtype=np.uint8)
    >>> config = PoolConfig(num_pages=8, page_bytes=512, image_bytes=100)
    >>> mine = ArrayPayload(slab, layout="mine", regions=((0, 1, 8),))
    >>> check_payload(mine, config, pages=[1, 5, 2])
    """
    if len(set(pages)) < 3:
        raise ConformanceError(f"pages: {list(pages)}; needs three different ones")
    _check_words(payload, config)
    rng = np.random.default_rng(0)
    given = rng.integers(0, 256, (len(pages), config.page_bytes), dtype=np.uint8)
    payload.write(pages, list(given))
    kept = given.copy()
    given[:] = 0  # the caller may change its array at once
    _expect(_read(payload, config, pages), kept, "read() after write()")
    backwards = list(reversed(pages))
    _expect(_read(payload, config, backwards), kept[::-1], "read() in another order")
    payload.write(pages[:1], [kept[1]])
    _expect(_read(payload, config, pages[1:]), kept[1:], "write() of another page")
    views = payload.views(pages)
    if views is not None:
        _expect(np.stack(views), np.stack([kept[1], *kept[1:]]), "views()")
        views[0][:] = kept[0]
        _expect(_read(payload, config, pages), kept, "read() after writing to a view")


def _read(payload: Payload, config: PoolConfig, pages: Sequence[int]) -> Bytes:
    host = payload.allocate(len(pages))
    if host.dtype != np.uint8 or host.shape != (len(pages), config.page_bytes):
        raise ConformanceError(
            f"allocate({len(pages)}): {host.dtype} of shape {host.shape}; needs uint8 "
            f"({len(pages)}, {config.page_bytes})"
        )
    host[:] = 0xA5
    payload.read(pages, list(host))
    return host


def _expect(found: Bytes, wanted: Bytes, where: str) -> None:
    if not np.array_equal(found, wanted):
        page, byte = np.argwhere(found != wanted)[0]
        raise ConformanceError(
            f"{where}: byte {byte} of page number {page} is {found[page, byte]}; needs "
            f"{wanted[page, byte]}"
        )


def _check_words(payload: Payload, config: PoolConfig) -> None:
    if not payload.layout:
        raise ConformanceError(f"layout: {payload.layout!r}; needs a text that names it")
    covered = np.zeros(config.page_bytes, dtype=np.int8)
    for region in payload.regions or ():
        offset, outer, row_bytes = region
        end = offset + outer * config.page_tokens * row_bytes
        if min(offset, outer - 1, row_bytes - 1) < 0 or end > config.page_bytes:
            raise ConformanceError(
                f"regions: {region}; needs to be within {config.page_bytes} bytes"
            )
        covered[offset:end] += 1
    if covered.max(initial=0) > 1:
        raise ConformanceError("regions: two of them overlap")
