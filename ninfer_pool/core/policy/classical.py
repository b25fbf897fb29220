"""The classical orders: least recently used, first in first out, greedy-dual size frequency."""

from __future__ import annotations

from ninfer_pool.core.entry import Entry
from ninfer_pool.core.policy.base import Ranked


class Lru(Ranked):
    """Least recently used: the baseline. A use is a commit that consumed the checkpoint."""

    def rank(self, entry: Entry, tick: int) -> tuple[int, ...]:
        """By the tick of the tip's last use: a checkpoint merely passed is not refreshed."""
        return (entry.tip.tick,)


class Fifo(Ranked):
    """First in, first out: uses do not matter."""

    def rank(self, entry: Entry, tick: int) -> tuple[int, ...]:
        """By creation."""
        return (entry.created,)


class Gdsf(Ranked):
    """Greedy-dual size frequency (Cherkasova 1998): the least L + frequency x cost / size first.

    Cost is the tokens that a request would prefill again without the entry's tip. Size is the
    bytes that losing it would free, L the rank of the last entry evicted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inflation = 0.0

    def rank(self, entry: Entry, tick: int) -> tuple[float, ...]:
        """By L + frequency x tokens saved / bytes freed."""
        return (self.inflation + (1 + entry.hits) * entry.saved / max(1, entry.bytes),)

    def on_truncate(self, entry: Entry, tick: int) -> None:
        """A victim's rank becomes the new L before it is ranked again."""
        self.inflation = max(self.inflation, self._ranks[entry.identity][0])
        super().on_truncate(entry, tick)

    def on_remove(self, entry: Entry) -> None:
        """The rank of an evicted entry becomes the new L."""
        self.inflation = max(self.inflation, self._ranks[entry.identity][0])
        super().on_remove(entry)
