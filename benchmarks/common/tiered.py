"""Pools with tiers below the device, and the two moves that the benchmarks time one by one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.conversations import SPACE
from ninfer_pool import PoolConfig, PrefixPool
from ninfer_pool.core.eviction import evict_entry
from ninfer_pool.core.results import EvictionCost
from ninfer_pool.tiers import ArrayPayload, Tiers, open_tiers
from ninfer_pool.tiers.disk.files import Files


class UnsyncedFiles(Files):
    """Files that need not survive a power failure, to fill a folder quickly."""

    def sync(self, descriptor: int) -> None:
        """No-op."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TieredPool:
    """A pool, its tiers and its slab; ``folder`` is that of the disk tier, where there is one."""

    pool: PrefixPool
    tiers: Tiers
    payload: ArrayPayload
    folder: Path

    def copy_down(self) -> None:
        """Copy every entry on the device to every tier."""
        self.tiers.flush()
        copy_down(self.pool)

    def empty_device(self) -> None:
        """Evict every entry from the device, and from no tier."""
        empty_device(self.pool)


def copy_down(pool: PrefixPool) -> None:
    """Copy every entry on the device to the tier below it."""
    with pool.state.lock:
        for entry in list(pool.state.catalog.entries.values()):
            pool.state.hooks.on_evict(entry, entry.tip)


def empty_device(pool: PrefixPool) -> None:
    """Evict every entry from the device, and from no tier."""
    with pool.state.lock:
        for entry in list(pool.state.catalog.entries.values()):
            evict_entry(pool.state, entry, EvictionCost())


@contextmanager
def tiered(
    config: PoolConfig,
    *,
    slab: NDArray[np.uint8] | None = None,
    host_budget: int | None = None,
    disk_budget: int | None = None,
    files: Files | None = None,
    folder: Path | None = None,
) -> Iterator[TieredPool]:
    """Yield a pool with a tier per budget; the disk's folder is temporary unless it is given."""
    if slab is None:
        slab = np.zeros((config.num_pages, config.page_bytes), dtype=np.uint8)
    pool, payload = PrefixPool(config), ArrayPayload(slab, layout="bench")
    with TemporaryDirectory(prefix="ninfer-bench-") as temporary:
        place = folder or Path(temporary)
        tiers = open_tiers(
            pool,
            payload,
            namespace=SPACE,
            host_budget=host_budget,
            disk_dir=place if disk_budget else None,
            disk_budget=disk_budget,
            background=False,
            files=files,
        )
        try:
            yield TieredPool(pool=pool, tiers=tiers, payload=payload, folder=place)
        finally:
            tiers.close()
