"""The ledger of pages: three reference counts per page, and the free list. No payload."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Pages = npt.NDArray[np.int32]
"""Ids of pages: 0 to ``num_pages`` - 1."""
Units = npt.NDArray[np.int32]
"""Ids of counted units: pages by their own ids, then images, whose ids follow the pages'."""


Index = npt.NDArray[np.intp]
"""The same ids in numpy's own index type."""


class PageLedger:
    """Three counts per page or image, and the free list.

    * ``checkpoint_refs``: checkpoints that hold it. A unit with one or more is *retained*.
    * ``lease_refs``: leases that read or write it.
    * ``pin_refs``: protected checkpoints (pinned, or being resumed from) that hold it.

    An image's pages need not be adjacent but are always held together, so they share one count.
    An image is one more *unit*, the row of a table that names its pages. Its pages are not counted
    by themselves meanwhile. A unit without a checkpoint or a lease is free. No eviction can free
    a unit with a lease or a pin: it is *unevictable*. Every amount is in pages; every method takes
    an array of distinct units, images last, and is O(len(units)).
    """

    __slots__ = (
        "_blank",
        "_free",
        "_ready",
        "_rows",
        "_top",
        "checkpoint_refs",
        "image_pages",
        "lease_refs",
        "pin_refs",
        "pinned",
        "retained",
        "total",
        "unevictable",
    )

    def __init__(self, num_pages: int, *, image_pages: int = 0) -> None:
        images = num_pages // image_pages if image_pages else 0
        self.total = num_pages
        """Pages in the slab."""
        self.image_pages = image_pages
        self.checkpoint_refs = np.zeros(num_pages + images, dtype=np.int32)
        self.lease_refs = np.zeros(num_pages + images, dtype=np.int32)
        self.pin_refs = np.zeros(num_pages + images, dtype=np.int32)
        self._free = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._top = num_pages
        self._rows = np.empty((images, image_pages), dtype=np.int32)
        self._blank = list(range(num_pages + images - 1, num_pages - 1, -1))
        """Images that have no pages."""
        self._ready: list[int] = []
        """Images whose pages are free."""
        self.retained = 0
        """Pages that some checkpoint holds."""
        self.unevictable = 0
        """Pages that no eviction can free."""
        self.pinned = 0
        """Pages that some protected checkpoint holds."""

    @property
    def free(self) -> int:
        """Pages without a reference."""
        return self._top + len(self._ready) * self.image_pages

    @property
    def freeable(self) -> int:
        """Pages that are free, or would be if every evictable checkpoint were evicted."""
        return self.total - self.unevictable

    def free_pages(self) -> Pages:
        """Return the ids of the pages without a reference. O(free)."""
        ready = [self.pages_of_image(image) for image in self._ready]
        return np.concatenate([self._free[: self._top], *ready])

    def pages_of_image(self, image: int) -> Pages:
        """Return the ids of an image's pages, in order; none for -1. O(1): a view."""
        return self._rows[image - self.total] if image >= 0 else self._free[:0]

    def size(self, units: Units | Index) -> int:
        """Return how many pages ``units`` are."""
        return len(units) + self._images(units) * (self.image_pages - 1)

    def _images(self, units: Units | Index) -> int:
        """Return how many of ``units`` are images: those at the end."""
        count, total = 0, self.total
        while count < len(units) and units[-1 - count] >= total:
            count += 1
        return count

    def take(self, count: int, *, images: int = 0) -> Units:
        """Take free pages and then images for a lease (``lease_refs`` 1 each).

        The caller checked `free` for all of it together.
        """
        assert 0 <= count + images * self.image_pages <= self.free
        made = [self._ready.pop() for _ in range(min(images, len(self._ready)))]
        while self._top < count + (images - len(made)) * self.image_pages:
            self._dissolve(self._ready.pop())
        units = np.empty(count + images, dtype=np.int32)
        units[:count] = self._pop(count)
        while len(made) < images:
            image = self._blank.pop()
            self._rows[image - self.total] = self._pop(self.image_pages)
            made.append(image)
        units[count:] = made
        self.lease_refs[units] = 1
        self.unevictable += count + images * self.image_pages
        return units

    def ref_lease(self, units: Units) -> None:
        """Count one more lease on units in use."""
        fresh = _raise(self.lease_refs, units)
        self.unevictable += self.size(fresh[self.pin_refs.take(fresh) == 0])

    def ref_lease_and_pin(self, units: Units) -> None:
        """Count one more lease and one more pin: `ref_lease` and `ref_pin` in one pass."""
        at = _index(units)
        leased, kept = self.lease_refs.take(at), self.pin_refs.take(at)
        self.lease_refs[at] = leased + 1
        self.pin_refs[at] = kept + 1
        self.pinned += self.size(at[kept == 0])
        self.unevictable += self.size(at[(leased | kept) == 0])

    def unref_lease(self, units: Units) -> None:
        """Count one lease less; units without another reference become free."""
        last = _lower(self.lease_refs, units)
        self.unevictable -= self.size(last[self.pin_refs.take(last) == 0])
        self._give(last[self.checkpoint_refs.take(last) == 0])

    def ref_checkpoint(self, units: Units) -> int:
        """Count one more checkpoint; return how many pages became retained."""
        fresh = self.size(_raise(self.checkpoint_refs, units))
        self.retained += fresh
        return fresh

    def unref_checkpoint(self, units: Units) -> int:
        """Count one checkpoint less; return how many pages are no longer retained."""
        last = _lower(self.checkpoint_refs, units)
        freed = self.size(last)
        self.retained -= freed
        self._give(last[self.lease_refs.take(last) == 0])
        return freed

    def ref_pin(self, units: Units) -> None:
        """Count one more pin."""
        fresh = _raise(self.pin_refs, units)
        self.pinned += self.size(fresh)
        self.unevictable += self.size(fresh[self.lease_refs.take(fresh) == 0])

    def unref_pin(self, units: Units) -> None:
        """Count one pin less."""
        last = _lower(self.pin_refs, units)
        self.pinned -= self.size(last)
        self.unevictable -= self.size(last[self.lease_refs.take(last) == 0])

    def evictable(self, units: Units) -> int:
        """Return how many pages of ``units`` an eviction could free."""
        return self.size(units[(self.lease_refs[units] | self.pin_refs[units]) == 0])

    def _pop(self, count: int) -> Pages:
        self._top -= count
        return self._free[self._top : self._top + count][::-1]

    def _push(self, pages: Pages | Index) -> None:
        # Pages freed in ascending order are taken in ascending order: tiers move them in one piece.
        self._free[self._top : self._top + len(pages)] = pages[::-1]
        self._top += len(pages)

    def _dissolve(self, image: int) -> None:
        self._push(self.pages_of_image(image))
        self._blank.append(image)

    def _give(self, units: Index) -> None:
        pages = len(units) - self._images(units)
        self._push(units[:pages])
        self._ready += units[pages:].tolist()

    def check(self) -> None:
        """Recount everything (G9); AssertionError names the difference. O(pages)."""
        used = (self.checkpoint_refs > 0) | (self.lease_refs > 0)
        unevictable = np.flatnonzero((self.lease_refs > 0) | (self.pin_refs > 0)).astype(np.int32)
        inside = np.flatnonzero(used[self.total :]) + self.total
        every = np.concatenate(
            [np.flatnonzero(used[: self.total]).astype(np.int32), self.free_pages()]
            + [self.pages_of_image(image) for image in inside.tolist()]
        )
        assert min(self.checkpoint_refs.min(), self.lease_refs.min(), self.pin_refs.min()) >= 0, (
            "negative count"
        )
        assert len(np.unique(self.free_pages())) == self.free, "a page is free twice"
        assert len(np.unique(every)) == len(every), "a page in use is on the free list"
        assert len(every) == self.total, "a page is lost"
        names = sorted([*self._blank, *self._ready, *inside.tolist()])
        assert names == list(range(self.total, len(self.checkpoint_refs))), "an image is lost"
        retained = np.flatnonzero(self.checkpoint_refs).astype(np.int32)
        assert self.size(retained) == self.retained, "retained pages miscounted"
        pinned = np.flatnonzero(self.pin_refs).astype(np.int32)
        assert self.size(pinned) == self.pinned, "pinned pages miscounted"
        assert self.size(unevictable) == self.unevictable, "unevictable pages miscounted"


def _index(units: Units) -> Index:
    """Return ids as numpy's own index type: each use of any other would be converted."""
    return np.asarray(units, dtype=np.intp)


def _raise(counts: Units, units: Units) -> Index:
    """Add 1 at ``units``; return those that were 0."""
    at = _index(units)
    before = counts.take(at)
    counts[at] = before + 1
    fresh: Index = at[before == 0]
    return fresh


def _lower(counts: Units, units: Units) -> Index:
    """Take 1 away at ``units``; return those that are 0 now."""
    at = _index(units)
    after = counts.take(at) - 1
    counts[at] = after
    last: Index = at[after <= 0]
    assert not len(last) or after.min() >= 0, "a unit counted down below 0"
    return last
