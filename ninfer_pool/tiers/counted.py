"""A medium that only counts: the simulator's disk."""

from __future__ import annotations

from collections.abc import Sequence

from ninfer_pool.core.config import PoolConfig
from ninfer_pool.tiers.parts import Draft, Part, Run
from ninfer_pool.tiers.payload import Row, Source


class CountedMedium:
    """Counts the bytes that a folder's files would take, without their headers."""

    def __init__(self, config: PoolConfig, *, budget_bytes: int) -> None:
        self.budget = budget_bytes
        self.used = 0
        self.written = 0
        """Bytes written in all."""
        self._config = config

    def size(self, part: Part) -> int:
        """Return the bytes of a part."""
        config = self._config
        if isinstance(part, Run):
            return (part.end - part.begin) * config.page_bytes // config.page_tokens
        return config.image_bytes

    def overhead(self, draft: Draft) -> int:
        """Return 0."""
        return 0

    def reclaim(self, size: int) -> None:
        """Nothing here is of no use."""

    def write(self, part: Part, source: Source) -> int:
        """Count a part."""
        size = self.size(part)
        self.used += size
        self.written += size
        return size

    def views(self, place: int) -> Sequence[Row]:
        """Return nothing: there is no payload."""
        return []

    def read(
        self, part: Part, place: int, into: Sequence[Row], *, tokens: bytes, upto: int
    ) -> None:
        """There is no payload."""

    def free(self, place: int) -> None:
        """Count a part no more."""
        self.used -= place

    def commit(self, draft: Draft, places: dict[Part, int]) -> None:
        """Nothing here outlives the process."""

    def confirm(self, name: str) -> None:
        """Nothing here outlives the process."""

    def withdraw(self) -> None:
        """Nothing here outlives the process."""

    def remove(self, name: str) -> None:
        """Nothing here outlives the process."""
