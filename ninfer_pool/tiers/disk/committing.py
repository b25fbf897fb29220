"""How a record's manifest gets its name, which is what makes the record be there."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from threading import Condition

from ninfer_pool.errors import StoreError
from ninfer_pool.tiers.disk.files import telling
from ninfer_pool.tiers.disk.root import TEMPORARY
from ninfer_pool.tiers.disk.section import File, Section
from ninfer_pool.tiers.disk.syncing import Syncing


class Committing:
    """Manifests that are being written. ``lock`` guards everything here, and the section."""

    def __init__(
        self, section: Section, lock: Condition, syncing: Syncing, grow: Callable[[int], None]
    ) -> None:
        self._section = section
        self._lock = lock
        self._syncing = syncing
        self._grow = grow
        """Told how many bytes there are more, under the lock."""
        self._busy: set[str] = set()
        """Records that are being committed or removed."""
        self._named: dict[str, Callable[[], bool]] = {}
        """Those whose manifest has its name, and that are not offered yet."""

    @contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """Let nobody else commit or remove this record meanwhile."""
        with self._lock:
            self._lock.wait_for(lambda: name not in self._busy)
            self._busy.add(name)
        try:
            yield
        finally:
            with self._lock:
                self._busy.remove(name)
                self._lock.notify_all()

    def write(
        self, name: str, raw: bytes, needs: Collection[File], wanted: Callable[[], bool]
    ) -> None:
        """Write a manifest, once all that it names lasts. Until `confirm` it can be withdrawn.

        Raises:
            StoreError: it cannot be written, or is not wanted any more; then it is not there.
        """
        section, files = self._section, self._section.root.files
        folder, file = section.folders["entries"], f"{name}.json"
        draft, where = TEMPORARY + secrets.token_hex(8), section.anchor / "entries" / file
        with self._lock:
            self._grow(len(raw))
        try:
            with telling(where):
                opened = files.create(folder, draft)
                try:
                    files.write(opened, [memoryview(raw)])
                    self._syncing.sync(needs, opened)
                finally:
                    files.close(opened)
                with self._lock:
                    if not wanted():
                        raise StoreError(f"{name}: not wanted any more")
                    files.rename(folder, draft, file)
                    self._named[name] = wanted
                    section.sizes["entries", file] = len(raw)
        except BaseException:
            gone = [section.root.forget(folder, each) for each in (draft, file)]
            if all(gone):
                with self._lock:
                    self._grow(-len(raw))
            raise
        try:
            with telling(where):
                files.sync(folder)
        except BaseException:
            with self._lock:
                if self.stands(name):
                    self.undo(name)
            raise

    def undo(self, name: str) -> None:
        """Take out a manifest that is no record's yet. Under the lock."""
        section, file = self._section, f"{name}.json"
        self._named.pop(name, None)
        if section.root.forget(section.folders["entries"], file):
            self._grow(-section.sizes.pop(("entries", file), 0))
            self._syncing.removed = True

    def unwanted(self) -> list[str]:
        """Return what has just been committed and is not wanted any more. Under the lock."""
        return [name for name, wanted in self._named.items() if not wanted()]

    def stands(self, name: str) -> bool:
        """Say whether what `write` has written was not withdrawn since. Under the lock."""
        return name in self._named

    def confirm(self, name: str) -> None:
        """From now on it is not withdrawn. Under the lock."""
        self._named.pop(name, None)
