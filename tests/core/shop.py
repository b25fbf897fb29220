"""The small pool that most tests of the core use: pages of four tokens, images of two pages."""

from __future__ import annotations

from typing import Any

from ninfer_pool import Lease, PoolConfig
from tests.machinery.driver import Driver


def driver(**changes: Any) -> Driver:
    """Return a driver of 400 pages; ``changes`` of its config."""
    config = PoolConfig(num_pages=400, page_bytes=16, image_bytes=32, page_tokens=4, grid=64)
    return Driver(config.replace(**changes))


def begun(shop: Driver, tokens: Any, **options: Any) -> Lease:
    """Return the lease of a request that must be admitted, its lane restored."""
    lease = shop.begin(tokens, **options)
    assert lease is not None
    return lease


def generate(shop: Driver, tokens: list[int], *stretches: list[int]) -> None:
    """Serve a prompt and take a checkpoint after each stretch of the answer."""
    lease = begun(shop, tokens, reserve_tokens=sum(map(len, stretches)))
    shop.prefill(lease)
    for stretch in stretches:
        shop.decode(lease, stretch)
        shop.engine.execute(lease.checkpoint("frontier", position=lease.frontier))
    lease.commit()
    shop.audit()
