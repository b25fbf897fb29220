"""Proven backfill: a request may overtake the one that waits only if it cannot delay it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations


def delays(*, waiting: int, candidate: int, free: int, running: Sequence[tuple[int, int]]) -> bool:
    """Say whether admitting ``candidate`` pages could make the waiting request wait longer.

    ``waiting`` pages are needed, ``free`` are free or would be if everything unprotected went,
    ``running`` are the least and the most that each running request gives back when it ends,
    which it may do in any order and at any time. The waiting request can start once some set of
    them has ended; it must then be able to start with the candidate still running, too, wherever
    the truth lies between the bounds. O(2^running).
    """
    for count in range(len(running) + 1):
        for ended in combinations(running, count):
            least = free + sum(pages for pages, _ in ended)
            most = free + sum(pages for _, pages in ended)
            if most >= waiting > least - candidate:
                return True
    return False
