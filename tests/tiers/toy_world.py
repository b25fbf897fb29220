"""A pool with tiers over the numpy model: every byte follows from the tokens, in any process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ninfer_pool import PrefixPool, Prompt
from ninfer_pool.core.lease import Lease
from ninfer_pool.testing.adapter import execute
from ninfer_pool.testing.toy import IMAGE_BYTES, ROW, ToyEngine
from ninfer_pool.tiers import ArrayPayload, open_tiers
from ninfer_pool.tiers.payload import assemble
from ninfer_pool.tiers.shelf import Shelf
from ninfer_pool.tiers.sources import ShelfSource

Bytes = npt.NDArray[np.uint8]
REGIONS = ((0, 1, 4 * ROW),)


@cache
def cold(tokens: tuple[int, ...]) -> tuple[Bytes, list[Bytes]]:
    """The rows of a sequence, uint8 (n, row bytes), and its image at each of 0 … n."""
    count = len(tokens)
    engine = ToyEngine(num_pages=-(-count // 4), lanes=1)
    table = np.arange(len(engine.slab), dtype=np.int32)
    images = [engine.lanes[0].flat().view(np.uint8).copy()]
    for at, token in enumerate(tokens):
        engine.prefill(np.array([token], dtype=np.int32), lane=0, begin=at, table=table)
        images.append(engine.lanes[0].flat().view(np.uint8).copy())
    rows = engine.read(0, count, table).view(np.uint8)
    return rows.copy(), images


class ToyDriver:
    """Serves prompts on the numpy model; whatever is restored is compared with a cold run."""

    def __init__(self, *, num_pages: int = 30, host: int | None = None, **options: Any) -> None:
        self.engine = ToyEngine(num_pages=num_pages, lanes=1)
        self.pool = PrefixPool(self.engine.config)
        payload = ArrayPayload(self.engine.slab, layout="toy", regions=REGIONS)
        self.tiers = open_tiers(
            self.pool,
            payload,
            namespace=self.engine.namespace,
            host_budget=None if host is None else host * self.engine.config.page_bytes,
            **options,
        )

    def prompt(self, tokens: Sequence[int], boundaries: Sequence[tuple[int, str]] = ()) -> Prompt:
        """A prompt of the model."""
        return Prompt(list(tokens), namespace=self.engine.namespace, boundaries=boundaries)

    def serve(
        self, tokens: Sequence[int], boundaries: Sequence[tuple[int, str]] = ()
    ) -> tuple[int, str | None]:
        """Prefill, checkpoint and commit; returns where it resumed and the entry's key."""
        lease = self.pool.acquire(self.prompt(tokens, boundaries))
        assert isinstance(lease, Lease), self.pool.last_refusal
        with lease:
            execute(self.engine, lease.restore())
            self.verify(lease)
            for chunk in lease.chunks():
                part = lease.prompt.tokens[chunk.begin : chunk.end]
                lease.advance(part)
                self.engine.prefill(part, lane=lease.lane, begin=chunk.begin, table=lease.pages)
                if chunk.checkpoint:
                    execute(self.engine, lease.checkpoint(chunk.checkpoint, position=chunk.end))
            key = lease.commit()
        self.pool.check()
        return lease.start, key

    def verify(self, lease: Lease) -> None:
        """What a lease restored is, bit for bit, what a cold run computes."""
        start = lease.start
        rows, images = cold(tuple(lease.prompt.tokens.tolist()))
        mine = self.engine.read(lease.lane, start, lease.pages).view(np.uint8)
        assert (mine == rows[:start]).all()
        assert (self.engine.lanes[lease.lane].flat().view(np.uint8) == images[start]).all()

    def audit(self, shelf: Shelf) -> int:
        """Compare every checkpoint of a tier with a cold run; returns how many there are."""
        source, size = ShelfSource(shelf), self.engine.config.page_tokens
        count = 0
        for record in shelf.records.values():
            rows, images = cold(tuple(np.frombuffer(shelf.sequence(record), np.int32).tolist()))
            for kept in record.marks:
                pages = assemble(
                    kept.stored.runs,
                    kept.position,
                    page_tokens=size,
                    regions=REGIONS,
                    rows_of=source.rows,
                )
                flat = np.concatenate(list(pages)).reshape(-1, 4 * ROW)[: kept.position]
                assert (flat == rows[: kept.position]).all()
                assert kept.stored.image is not None
                image = np.concatenate(source.rows(kept.stored.image))[:IMAGE_BYTES]
                assert (image == images[kept.position]).all()
                count += 1
        return count
