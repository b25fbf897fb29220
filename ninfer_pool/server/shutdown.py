"""How a server ends in a stated time: requests first, then what the disk tier is to keep."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from ninfer_pool.core.sizes import format_bytes
from ninfer_pool.runner import Runner
from ninfer_pool.tiers import Tiers

REQUESTS_SHARE = 1 / 3
"""Of the time, what requests that run may take, where there are any."""
SPARE_SHARE = 0.1
"""Of the time, what is left when no further entry is begun: one that is being written may take
that long, and is lost where it takes longer."""
LAST_SECONDS = 0.25
"""Before its time is over, the process ends whatever it does: the disk tier survives that."""
FORCE_STOP_SECONDS = 2.0
"""How long a server that was told to leave at once may still take."""


class Deadline:
    """Ends the process when its time is over, whatever hangs then: a disk, a request, a client.

    Entries that were committed are safe at any moment, and nothing else is offered later.
    """

    def __init__(self, seconds: float, *, last: Callable[[], None]) -> None:
        self.seconds = seconds
        self._last = last
        self._ends = time.monotonic() + seconds
        self._watch: threading.Timer | None = None

    @property
    def for_requests(self) -> float:
        """Seconds that running requests have."""
        return self.seconds * REQUESTS_SHARE

    @property
    def for_flush(self) -> float:
        """Seconds from now until no further entry is begun."""
        return max(0.0, self._ends - self.seconds * SPARE_SHARE - time.monotonic())

    def watch(self, *, code: int = 0) -> None:
        """Let the process end with that code when the time is over."""
        self.stop()
        left = max(0.0, self._ends - time.monotonic() - min(LAST_SECONDS, self.seconds / 10))
        self._watch = threading.Timer(left, self._end, args=(code,))
        self._watch.daemon = True
        self._watch.start()

    def stop(self) -> None:
        """Watch no longer: the process ends by itself."""
        if self._watch is not None:
            self._watch.cancel()

    def _end(self, code: int) -> None:
        try:
            self._last()
        finally:
            os._exit(code)


def unwritten(tiers: Tiers) -> int:
    """Count the entries that are retained and not in the disk tier. Takes no lock."""
    if not keeps(tiers):
        return 0
    *upper, disk = tiers.shelves
    held = set(tiers.pool.retained.keys).union(*(set(shelf.keys) for shelf in upper))
    return len(held - set(disk.keys))


def keeps(tiers: Tiers) -> bool:
    """Say whether anything outlives the process."""
    return bool(tiers.shelves) and tiers.shelves[-1].name == "disk"


def last_line(runner: Runner, lost: int | None = None) -> str | None:
    """Return what is said at the very end: what the disk tier keeps, and what it does not.

    ``lost`` entries were not written; None: count them now.
    """
    tiers = runner.tiers
    if not keeps(tiers):
        return None
    disk = tiers.shelves[-1]
    lost = unwritten(tiers) if lost is None else lost
    size = format_bytes(disk.medium.used)
    return f"stopped: {len(disk.records)} entries on disk ({size}), {lost} not written"
