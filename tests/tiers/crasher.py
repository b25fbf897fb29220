"""Writes to a store and is killed: at one call of the file system, or at any moment.

Run as a script: ``crasher.py calls DIR FIRST LAST STEP`` dies once at each such call of a short
life, in ``DIR/<call>``; ``crasher.py opening`` is killed again and again while it opens those;
``crasher.py kill DIR COUNT SEED`` is killed at random moments of a
long one, in ``DIR/<number>``. What it did is told in a log beside each store, line by line:
``commit TALK EDGE``, then ``done ID``; ``remove ID``, then ``gone ID``.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path

from ninfer_pool.tiers.disk.files import Files
from tests.tiers.entries import Talk, opened
from tests.tiers.failing_files import UnsyncedFiles
from tests.tiers.killing import end_each_after_a_while, ends_at_call


def talk_number(seed: int) -> Talk:
    """The conversations that are written, by number."""
    return Talk(seed=seed, tokens=12 + seed % 20)


def live(path: Path, files: Files, turns: Iterator[int]) -> None:
    """Open a store, let conversations come, grow and go, close it."""
    log = os.open(path.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def tell(*words: object) -> None:
        os.write(log, (" ".join(map(str, words)) + "\n").encode())

    folder = opened(path, files=files)
    tell("open")
    for seed in turns:
        talk = talk_number(seed)
        edges, middle = (0, 7, talk.tokens), 7
        before = folder.records
        runs = talk.write(folder, *edges[:2])
        tell("commit", seed, middle)
        small = folder.commit(talk.record(folder, runs, middle, used=seed))
        tell("done", small)
        runs += talk.write(folder, *edges[1:])
        tell("commit", seed, talk.tokens)
        tell("done", folder.commit(talk.record(folder, runs, middle, talk.tokens, used=seed)))
        for name in (small, *list(before)[:-2]):
            tell("remove", name)
            folder.remove(name)
            tell("gone", name)
    folder.close()
    tell("closed")


def die_at_each_call(path: Path, calls: range) -> None:
    """One short life for each call, ended there."""
    for at in calls:
        ends_at_call(at, partial(live, path / str(at), turns=iter((1, 2))))


def die_while_opening(path: Path, stores: range) -> None:
    """Open each store, killed at the first call, then at the second and so on, until it is open."""
    for number in stores:
        at = 0
        while ends_at_call(at, partial(open_store, path / str(number))):
            at += 1


def open_store(path: Path, files: Files) -> None:
    """Do no more."""
    opened(path, files=files)


def be_killed(path: Path, number: int, seed: int) -> None:
    """As many lives, one after the other in the same few stores, each killed after a while.

    No two of them, whatever the seed, write the same conversation.
    """
    lives = (
        partial(live, path / str(life % 4), UnsyncedFiles(), count(100_000 * seed + 1_000 * life))
        for life in range(number)
    )
    end_each_after_a_while(lives, random.Random(seed), most=0.03)


if __name__ == "__main__":
    kind, where, *numbers = sys.argv[1:]
    if kind == "calls":
        die_at_each_call(Path(where), range(*map(int, numbers)))
    elif kind == "opening":
        die_while_opening(Path(where), range(*map(int, numbers)))
    else:
        be_killed(Path(where), *map(int, numbers))
