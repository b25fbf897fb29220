"""Payload to and from a file, hashed on its way while it is in the processor's cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import xxhash

from ninfer_pool.tiers.disk.files import MOST_VIEWS, Files

BATCH_BYTES = 1 << 20
"""Moved by one call: it still lies in the cache when it is hashed."""


class Writer:
    """Writes a new file from its beginning. ``checksum`` is xxh3-128 of what was written."""

    def __init__(self, files: Files, file: int) -> None:
        self._files = files
        self._file = file
        self._hash = xxhash.xxh3_128()

    def write(self, views: Iterable[memoryview]) -> None:
        """Write views one after the other, in batches."""
        for batch in batches(views):
            self._files.write(self._file, batch)
            for view in batch:
                self._hash.update(view)

    @property
    def checksum(self) -> str:
        """32 hexadecimal digits."""
        return self._hash.hexdigest()


class Reader:
    """Reads a file from its beginning. ``checksum`` is xxh3-128 of what was read so far."""

    def __init__(self, files: Files, file: int) -> None:
        self._files = files
        self._file = file
        self._hash = xxhash.xxh3_128()
        self.offset = 0

    def read(self, views: Iterable[memoryview]) -> None:
        """Fill views one after the other, in batches.

        Raises:
            EOFError, OSError: as `Files.read`.
        """
        for batch in batches(views):
            self._files.read(self._file, batch, self.offset)
            for view in batch:
                self._hash.update(view)
                self.offset += view.nbytes

    def skip(self, count: int) -> None:
        """Read ``count`` bytes for their checksum alone."""
        scratch = memoryview(bytearray(min(count, BATCH_BYTES)))
        while count:
            piece = scratch[:count]
            self.read([piece])
            count -= piece.nbytes

    @property
    def checksum(self) -> str:
        """32 hexadecimal digits."""
        return self._hash.hexdigest()


def batches(views: Iterable[memoryview]) -> Iterator[Sequence[memoryview]]:
    """Cut views into batches of at most `BATCH_BYTES`, none of them empty."""
    batch: list[memoryview] = []
    size = 0
    for view in views:
        for start in range(0, view.nbytes, BATCH_BYTES):
            piece = view[start : start + BATCH_BYTES]
            if batch and (size + piece.nbytes > BATCH_BYTES or len(batch) == MOST_VIEWS):
                yield batch
                batch, size = [], 0
            batch.append(piece)
            size += piece.nbytes
    if batch:
        yield batch


def same_files(files: Files, folder: int, one: str, other: str) -> bool:
    """Say whether two names in a folder hold the same bytes; not where one cannot be read."""
    opened: list[int] = []
    try:
        opened.append(files.open(folder, one))
        opened.append(files.open(folder, other))
        return equal_files(files, *opened)
    except (OSError, EOFError):
        return False
    finally:
        for file in opened:
            files.close(file)


def equal_files(files: Files, one: int, other: int) -> bool:
    """Say whether two open files hold the same bytes. Two batches of memory."""
    size = files.size(one)
    if size != files.size(other):
        return False
    mine, theirs = bytearray(min(size, BATCH_BYTES)), bytearray(min(size, BATCH_BYTES))
    for offset in range(0, size, BATCH_BYTES):
        count = min(BATCH_BYTES, size - offset)
        for file, buffer in ((one, mine), (other, theirs)):
            files.read(file, [memoryview(buffer)[:count]], offset)
        if mine[:count] != theirs[:count]:
            return False
    return True
