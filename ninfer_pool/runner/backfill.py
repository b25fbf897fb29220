"""Proven backfill: a request may overtake the one that waits only if it cannot delay it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

Bounds = tuple[int, int]
"""The least and the most, in pages."""


def delays(*, waiting: Bounds, candidate: int, free: int, running: Sequence[Bounds]) -> bool:
    """Return whether admitting a request could make the waiting one wait longer.

    The candidate takes ``candidate`` pages at most. The other needs ``waiting`` pages: its hit at
    that time is unknown. ``free`` pages are free, or would be without unprotected entries. A
    running request frees its ``running`` pages at its end, at any time and in any order. After
    some of these ends the waiting request can start; the candidate must not prevent that, for any
    values within the bounds. O(2^running).
    """
    low, high = waiting
    for count in range(len(running) + 1):
        for ended in combinations(running, count):
            least = free + sum(pages for pages, _ in ended)
            most = free + sum(pages for _, pages in ended)
            if most >= low and high > least - candidate:
                return True
    return False
