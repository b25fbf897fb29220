"""A pool with tiers over a symbolic engine: any byte of another computation shows at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ninfer_pool import Namespace, PoolConfig
from ninfer_pool.testing.symbolic import SymbolicEngine
from ninfer_pool.tiers import Regions, Row, Tiers, open_tiers
from ninfer_pool.tiers.parts import Kept
from ninfer_pool.tiers.payload import assemble
from ninfer_pool.tiers.sources import ShelfSource
from tests.machinery.driver import SPACE, Driver

ID_BYTES = 8


class SymbolicPayload:
    """The symbolic engine's pages as bytes: each row is the number of what it holds.

    Numbers are of the class, so that another engine may read what one wrote to disk.
    """

    layout = "symbols"
    names: ClassVar[list[Any]] = [None]
    numbers: ClassVar[dict[Any, int]] = {}

    def __init__(self, engine: SymbolicEngine) -> None:
        self.engine = engine
        self.slots = engine.config.page_tokens
        assert engine.config.page_bytes == self.slots * ID_BYTES
        self.moved = 0

    @property
    def regions(self) -> Regions | None:
        return ((0, 1, ID_BYTES),)

    def number(self, thing: Any) -> int:
        if thing not in self.numbers:
            self.numbers[thing] = len(self.names)
            self.names.append(thing)
        return self.numbers[thing]

    def read(self, pages: Sequence[int], rows: Sequence[Row]) -> None:
        for page, row in zip(pages, rows, strict=True):
            held = self.engine._pages[page]
            cells = row.view(np.int64)
            if isinstance(held, dict):
                cells[:] = [self.number(held[s]) if s in held else 0 for s in range(self.slots)]
            else:
                cells[:] = [-self.number(held)] * self.slots
            self.moved += 1

    def write(self, pages: Sequence[int], rows: Sequence[Row]) -> None:
        for page, row in zip(pages, rows, strict=True):
            cells = row.view(np.int64).tolist()
            if cells[0] < 0:
                self.engine._pages[page] = self.names[-cells[0]]
            else:
                held = {s: self.names[c] for s, c in enumerate(cells) if 0 < c < len(self.names)}
                self.engine._pages[page] = held
            self.moved += 1

    def views(self, pages: Sequence[int]) -> None:
        return None

    def allocate(self, num_pages: int) -> Any:
        return np.full((num_pages, self.engine.config.page_bytes), 0x5A, dtype=np.uint8)


class TieredDriver(Driver):
    """A `Driver` whose pool has tiers."""

    def __init__(
        self,
        config: PoolConfig,
        *,
        host: int | None = None,
        disk: Path | None = None,
        disk_budget: int = 1 << 22,
        audits: bool = True,
        background: bool = False,
        namespace: Namespace = SPACE,
        **options: Any,
    ) -> None:
        super().__init__(config, audits=audits, namespace=namespace)
        self.payload = SymbolicPayload(self.engine)
        self.tiers: Tiers = open_tiers(
            self.pool,
            self.payload,
            namespace=namespace,
            host_budget=None if host is None else host * config.page_bytes,
            disk_dir=disk,
            disk_budget=None if disk is None else disk_budget,
            background=background,
            **options,
        )

    def close(self) -> None:
        self.tiers.close()


def config(**changes: Any) -> PoolConfig:
    fields: dict[str, Any] = {
        "num_pages": 40,
        "page_bytes": 4 * ID_BYTES,
        "image_bytes": 2 * 4 * ID_BYTES - 5,
        "page_tokens": 4,
        "grid": 8,
    }
    return PoolConfig(**{**fields, **changes})


def audit_tiers(driver: TieredDriver) -> int:
    """Read back every checkpoint of every tier: its KV must be that of its image's own chain."""
    count = 0
    for shelf in driver.tiers.shelves:
        for record in shelf.records.values():
            tokens = shelf.sequence(record)
            source = ShelfSource(shelf)
            for kept in record.marks:
                cells = _cells(driver, kept, source)
                assert len(cells) == kept.position, f"{shelf.name}: {kept} lacks rows"
                if kept.stored.image is not None:
                    chain = _chain(driver, source.rows(kept.stored.image))
                    same = [one == other for one, other in zip(cells, chain, strict=True)]
                    told = f"{shelf.name}: {kept} of {record.entry}, {kept.stored.runs}"
                    assert all(same), f"{told}, row {same.index(False)}"
                assert len(tokens) >= 4 * kept.position
                count += 1
    return count


def _cells(driver: TieredDriver, kept: Kept, source: ShelfSource) -> list[Any]:
    payload = driver.payload
    rows = assemble(
        kept.stored.runs,
        kept.position,
        page_tokens=driver.pool.config.page_tokens,
        regions=payload.regions,
        rows_of=source.rows,
    )
    numbers = np.concatenate([row.view(np.int64) for row in rows])[: kept.position]
    return [payload.names[number] for number in numbers.tolist()]


def _chain(driver: TieredDriver, rows: Sequence[Row]) -> Any:
    return driver.payload.names[-int(rows[0].view(np.int64)[0])].chain
