"""A store's folder: its version, its lock, and the folders of fingerprints in it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, TypeAlias

from ninfer_pool.errors import StoreError
from ninfer_pool.tiers.disk.files import Files, telling
from ninfer_pool.tiers.disk.geometry import VERSION
from ninfer_pool.tiers.disk.manifest import HASH

NOTICE, LOCK = "ninfer-pool.json", "lock"
TEMPORARY = ".tmp-"
"""What a file's name begins with until it is whole."""
FORMAT = "ninfer-pool-store"
Mode: TypeAlias = Literal["read", "change", "make"]
"""Shared with other readers; alone, in a store that is there; alone, in one made if need be."""
MAX_NOTICE_BYTES = 4096
_RIGHT = "needs a folder that ninfer-pool made, or an empty one"


class Root:
    """A store's folder, open and locked until `close`, or until the process ends.

    A writer makes what is missing, and has the folder for itself; readers share it.

    Raises:
        StoreError: no store, of another version, or in use.
    """

    def __init__(self, path: Path, files: Files, *, mode: Mode) -> None:
        self.path = path
        self.files = files
        self._lock: int | None = None
        with telling(path):
            if mode == "make":
                files.make_folder(path)
            self.folder = files.open_folder(path)
        try:
            self._open(mode)
        except BaseException:
            self.close()
            raise

    def _open(self, mode: Mode) -> None:
        names = self._names()
        if NOTICE not in names and (mode != "make" or any(map(_is_not_ours, names))):
            raise StoreError(f"{self.path}: no store; {_RIGHT}")
        self._take_lock(mode, names)
        names = self._names()  # who had the lock before may have made it
        if NOTICE in names:
            where = self.path / NOTICE
            check_notice(where, self.read(self.folder, where, MAX_NOTICE_BYTES))
        if mode == "read":
            return
        with telling(self.path):
            self.files.tighten(self.folder)
        self.clean(self.folder, names)
        if NOTICE not in names:
            notice = json.dumps({"format": FORMAT, "version": VERSION}) + "\n"
            self.replace(self.folder, self.path / NOTICE, notice.encode("ascii"))

    def _names(self) -> dict[str, int | None]:
        with telling(self.path):
            return self.files.listing(self.folder)

    def _take_lock(self, mode: Mode, names: dict[str, int | None]) -> None:
        if mode == "read" and LOCK not in names:
            return  # nobody has ever written here
        with telling(self.path / LOCK):
            write = mode != "read"
            self._lock = self.files.lock_file(self.folder, LOCK, create=write)
            taken = self.files.lock(self._lock, "exclusive" if write else "shared")
        if not taken:
            raise StoreError(f"{self.path}: in use by another process; stop it first")

    def fingerprints(self) -> list[str]:
        """Return the fingerprints that have a folder here, sorted."""
        names = self._names().items()
        return sorted(name for name, size in names if size is None and HASH.fullmatch(name))

    def tree_bytes(self) -> int:
        """Return the bytes of all plain files below the folder. O(files)."""
        with telling(self.path):
            return self.files.tree_bytes(self.folder)

    def read(self, folder: int, where: Path, most: int) -> bytes:
        """Return the bytes of a small file, which ``where`` names in messages and in its folder.

        Raises:
            StoreError: larger than ``most``, or cannot be read.
        """
        files = self.files
        with telling(where):
            file = files.open(folder, where.name)
            try:
                size = files.size(file)
                if size > most:
                    raise StoreError(f"{where}: {size} bytes; at most {most}")
                raw = bytearray(size)
                files.read(file, [memoryview(raw)], 0)
            finally:
                files.close(file)
        return bytes(raw)

    def replace(self, folder: int, where: Path, raw: bytes) -> None:
        """Give a small file, as in `read`, these bytes, at once and for good, or not at all.

        Raises:
            StoreError: it cannot be written; the file is as before.
        """
        files, draft = self.files, TEMPORARY + secrets.token_hex(8)
        with telling(where):
            file = files.create(folder, draft)
            try:
                try:
                    files.write(file, [memoryview(raw)])
                    files.sync(file)
                finally:
                    files.close(file)
                files.rename(folder, draft, where.name)
                files.sync(folder)
            except BaseException:
                self.forget(folder, draft)
                raise

    def clean(self, folder: int, names: Iterable[str]) -> None:
        """Remove what was half-written in a folder."""
        for name in names:
            if name.startswith(TEMPORARY):
                self.forget(folder, name)

    def forget(self, folder: int, name: str) -> bool:
        """Remove a file; False where that fails: the next writer does it."""
        try:
            self.files.unlink(folder, name)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Give the lock back. Twice is once."""
        for descriptor in (self._lock, self.folder):
            if descriptor is not None and descriptor >= 0:
                self.files.close(descriptor)
        self._lock, self.folder = None, -1


def _is_not_ours(name: str) -> bool:
    return name != LOCK and not name.startswith(TEMPORARY)


def check_notice(where: Path, raw: bytes) -> None:
    """Say no to what names another format or version.

    Raises:
        StoreError: says which, and what would be right.
    """
    try:
        found = json.loads(raw)
        name, version = found["format"], found["version"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise StoreError(f"{where}: damaged; {_RIGHT}") from None
    if name != FORMAT:
        raise StoreError(f"{where}: format {name!r:.40}; {_RIGHT}")
    if type(version) is not int:
        raise StoreError(f"{where}: version {version!r:.40}; needs {VERSION}")
    if version != VERSION:
        age = "a newer" if version > VERSION else "an older"
        raise StoreError(
            f"{where}: version {version}, of {age} ninfer-pool; this one reads and writes {VERSION}"
        )
