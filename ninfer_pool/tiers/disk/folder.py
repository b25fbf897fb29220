"""The disk tier's folder, as its one writer sees it."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Condition, Lock

from ninfer_pool.core import identity
from ninfer_pool.core.identity import Namespace
from ninfer_pool.errors import StoreError
from ninfer_pool.tiers.disk import manifest, runs
from ninfer_pool.tiers.disk.committing import Committing
from ninfer_pool.tiers.disk.files import Files, telling
from ninfer_pool.tiers.disk.foreign import drop_foreign
from ninfer_pool.tiers.disk.geometry import DiskGeometry, Pages, same_base
from ninfer_pool.tiers.disk.making import open_for_writing
from ninfer_pool.tiers.disk.manifest import Blob, EntryRecord, RunBlob
from ninfer_pool.tiers.disk.root import TEMPORARY, Root
from ninfer_pool.tiers.disk.section import File, Section, check_sum
from ninfer_pool.tiers.disk.stream import Writer, same_files
from ninfer_pool.tiers.disk.syncing import Syncing


class Folder:
    """Whole entries on disk, of one geometry and base namespace.

    Payload is written first (`write_run`, `write_image`), then its record is committed. Each
    write is settled by one commit of a record that names it, or by `abandon`; a file lives as
    long as a record or an unsettled write needs it. An entry that grew is replaced by committing
    the new record and then removing the old one.

    Opening reads manifests and token ids. What is damaged is removed and counted in ``damaged``;
    what was half-written is removed and counted in ``reclaimed`` (files). Entries with another
    fingerprint are left alone.

    Thread-safe; payload is read and written without a lock.

    Args:
        path: made where it is missing.
        geometry, namespace: of everything stored; the namespace's salt and adapter are ignored.
        files: for tests.

    Raises:
        StoreError: in use by another process, no store, of another version, not writable.
    """

    def __init__(
        self,
        path: Path,
        *,
        geometry: DiskGeometry,
        namespace: Namespace,
        files: Files | None = None,
    ) -> None:
        self.geometry = geometry
        self.namespace = namespace
        self._lock = Condition(Lock())
        self._foreign = Lock()
        self._running, self._closed = 0, False
        self._unsettled: Counter[File] = Counter()
        self._root = Root(Path(path), files or Files(), mode="make")
        self._section = section = Section(self._root, geometry.fingerprint(namespace))
        try:
            open_for_writing(section, geometry, namespace)
            self.damaged = len(section.damaged)
            removed, _ = section.sweep()
            self.reclaimed = max(0, removed - self.damaged)
            self.bytes = self._root.tree_bytes()
        except BaseException:
            section.close()
            self._root.close()
            raise
        self._syncing = Syncing(section, self._lock)
        self._committing = Committing(section, self._lock, self._syncing, self._add)

    @property
    def fingerprint(self) -> str:
        """What names this geometry and namespace, 32 hexadecimal digits."""
        return self._section.fingerprint

    @property
    def records(self) -> dict[str, EntryRecord]:
        """Every committed record by its id; a copy."""
        with self._lock:
            return dict(self._section.records)

    def tokens(self, record: EntryRecord) -> bytes:
        """Return a record's token ids, int32; read from disk.

        Raises:
            StoreError: damaged.
        """
        with self._using():
            return self._section.tokens(record)

    def run_tokens(self, blob: RunBlob) -> bytes:
        """Return a run's own token ids, int32, read from disk; as `tokens`."""
        with self._using():
            return self._section.run_tokens(blob)

    def run_bytes(self, begin: int, end: int) -> int:
        """Return what the file of a run takes, in bytes."""
        return runs.run_bytes(self.geometry, begin, end)

    @property
    def image_file_bytes(self) -> int:
        """What the file of an image takes, in bytes."""
        return runs.image_file_bytes(self.geometry)

    def record_bytes(self, record: EntryRecord) -> int:
        """Return what the manifest of a record takes, in bytes."""
        return len(manifest.encode(record, self.fingerprint))

    def write_run(self, *, begin: int, end: int, tokens: bytes, pages: Pages) -> RunBlob:
        """Write the KV of token positions ``[begin, end)``.

        Args:
            tokens: their int32 ids.
            pages: uint8 (page_bytes,) of each page that they touch, in order.

        Raises:
            StoreError: it cannot be written (a full disk), or what is given does not fit.
        """
        if not 0 <= begin < end <= manifest.MAX_TOKENS:
            raise StoreError(f"run: [{begin}, {end}); needs 0 <= begin < end")
        views = runs.pack(self.geometry, pages, begin=begin, end=end, tokens=tokens)
        size = self.run_bytes(begin, end)
        file, checksum = self._write("runs", views, size)
        return RunBlob(
            file=file, checksum=checksum, bytes=size, begin=begin, end=end,
            tokens_checksum=identity.xxh3_128(tokens).hex(),
        )  # fmt: skip

    def write_image(self, data: Pages) -> Blob:
        """Write one continuation state, uint8 (image_bytes,), whole or in pieces.

        Raises:
            StoreError: as `write_run`.
        """
        pieces = runs.image_pieces(self.geometry, data)
        views = [memoryview(runs.image_header(self.geometry)), *(piece.data for piece in pieces)]
        file, checksum = self._write("images", views, self.image_file_bytes)
        return Blob(file=file, checksum=checksum, bytes=self.image_file_bytes)

    def _write(self, folder: str, views: Iterable[memoryview], size: int) -> tuple[str, str]:
        """Write a payload file and return its (name, checksum)."""
        files, draft = self._root.files, TEMPORARY + secrets.token_hex(8)
        with self._using() as section, telling(section.anchor / folder):
            where = section.folders[folder]
            self._grow(size)
            try:
                file = files.create(where, draft)
                try:
                    writer = Writer(files, file)
                    writer.write(views)
                finally:
                    files.close(file)
                name = self._settle(folder, draft, writer.checksum, size)
            except BaseException:
                if self._root.forget(where, draft):
                    self._grow(-size)
                raise
            return name, writer.checksum

    def _settle(self, folder: str, draft: str, checksum: str, size: int) -> str:
        """Give a file that is written its name, or drop it for one of the same bytes."""
        section = self._section
        for number in range(1_000_000):
            file = (folder, f"{checksum}{f'-{number}' if number else ''}.safetensors")
            with self._lock:
                self._unsettled[file] += 1
                section.uses[file] += 1
                if file not in section.sizes:
                    try:
                        self._root.files.rename(section.folders[folder], draft, file[1])
                    except OSError:
                        self._unsettle(file)
                        raise
                    section.sizes[file] = size
                    self._syncing.added(file)
                    return file[1]
            if same_files(self._root.files, section.folders[folder], draft, file[1]):
                if self._root.forget(section.folders[folder], draft):
                    self._grow(-size)
                return file[1]
            self._let_go(file)
        raise AssertionError("a million files of one checksum")

    def claim(self, blob: Blob) -> None:
        """Let a file that is there stay as if it had just been written, until that is settled."""
        with self._lock:
            self._section.uses[_file(blob)] += 1
            self._unsettled[_file(blob)] += 1

    def abandon(self, blob: Blob) -> None:
        """Settle a write that is not wanted after all."""
        with self._using():
            self._let_go(_file(blob))

    def _let_go(self, file: File) -> None:
        with self._lock:
            if self._unsettled[file]:
                self.bytes -= self._unsettle(file)

    def _unsettle(self, file: File) -> int:
        self._unsettled[file] -= 1
        if not self._unsettled[file]:
            del self._unsettled[file]
        return self._section.let_go({file: 0})

    def commit(self, record: EntryRecord, *, wanted: Callable[[], bool] = lambda: True) -> str:
        """Write a record's manifest and return its id; durable when it returns.

        Settles one write of each file that it names. Committing an equal record again changes
        nothing. Until `confirm` it is withdrawn by `withdraw` once it is not ``wanted``.

        Raises:
            StoreError: it cannot be written, does not fit what was written, or is not wanted;
                nothing changed, and its writes are still unsettled.
        """
        if not same_base(record.namespace, self.namespace):
            raise StoreError("namespace: not this folder's, but for salt and adapter")
        manifest.check(record, self.geometry)
        raw = manifest.encode(record, self.fingerprint)
        name, needs = manifest.identity(raw), record.files()
        with self._using() as section, self._committing.alone(name):
            with self._lock:
                for file, size in needs.items():
                    if section.sizes.get(file) != size:
                        raise StoreError(f"{'/'.join(file)}: not there; write it first")
                section.uses.update(needs.keys())
                known = name in section.records
            try:
                if not known:
                    section.check_tokens(record)
                    self._committing.write(name, raw, needs, wanted)
                with self._lock:
                    self._publish(section, name, record, known=known)
            except BaseException:
                with self._lock:
                    self.bytes -= section.let_go(needs)
                raise
        return name

    def _publish(self, section: Section, name: str, record: EntryRecord, *, known: bool) -> None:
        needs = record.files()
        if known:  # then its files were counted twice
            self.bytes -= section.let_go(needs)
        elif not self._committing.stands(name):
            raise StoreError(f"{name}: not wanted any more")
        section.records[name] = record
        for file in needs:
            if self._unsettled[file]:
                self.bytes -= self._unsettle(file)

    def confirm(self, name: str) -> None:
        """From now on only `remove` takes a record out."""
        with self._lock:
            self._committing.confirm(name)

    def withdraw(self) -> None:
        """Take out what has been committed, is not confirmed, and is not wanted any more."""
        with self._using() as section, self._lock:
            for name in self._committing.unwanted():
                if name not in section.records:
                    self._committing.undo(name)
                    continue
                with suppress(StoreError):  # a file system that fails now; `remove` tries again
                    self._drop(section, name)

    def remove(self, name: str) -> int:
        """Remove a record, and the files that nothing else needs; returns the bytes freed.

        A loss of power might bring it back until `settle`.

        Raises:
            StoreError: no such record, or its manifest cannot be removed.
        """
        with self._using() as section, self._committing.alone(name), self._lock:
            if name not in section.records:
                raise StoreError(f"id: {name!r}; no such entry")
            return self._drop(section, name)

    def _drop(self, section: Section, name: str) -> int:
        freed = section.drop(name)
        self._committing.confirm(name)
        self.bytes -= freed
        self._syncing.removed = True
        return freed

    @property
    def unsure(self) -> bool:
        """Something was removed that a loss of power might bring back."""
        return self._syncing.removed

    def settle(self, *written: Blob) -> None:
        """Make removals outlive a loss of power, and files of which no record is committed yet.

        Raises:
            StoreError: the disk fails.
        """
        with self._using() as section, telling(section.anchor):
            self._syncing.settle()
            self._syncing.sync([_file(blob) for blob in written])

    def read_run(
        self, blob: RunBlob, *, into: Pages, tokens: bytes, upto: int | None = None
    ) -> None:
        """Read a run into pages, touching only rows of positions ``[begin, min(end, upto))``.

        Args:
            into: writable uint8 (page_bytes,) of each page that those positions touch, in order.
            tokens: the int32 ids that those positions must have.

        Raises:
            StoreError: damaged, or other tokens; then what is in ``into`` is of no use.
        """
        upto = blob.end if upto is None else upto
        with self._using() as section, section.reading("runs", blob) as reader:
            runs.unpack(
                reader, self.geometry, begin=blob.begin, end=blob.end,
                tokens=tokens, into=into, upto=upto,
            )  # fmt: skip
            check_sum(reader, blob)

    def read_image(self, blob: Blob, into: Pages) -> None:
        """Read an image into uint8 (image_bytes,), whole or in pieces.

        Raises:
            StoreError: damaged; then what is in ``into`` is of no use.
        """
        with self._using() as section:
            section.read_image(blob, into)

    def drop_foreign(self, bytes_needed: int) -> int:
        """Remove entries of other fingerprints, oldest first, until so many bytes are freed.

        Folders that this version cannot read are left alone. Returns the bytes freed, maybe
        fewer. O(foreign entries).
        """
        with self._using(), self._foreign:
            freed = drop_foreign(self._root, self.fingerprint, bytes_needed)
            self._grow(-freed)
            return freed

    def close(self) -> None:
        """Settle, wait for what is running, then give the folder back. Twice is once."""
        with suppress(StoreError):
            self.settle()
        with self._lock:
            self._closed = True
            self._lock.wait_for(lambda: not self._running)
            self._section.close()
            self._root.close()

    @contextmanager
    def _using(self) -> Iterator[Section]:
        with self._lock:
            if self._closed:
                raise StoreError(f"{self._root.path}: closed")
            self._running += 1
        try:
            yield self._section
        finally:
            with self._lock:
                self._running -= 1
                self._lock.notify_all()

    def _grow(self, count: int) -> None:
        with self._lock:
            self._add(count)

    def _add(self, count: int) -> None:
        self.bytes += count


def _file(blob: Blob) -> File:
    return ("runs" if isinstance(blob, RunBlob) else "images", blob.file)
