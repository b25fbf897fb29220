"""A file layer that does something else than asked at one chosen call."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Sequence
from typing import Any

from ninfer_pool.tiers.disk.files import Files

WRITES = ("make_folder", "make_subfolder", "create", "_writev", "_pwrite", "sync", "rename")
REMOVALS = ("unlink", "remove_subfolder")
READS = ("open_folder", "open_subfolder", "open", "listing", "tree_bytes", "size", "_preadv")
CALLS = frozenset(WRITES + REMOVALS + READS + ("restrict", "tighten", "lock_file", "lock"))


class UnsyncedFiles(Files):
    """Does not wait for the disk, which only a loss of power would tell; one call at a time."""

    def sync(self, descriptor: int) -> None:
        os.fstat(descriptor)

    def each(self, waits: Collection[Callable[[], None]]) -> None:
        for wait in waits:
            wait()


class FailingFiles(UnsyncedFiles):
    """Counts calls of some kinds; at number ``at``, and all after it if ``lasting``, acts first.

    A write that is hit has put half of its bytes down before.
    """

    def __init__(
        self, act: Callable[[str], None], *, at: int, calls: Sequence[str] = tuple(CALLS),
        lasting: bool = False,
    ) -> None:  # fmt: skip
        self.act = act
        self.at = at
        self.calls = frozenset(calls)
        self.lasting = lasting
        self.count = 0

    def __getattribute__(self, name: str) -> Any:
        if name in CALLS and name in self.calls:
            self.count += 1
            hit = self.count - 1 == self.at or (self.lasting and self.count - 1 > self.at)
            if hit and name == "_writev":
                return self.torn
            if hit:
                self.act(name)
        return super().__getattribute__(name)

    def torn(self, file: int, views: Sequence[memoryview]) -> int:
        """Write half of the first view, then act."""
        done = os.write(file, views[0][: views[0].nbytes // 2])
        self.act("_writev")
        return done


class ShortFiles(UnsyncedFiles):
    """Every call moves a few bytes only."""

    def _writev(self, file: int, views: Sequence[memoryview]) -> int:
        return super()._writev(file, [views[0][:7]])

    def _pwrite(self, file: int, view: memoryview, offset: int) -> int:
        return super()._pwrite(file, view[:7], offset)

    def _preadv(self, file: int, views: Sequence[memoryview], offset: int) -> int:
        return super()._preadv(file, [views[0][:7]], offset)


def failing(code: int = errno.ENOSPC) -> Callable[[str], None]:
    """An act: the call fails with this error."""

    def act(name: str) -> None:
        raise OSError(code, os.strerror(code))

    return act


class LossyFiles(UnsyncedFiles):
    """A disk that can be told to fail when it is to make something last."""

    def __init__(self) -> None:
        self.fails = False
        self.syncs = 0
        self.before: Callable[[], None] = lambda: None
        self.fails_after = "/"
        """The end of a name; once a file has got such a name, it fails."""

    def rename(self, folder: int, old: str, new: str) -> None:
        super().rename(folder, old, new)
        self.fails = self.fails or new.endswith(self.fails_after)

    def sync(self, descriptor: int) -> None:
        if self.fails:
            self.syncs += 1
            self.before()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
