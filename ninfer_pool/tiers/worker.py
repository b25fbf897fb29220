"""One thread that writes to disk, or none."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable


class Worker:
    """Does one job at a time: in a thread of its own, or at once where there is none.

    So what is in flight is bounded by one entry, whose parts lie in the tier above meanwhile.
    """

    def __init__(self, *, background: bool) -> None:
        self._background = background
        self._idle = threading.Condition()
        self._job: Callable[[], None] | None = None
        self._thread: threading.Thread | None = None
        self._after: list[Callable[[], None]] = []
        self._closed = False

    @property
    def busy(self) -> bool:
        """A job is being done."""
        return self._job is not None

    def submit(self, job: Callable[[], None]) -> None:
        """Do a job; the caller has seen that none is being done."""
        if not self._background:
            job()
            return
        with self._idle:
            assert self._job is None, "one job at a time"
            self._job = job
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="ninfer-tiers", daemon=True)
                self._thread.start()
            self._idle.notify_all()

    def after(self, notify: Callable[[], None] | None) -> bool:
        """Let ``notify`` be called once, when the job in hand is done; False: there is none."""
        with self._idle:
            if self._job is None:
                return False
            if notify is not None and notify not in self._after:
                self._after.append(notify)
            return True

    def _loop(self) -> None:
        while True:
            with self._idle:
                self._idle.wait_for(lambda: self._job is not None or self._closed)
                job = self._job
            if job is None:
                return
            try:
                job()
            except Exception:  # our own bug: told, but nobody waits for ever
                tell_fault()
            finally:
                with self._idle:
                    self._job = None
                    after, self._after = self._after, []
                    self._idle.notify_all()
                self._notify(after)

    def _notify(self, after: list[Callable[[], None]]) -> None:
        for notify in after:
            try:
                notify()
            except Exception:  # the caller's: told, and the thread goes on
                tell_fault()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is being done; False: it still is. Not under the pool's lock."""
        with self._idle:
            return self._idle.wait_for(lambda: self._job is None, timeout)

    def close(self) -> None:
        """Finish the job in hand and end the thread."""
        with self._idle:
            self._closed = True
            self._idle.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def tell_fault() -> None:
    """Report the exception in hand, a fault of ours, where those of threads are reported."""
    told = (*sys.exc_info(), threading.current_thread())
    threading.excepthook(threading.ExceptHookArgs(told))
