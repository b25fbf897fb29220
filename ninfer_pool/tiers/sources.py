"""Where parts come from that another tier is to store."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ninfer_pool.core.config import PoolConfig
from ninfer_pool.tiers.parts import Part, Run, pages_in
from ninfer_pool.tiers.payload import Payload, Row, copy_rows
from ninfer_pool.tiers.shelf import Shelf


class DeviceSource:
    """Pages of the device. Without a ``payload`` there is nothing to copy (simulation)."""

    def __init__(self, payload: Payload | None, config: PoolConfig) -> None:
        self.pages: dict[Part, list[int]] = {}
        """Where each part lies; the caller sees to it that they stay there."""
        self._payload = payload
        self._config = config

    def rows(self, part: Part) -> Sequence[Row]:
        """Return the pages, or a copy where they do not lie in host memory."""
        if self._payload is None:
            return []
        pages = self.pages[part]
        views = self._payload.views(pages)
        if views is None:
            views = list(np.empty((len(pages), self._config.page_bytes), dtype=np.uint8))
            self._payload.read(pages, views)
        return views

    def fill(self, part: Part, into: Sequence[Row]) -> None:
        """Copy the pages."""
        if self._payload is not None:
            self._payload.read(self.pages[part], into)


class StagedSource:
    """Copies of parts in memory."""

    def __init__(self, copies: dict[Part, list[Row]]) -> None:
        self._copies = copies

    def rows(self, part: Part) -> Sequence[Row]:
        """Return the pages."""
        return self._copies[part]

    def fill(self, part: Part, into: Sequence[Row]) -> None:
        """Copy the pages."""
        copy_rows(self._copies[part], into)


class ShelfSource:
    """Parts that lie on a shelf."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    def rows(self, part: Part) -> Sequence[Row]:
        """Return the pages."""
        medium, place = self._shelf.medium, self._shelf.places[part]
        views = medium.views(place)
        if views is not None:
            return views
        config = self._shelf.config
        into = list(np.zeros((pages_in(part, config), config.page_bytes), dtype=np.uint8))
        self.fill(part, into)
        return into

    def fill(self, part: Part, into: Sequence[Row]) -> None:
        """Copy the pages.

        Raises:
            StoreError: what lies there is not what was stored.
        """
        tokens, upto = b"", 0
        if isinstance(part, Run):
            tokens, upto = part.tokens, part.end
        place = self._shelf.places[part]
        self._shelf.medium.read(part, place, into, tokens=tokens, upto=upto)
