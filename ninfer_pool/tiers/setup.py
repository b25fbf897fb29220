"""Making tiers from sizes and a folder."""

from __future__ import annotations

import time
from pathlib import Path

from ninfer_pool.core.config import PoolConfig
from ninfer_pool.core.identity import Namespace
from ninfer_pool.core.pool import PrefixPool
from ninfer_pool.core.sizes import parse_size
from ninfer_pool.errors import ConfigError
from ninfer_pool.tiers.disk.files import Files
from ninfer_pool.tiers.disk.folder import Folder
from ninfer_pool.tiers.disk_medium import DiskMedium, geometry_of
from ninfer_pool.tiers.memory import HostMemory
from ninfer_pool.tiers.payload import Payload
from ninfer_pool.tiers.rates import Rates
from ninfer_pool.tiers.shelf import Shelf
from ninfer_pool.tiers.tiers import Tiers


def open_tiers(
    pool: PrefixPool,
    payload: Payload,
    *,
    namespace: Namespace,
    host_budget: int | str | None = None,
    disk_dir: str | Path | None = None,
    disk_budget: int | str | None = None,
    rates: Rates | None = None,
    background: bool = True,
    files: Files | None = None,
) -> Tiers:
    """Attach tiers to a pool; without any budget only `PrefixPool.save` and `load` come of it.

    Args:
        pool, payload: the pool, and how its pages are reached.
        namespace: the model's; only its entries, under any salt and adapter, go to disk.
        host_budget: bytes of host memory, such as ``"8GiB"``; None: no host tier.
        disk_dir: a folder of its own, made where it is missing; None: no disk tier.
        disk_budget: bytes that the folder may take; needed with ``disk_dir``.
        rates, background: as `Tiers` takes them.
        files: for tests.

    Raises:
        ConfigError: a budget that holds not even one image and page, or one without the other.
        StoreError: a folder that cannot be used: in use, no store, not writable.
    """
    rates, began = rates or Rates(), time.perf_counter()
    shelves: list[Shelf] = []
    if host_budget is not None:
        shelves.append(host_shelf(pool.config, payload, budget=host_budget, rates=rates))
    if (disk_dir is None) != (disk_budget is None):
        raise ConfigError("disk_dir and disk_budget: one of them is None; needs both or neither")
    if disk_dir is not None and disk_budget is not None:
        geometry = geometry_of(pool.config, payload)
        size = _bytes("disk_budget", disk_budget, pool.config)
        folder = Folder(Path(disk_dir), geometry=geometry, namespace=namespace, files=files)
        shelves.append(disk_shelf(pool.config, folder, budget=size, rates=rates))
    try:
        tiers = Tiers(
            pool,
            payload,
            shelves=shelves,
            namespace=namespace,
            rates=rates,
            background=background,
        )
    except BaseException:
        for shelf in shelves:
            if isinstance(shelf.medium, DiskMedium):
                shelf.medium.folder.close()
        raise
    tiers.opening_seconds = time.perf_counter() - began
    return tiers


def host_shelf(
    config: PoolConfig, payload: Payload | None, *, budget: int | str, rates: Rates
) -> Shelf:
    """Return a tier in host memory, allocated whole at once.

    Raises:
        ConfigError: a budget that holds not even one image and page.
    """
    size = _bytes("host_budget", budget, config)
    medium = HostMemory(config, payload, budget_bytes=size)
    return Shelf("host", medium, config=config, rates=rates, keeps_spares=True)


def disk_shelf(config: PoolConfig, folder: Folder, *, budget: int | str, rates: Rates) -> Shelf:
    """Return a tier in a folder."""
    medium = DiskMedium(folder, config, budget_bytes=_bytes("disk_budget", budget, config))
    return Shelf("disk", medium, config=config, rates=rates, keeps_spares=False)


def _bytes(field: str, budget: int | str, config: PoolConfig) -> int:
    size = parse_size(budget) if isinstance(budget, str) else budget
    least = (1 + config.image_pages) * config.page_bytes
    if type(size) is not int or size < least:
        raise ConfigError(f"{field}: {budget!r}; one page and one image need {least} bytes")
    return size
