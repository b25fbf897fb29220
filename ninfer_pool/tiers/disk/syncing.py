"""What a loss of power might still take, or bring back."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from ninfer_pool.tiers.disk.section import File, Section


class Syncing:
    """Knows what is not known to last, and makes it last.

    A payload file is waited for only once a manifest names it, and then many at once: one entry
    costs two waits for the disk, however many files it has.
    """

    def __init__(self, section: Section, lock: AbstractContextManager[Any]) -> None:
        self.removed = False
        """Something was removed that might come back."""
        self._section = section
        self._lock = lock
        """Guards everything here, and the section."""
        self._named: set[File] = set()
        """Files that have their name and may be lost."""

    def added(self, file: File) -> None:
        """A file has got its name. Under the lock."""
        self._named.add(file)

    def sync(self, needs: Collection[File], written: int | None = None) -> None:
        """Make files last, and with them an open one that has no name yet.

        Raises:
            OSError: the disk fails; ask again.
        """
        section, files = self._section, self._section.root.files
        with self._lock:
            self._named &= section.sizes.keys()
            lasting = self._named.intersection(needs)
        waits = [] if written is None else [partial(files.sync, written)]
        waits += [partial(self._sync_file, file) for file in sorted(lasting)]
        folders = sorted({folder for folder, _ in lasting})
        waits += [partial(files.sync, section.folders[folder]) for folder in folders]
        files.each(waits)
        with self._lock:
            self._named -= lasting

    def _sync_file(self, file: File) -> None:
        files = self._section.root.files
        opened = files.open(self._section.folders[file[0]], file[1])
        try:
            files.sync(opened)
        finally:
            files.close(opened)

    def settle(self) -> None:
        """Make removals last; if that fails, the next commit does.

        Raises:
            OSError: the disk fails.
        """
        with self._lock:
            removed, self.removed = self.removed, False
        if removed:
            self._section.root.files.sync(self._section.folders["entries"])
