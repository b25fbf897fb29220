"""The end of a server within a stated time: requests first, then writes to the disk tier."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from ninfer_pool.core.sizes import format_bytes
from ninfer_pool.runner import Runner
from ninfer_pool.tiers import Tiers

REQUESTS_SHARE = 1 / 3
"""The share of the time for running requests, where there are any."""
SPARE_SHARE = 0.1
"""The share of the time for the last write: an entry that takes longer to write is lost."""
LAST_SECONDS = 0.25
"""The process ends this long before its time is over; the disk tier survives that."""
FORCE_STOP_SECONDS = 2.0
"""The time of a server that was signalled to stop at once."""


class Deadline:
    """Ends the process when its time is over, even if a disk, a request or a client hangs.

    Committed entries are safe at any moment, and only those are offered later.
    """

    def __init__(self, seconds: float, *, last: Callable[[], None]) -> None:
        self.seconds = seconds
        self._last = last
        self._ends = time.monotonic() + seconds
        self._timer: threading.Timer | None = None

    @property
    def for_requests(self) -> float:
        """Seconds for running requests."""
        return self.seconds * REQUESTS_SHARE

    @property
    def for_flush(self) -> float:
        """Seconds from now until no further entry is written."""
        return max(0.0, self._ends - self.seconds * SPARE_SHARE - time.monotonic())

    def watch(self, *, code: int = 0) -> None:
        """End the process with that code when the time is over."""
        self.stop()
        left = max(0.0, self._ends - time.monotonic() - min(LAST_SECONDS, self.seconds / 10))
        self._timer = threading.Timer(left, self._end, args=(code,))
        self._timer.daemon = True
        self._timer.start()

    def stop(self) -> None:
        """Stop watching: the process ends by itself."""
        if self._timer is not None:
            self._timer.cancel()

    def _end(self, code: int) -> None:
        try:
            self._last()
        finally:
            os._exit(code)


def unwritten(tiers: Tiers) -> int:
    """Count the retained entries that are not in the disk tier. Takes no lock."""
    if not has_disk(tiers):
        return 0
    *upper, disk = tiers.shelves
    held = set(tiers.pool.state.catalog.keys).union(*(set(shelf.keys) for shelf in upper))
    return len(held - set(disk.keys))


def has_disk(tiers: Tiers) -> bool:
    """Return whether entries outlive the process."""
    return bool(tiers.shelves) and tiers.shelves[-1].name == "disk"


def last_line(runner: Runner, lost: int | None = None) -> str | None:
    """Return the last line of the console: entries in the disk tier, and those not written.

    ``lost`` is how many were not written; None: count them now. Without a disk tier, return None.
    """
    tiers = runner.tiers
    if not has_disk(tiers):
        return None
    disk = tiers.shelves[-1]
    lost = unwritten(tiers) if lost is None else lost
    size = format_bytes(disk.medium.used)
    return f"stopped: {len(disk.records)} entries on disk ({size}), {lost} not written"
