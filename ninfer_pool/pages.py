"""The ledger of pages: who counts on which page, and which are free. It holds no payload."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Pages = npt.NDArray[np.int32]


class PageLedger:
    """Three counts a page, one free list.

    * ``held``: checkpoints that hold it. Pages with ``held > 0`` are *retained*.
    * ``leased``: leases that read or write it.
    * ``kept``: protected checkpoints (pinned, or being resumed from) that hold it.

    A page is free while held and leased are both 0. No eviction can free a page that is leased
    or kept: these are *firm*. Every method takes an array of distinct ids; O(len(pages)).
    """

    __slots__ = (
        "_free",
        "_link",
        "_links",
        "_top",
        "firm",
        "held",
        "kept",
        "leased",
        "protected",
        "retained",
    )

    def __init__(self, num_pages: int) -> None:
        self.held = np.zeros(num_pages, dtype=np.int32)
        self.leased = np.zeros(num_pages, dtype=np.int32)
        self.kept = np.zeros(num_pages, dtype=np.int32)
        self._free = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._link = np.full(num_pages, -1, dtype=np.int32)
        self._links = self._link.data
        self._top = num_pages
        self.retained = 0
        """Pages that some checkpoint holds."""
        self.firm = 0
        """Pages that no eviction can free."""
        self.protected = 0
        """Pages that some protected checkpoint holds."""

    @property
    def free(self) -> int:
        """Pages that nothing counts on."""
        return self._top

    @property
    def total(self) -> int:
        """Pages in the slab."""
        return len(self.held)

    @property
    def freeable(self) -> int:
        """Pages that are free or would be if every evictable checkpoint went."""
        return self.total - self.firm

    def free_pages(self) -> Pages:
        """Return the ids of the pages that nothing counts on. O(free)."""
        return self._free[: self._top].copy()

    def take(self, count: int) -> Pages:
        """Take ``count`` free pages for a lease (``leased`` 1 each); the caller checked `free`."""
        assert 0 <= count <= self._top
        pages = self._free[self._top - count : self._top][::-1].copy()
        self._top -= count
        self.leased[pages] = 1
        self.firm += count
        return pages

    def lease(self, pages: Pages) -> None:
        """Count one more lease on pages that are in use."""
        fresh = _raise(self.leased, pages)
        self.firm += int(np.count_nonzero(self.kept[fresh] == 0))

    def unlease(self, pages: Pages) -> None:
        """Count one lease less; pages that nothing else counts on become free."""
        last = _lower(self.leased, pages)
        self.firm -= int(np.count_nonzero(self.kept[last] == 0))
        self._give(last[self.held[last] == 0])

    def hold(self, pages: Pages) -> int:
        """Count one more checkpoint; return how many pages became retained."""
        fresh = len(_raise(self.held, pages))
        self.retained += fresh
        return fresh

    def drop(self, pages: Pages) -> int:
        """Count one checkpoint less; return how many pages are no longer retained."""
        last = _lower(self.held, pages)
        self.retained -= len(last)
        self._give(last[self.leased[last] == 0])
        return len(last)

    def keep(self, pages: Pages) -> None:
        """Protect pages that a checkpoint holds."""
        fresh = _raise(self.kept, pages)
        self.protected += len(fresh)
        self.firm += int(np.count_nonzero(self.leased[fresh] == 0))

    def unkeep(self, pages: Pages) -> None:
        """Take one protection off."""
        last = _lower(self.kept, pages)
        self.protected -= len(last)
        self.firm -= int(np.count_nonzero(self.leased[last] == 0))

    def exclusive(self, pages: Pages) -> int:
        """Return how many of ``pages`` one checkpoint alone holds."""
        return int(np.count_nonzero(self.held[pages] == 1))

    def string(self, pages: Pages) -> int:
        """Thread an image's pages into a chain and return its head; -1 for none.

        A chain costs no memory for each image: the links are an array as long as the slab.
        """
        if not len(pages):
            return -1
        self._link[pages[:-1]] = pages[1:]
        self._link[pages[-1]] = -1
        return int(pages[0])

    def unstring(self, head: int) -> Pages:
        """Return the pages of the chain that begins at ``head``. O(pages), about 40 ns each."""
        chain = []
        links = self._links
        while head >= 0:
            chain.append(head)
            head = links[head]
        return np.array(chain, dtype=np.int32)

    def _give(self, pages: Pages) -> None:
        self._free[self._top : self._top + len(pages)] = pages
        self._top += len(pages)

    def check(self) -> None:
        """Recount everything (G9); AssertionError names what is off. O(pages)."""
        used = (self.held > 0) | (self.leased > 0)
        firm = (self.leased > 0) | (self.kept > 0)
        free = self._free[: self._top]
        assert min(self.held.min(), self.leased.min(), self.kept.min()) >= 0, "negative count"
        assert len(np.unique(free)) == len(free), "a page is free twice"
        assert not used[free].any(), "a page in use is on the free list"
        assert int(used.sum()) + len(free) == self.total, "a page is lost"
        assert int((self.held > 0).sum()) == self.retained, "retained pages miscounted"
        assert int((self.kept > 0).sum()) == self.protected, "protected pages miscounted"
        assert int(firm.sum()) == self.firm, "firm pages miscounted"


def _raise(counts: Pages, pages: Pages) -> Pages:
    """Add 1 at ``pages``; return those that were 0."""
    before = counts[pages]
    counts[pages] = before + 1
    fresh: Pages = pages[before == 0]
    return fresh


def _lower(counts: Pages, pages: Pages) -> Pages:
    """Take 1 away at ``pages``; return those that are 0 now."""
    after = counts[pages] - 1
    assert not len(after) or after.min() >= 0, "a page counted down below 0"
    counts[pages] = after
    last: Pages = pages[after == 0]
    return last
