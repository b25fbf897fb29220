"""The check of an engine's payload: right ones pass, each wrong one is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from ninfer_pool import PoolConfig
from ninfer_pool.testing.host import ConformanceError
from ninfer_pool.testing.payload import check_payload
from ninfer_pool.tiers import ArrayPayload, Regions, Row

CONFIG = PoolConfig(num_pages=8, page_bytes=512, image_bytes=100)
PAGES = (1, 5, 2)


def payload(of: type[ArrayPayload], regions: Regions | None = ((0, 1, 8),)) -> ArrayPayload:
    return of(np.zeros((8, 512), dtype=np.uint8), layout="mine", regions=regions)


def test_right_ones_pass() -> None:
    check_payload(payload(ArrayPayload), CONFIG, pages=PAGES)
    check_payload(payload(ArrayPayload, None), CONFIG, pages=PAGES)


class Late(ArrayPayload):
    """Keeps what it was given instead of copying it."""

    def write(self, pages: Sequence[int], rows: Sequence[Row]) -> None:
        self.kept: dict[int, Row] = getattr(self, "kept", {}) | dict(zip(pages, rows, strict=True))

    def read(self, pages: Sequence[int], rows: Sequence[Row]) -> None:
        for page, row in zip(pages, rows, strict=True):
            row[:] = self.kept[page]


class Sorted(ArrayPayload):
    """Reads pages in the order of their ids."""

    def read(self, pages: Sequence[int], rows: Sequence[Row]) -> None:
        super().read(sorted(pages), rows)


class Short(ArrayPayload):
    """Forgets the last byte of a page."""

    def read(self, pages: Sequence[int], rows: Sequence[Row]) -> None:
        super().read(pages, rows)
        for row in rows:
            row[-1] ^= 1


class Copied(ArrayPayload):
    """Gives copies out as views."""

    def views(self, pages: Sequence[int]) -> Sequence[Row]:
        return [row.copy() for row in super().views(pages) or ()]


class Wide(ArrayPayload):
    """Allocates rows of another size."""

    def allocate(self, num_pages: int) -> Any:
        return np.empty((num_pages, 640), dtype=np.uint8)


@pytest.mark.parametrize("wrong", [Late, Sorted, Short, Copied, Wide])
def test_wrong_ones_are_told(wrong: type[ArrayPayload]) -> None:
    with pytest.raises(ConformanceError):
        check_payload(payload(wrong), CONFIG, pages=PAGES)


@pytest.mark.parametrize("regions", [((0, 2, 8),), ((0, 1, 4), (128, 1, 4)), ((-1, 1, 1),)])
def test_wrong_regions_are_told(regions: Regions) -> None:
    with pytest.raises(ConformanceError, match="regions"):
        check_payload(payload(ArrayPayload, regions), CONFIG, pages=PAGES)


def test_the_runners_own_passes() -> None:
    runner_module = pytest.importorskip("ninfer_pool.runner")
    payload_module = pytest.importorskip("ninfer_pool.runner.payload")
    for kv_dtype in ("bf16", "int8-g64"):
        runner = runner_module.Runner.from_pretrained(
            runner_module.TINY, dtype="fp32", kv_budget="4MiB", kv_dtype=kv_dtype
        )
        mine = payload_module.SlabPayload(runner.slab)
        check_payload(mine, runner.pool.config, pages=PAGES)
