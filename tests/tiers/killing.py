"""How a process is killed: at one call of the file system, or at any moment."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterable

from ninfer_pool.tiers.disk.files import Files
from tests.tiers.failing_files import CALLS, FailingFiles

KILLED = 9


def ends_at_call(at: int, work: Callable[[Files], None]) -> bool:
    """Do some work in a child that dies at its call number ``at``; False: it had fewer."""

    def die(_: str) -> None:
        os._exit(KILLED)

    if os.fork() == 0:
        work(FailingFiles(die, at=at, calls=tuple(CALLS)))
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.wait()[1])
    assert code in (0, KILLED), f"it ended by itself, with {code}"
    return code == KILLED


def end_each_after_a_while(
    works: Iterable[Callable[[], None]], chance: random.Random, *, most: float
) -> None:
    """Do each in a child, one after the other, and kill it after at most so many seconds."""
    for work in works:
        child = os.fork()
        if child == 0:
            work()
            os._exit(0)
        time.sleep(chance.uniform(most / 30, most))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
