"""Drives a pool with a disk tier and is killed: at one call of the file system, or at any moment.

Run as a script: ``pool_crasher.py calls DIR FIRST LAST STEP`` dies once at each such call of a
short life, in ``DIR/<call>``; ``pool_crasher.py kill DIR COUNT SEED`` is killed at random moments
of a long one, in ``DIR/<number>``. What is certain is told in a log beside each store:
``kept TALK DEPTH`` once a flush has returned; ``evict TALK``, then ``gone TALK``.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterable
from functools import partial
from itertools import count
from pathlib import Path

from ninfer_pool.tiers.disk.files import Files
from tests.tiers.failing_files import UnsyncedFiles
from tests.tiers.killing import end_each_after_a_while, ends_at_call
from tests.tiers.toy_world import ToyDriver

BUDGET = 1 << 22
NAME = 8
"""Tokens that tell conversations apart."""


def talk_of(number: int) -> list[int]:
    """A conversation, all of it; those of other numbers part from it within `NAME` tokens."""
    chance = random.Random(number)
    name = [number // 12**at % 12 for at in range(NAME)]
    return name + [chance.randrange(13) for _ in range(10 + number % 17)]


def live(path: Path, files: Files, numbers: Iterable[int], *, background: bool) -> None:
    """Open a pool on a store, let conversations come, grow and go, close it."""
    log = os.open(path.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def tell(*words: object) -> None:
        os.write(log, (" ".join(map(str, words)) + "\n").encode())

    driver = ToyDriver(
        host=24, disk_dir=path, disk_budget=BUDGET, background=background, files=files
    )
    keys: dict[int, str] = {}
    for number in numbers:
        talk = talk_of(number)
        for upto in (9, len(talk) - 3, len(talk)):
            boundaries = [(9, "system"), (len(talk) - 3, "turn")]
            _, key = driver.serve(talk[:upto], [each for each in boundaries if each[0] <= upto])
            assert key is not None
            keys[number] = key
            driver.tiers.step()
        if number % 2:
            assert driver.tiers.flush() == 0
            for each in keys:
                tell("kept", each, len(talk_of(each)))
        if number % 3 == 0:
            old = next(iter(keys))
            tell("evict", old)
            driver.pool.evict(keys.pop(old))
            tell("gone", old)
    driver.tiers.close()
    tell("closed")


def die_at_each_call(path: Path, calls: range) -> None:
    """One short life for each call, ended there."""
    for at in calls:
        life = partial(live, path / str(at), numbers=range(1, 5), background=bool(at % 2))
        ends_at_call(at, life)


def be_killed(path: Path, number: int, seed: int) -> None:
    """As many lives, one after the other in the same few stores, each killed after a while."""
    lives = (
        partial(
            live,
            path / str(life % 4),
            UnsyncedFiles(),
            count(100_000 * seed + 1_000 * life + 1),
            background=life % 8 > 3,
        )
        for life in range(number)
    )
    end_each_after_a_while(lives, random.Random(seed), most=0.2)


if __name__ == "__main__":
    kind, where, *numbers = sys.argv[1:]
    if kind == "calls":
        die_at_each_call(Path(where), range(*map(int, numbers)))
    else:
        be_killed(Path(where), *map(int, numbers))
