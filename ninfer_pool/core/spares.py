"""Superseded checkpoints: kept while there is room, the first to go under every policy."""

from __future__ import annotations

from collections.abc import Iterator

from sortedcontainers import SortedList

from ninfer_pool.core.entry import Checkpoint


class Spares:
    """Superseded checkpoints in the order in which they go. O(log n) each.

    Tails that nobody follows go before points on a live path; among those on a path the ones
    with the least distance to the checkpoint before them go first, so that what is left keeps
    the worst gap small.
    """

    __slots__ = ("_items", "_order", "_serial")

    def __init__(self) -> None:
        self._order: SortedList[tuple[int, int, int]] = SortedList()
        self._items: dict[Checkpoint, tuple[int, int, int]] = {}
        self._serial: dict[int, Checkpoint] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Checkpoint]:
        """Yield them, the first to go first."""
        for item in self._order:
            yield self._serial[item[-1]]

    def add(self, mark: Checkpoint, *, gap: int, serial: int) -> None:
        """Add a checkpoint ``gap`` tokens past the one before it; a gap of 0 goes first."""
        mark.spare = True
        self._items[mark] = item = (gap, mark.tick, serial)
        self._serial[serial] = mark
        self._order.add(item)

    def discard(self, mark: Checkpoint) -> None:
        """Take a checkpoint out: it is gone, or of use again."""
        if mark.spare:
            mark.spare = False
            item = self._items.pop(mark)
            del self._serial[item[-1]]
            self._order.remove(item)

    def widen(self, mark: Checkpoint, *, gap: int) -> None:
        """Give one of them a new gap: the checkpoint before it went."""
        serial = self._items[mark][-1]
        self.discard(mark)
        self.add(mark, gap=gap, serial=serial)
