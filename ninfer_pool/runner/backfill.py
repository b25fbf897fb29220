"""Proven backfill: a request may overtake the one that waits only if it cannot delay it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

Bounds = tuple[int, int]
"""The least and the most, in pages."""


def delays(*, waiting: Bounds, candidate: int, free: int, running: Sequence[Bounds]) -> bool:
    """Say whether admitting ``candidate`` pages at most could make the waiting request wait longer.

    ``waiting`` pages are needed (how many it will resume by then is not known), ``free`` are free
    or would be if everything unprotected went, ``running`` are what each running request gives
    back when it ends, which it may do in any order and at any time. The waiting request can start
    once some set of them has ended; it must then be able to start with the candidate still
    running, too, wherever the truth lies between the bounds. O(2^running).
    """
    low, high = waiting
    for count in range(len(running) + 1):
        for ended in combinations(running, count):
            least = free + sum(pages for pages, _ in ended)
            most = free + sum(pages for _, pages in ended)
            if most >= low and high > least - candidate:
                return True
    return False
