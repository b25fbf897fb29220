"""One fingerprint's folder: what is in it, what each file is needed for, and removal."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from typing import TypeAlias

from ninfer_pool.core import identity
from ninfer_pool.core.identity import Namespace
from ninfer_pool.errors import StoreError
from ninfer_pool.tiers.disk import manifest, runs
from ninfer_pool.tiers.disk.files import locating, telling
from ninfer_pool.tiers.disk.geometry import DiskGeometry, Pages, decode_geometry
from ninfer_pool.tiers.disk.manifest import Blob, EntryRecord, MarkRecord, RunBlob
from ninfer_pool.tiers.disk.root import Root
from ninfer_pool.tiers.disk.stream import Reader

FOLDERS = ("runs", "images", "entries")
GEOMETRY = "geometry.json"
MAX_GEOMETRY_BYTES = 1 << 20

File: TypeAlias = tuple[str, str]
"""(folder, name)."""

_LOST = {errno.EIO, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENXIO, errno.ENOENT, 0}
"""What says that one file is lost, not that the system is out of something."""


class Section:
    """The folder of one fingerprint, as it was when opened and as changed through this.

    ``records`` are what is whole, by id; ``damaged`` says why a manifest is not offered;
    ``sizes`` has the bytes of each plain file, ``uses`` how many records, and writes that are
    not committed yet, need it. Not thread-safe.
    """

    def __init__(self, root: Root, fingerprint: str) -> None:
        self.root = root
        self.fingerprint = fingerprint
        self.anchor = root.path / fingerprint
        self.folders: dict[str, int] = {}
        self.sizes: dict[File, int] = {}
        self.strays: list[File] = []
        """What is no plain file: never opened."""
        self.records: dict[str, EntryRecord] = {}
        self.damaged: dict[str, str] = {}
        self.uses: Counter[File] = Counter()

    @classmethod
    def open(cls, root: Root, fingerprint: str) -> Section:
        """Open a folder that another writer made, by its own ``geometry.json``.

        Raises:
            StoreError: it cannot be read, or is of another version.
        """
        section = cls(root, fingerprint)
        try:
            section.open_folders()
            raw = root.read(section.folders[""], section.anchor / GEOMETRY, MAX_GEOMETRY_BYTES)
            section.set_geometry(*decode_geometry(raw, fingerprint))
            section.scan()
        except BaseException:
            section.close()
            raise
        return section

    geometry: DiskGeometry
    namespace: Namespace

    def set_geometry(self, geometry: DiskGeometry, namespace: Namespace) -> None:
        """Say what the bytes mean."""
        self.geometry = geometry
        self.namespace = namespace

    def open_folders(self) -> None:
        """Open the folder and those in it.

        Raises:
            StoreError: one is missing or no folder.
        """
        files = self.root.files
        with telling(self.anchor):
            self.folders[""] = files.open_subfolder(self.root.folder, self.fingerprint)
        for name in FOLDERS:
            with telling(self.anchor / name):
                self.folders[name] = files.open_subfolder(self.folders[""], name)

    def close(self) -> None:
        """Close the folders."""
        while self.folders:
            _, folder = self.folders.popitem()
            self.root.files.close(folder)

    def scan(self) -> None:
        """Read which files there are, with their sizes."""
        for folder in FOLDERS:
            with telling(self.anchor / folder):
                found = self.root.files.listing(self.folders[folder])
            for name, size in found.items():
                if size is None:
                    self.strays.append((folder, name))
                else:
                    self.sizes[folder, name] = size

    def read_records(self, *, tokens: str) -> None:
        """Read every manifest; with ``tokens="check"`` also each record's token ids.

        Raises:
            StoreError: the system is out of something; what is damaged is only noted.
        """
        for folder, name in list(self.sizes):
            if folder != "entries" or name.startswith("."):
                continue
            with self._noting(name):
                record = self._read_manifest(name)
                for file, size in record.files().items():
                    if self.sizes.get(file) != size:
                        raise StoreError(f"{'/'.join(file)}: missing, or not of {size} bytes")
                if tokens == "check":
                    self.check_tokens(record)
                self.add(name.removesuffix(".json"), record)

    @contextmanager
    def _noting(self, name: str) -> Iterator[None]:
        try:
            yield
        except StoreError as error:
            if passes(error):
                raise
            self.damaged[name] = str(error).removeprefix(f"{self.anchor / 'entries' / name}: ")

    def _read_manifest(self, name: str) -> EntryRecord:
        where = self.anchor / "entries" / name
        raw = self.root.read(self.folders["entries"], where, manifest.MAX_MANIFEST_BYTES)
        if name != f"{manifest.identity(raw)}.json":
            raise StoreError(f"name: {name!r:.100}; not that of its contents")
        return manifest.decode(raw, fingerprint=self.fingerprint, geometry=self.geometry)

    def add(self, name: str, record: EntryRecord) -> None:
        """Offer a record."""
        self.records[name] = record
        self.uses.update(record.files().keys())

    @contextmanager
    def reading(self, folder: str, blob: Blob) -> Iterator[Reader]:
        """Open a payload file of the size that its record says.

        Raises:
            StoreError: missing, of another size, or whatever goes wrong while it is read.
        """
        files, where = self.root.files, f"{self.anchor}/{folder}/{blob.file}"
        with locating(where), telling(where):
            file = files.open(self.folders[folder], blob.file)
            try:
                yield self._reader(file, blob)
            finally:
                files.close(file)

    def _reader(self, file: int, blob: Blob) -> Reader:
        size = self.root.files.size(file)
        if size != blob.bytes:
            raise StoreError(f"{size} bytes; needs {blob.bytes}")
        return Reader(self.root.files, file)

    def check_tokens(self, record: EntryRecord) -> None:
        """Say no to a record whose token ids are not those that its key names."""
        space = self.geometry
        digest = record.namespace.digest(grid=space.grid, min_chunk=space.min_chunk)
        key = identity.sequence_key(digest, [self.tokens(record)], record.attributes)
        if key != record.key:
            raise StoreError(f"key: {record.key}; its tokens and attributes have {key}")

    def tokens(self, record: EntryRecord) -> bytes:
        """Return a record's token ids, int32, read from its runs. O(tokens).

        Raises:
            StoreError: damaged, or a checkpoint's runs tell other tokens than the deepest one's.
        """
        found = [self.run_tokens(blob) for blob in record.runs]
        line = b"".join(_of_mark(record, record.marks[-1], found))
        if len(line) < 4 * record.tokens:
            raise StoreError(f"tokens: runs hold {len(line) // 4}; needs {record.tokens}")
        for mark in record.marks[:-1]:
            if not line.startswith(b"".join(_of_mark(record, mark, found))):
                raise StoreError(f"tokens: those of the checkpoint at {mark.position} are others")
        return line

    def run_tokens(self, blob: RunBlob) -> bytes:
        """Return a run's token ids, int32.

        Raises:
            StoreError: damaged.
        """
        with self.reading("runs", blob) as reader:
            found = runs.read_tokens(reader, self.geometry, begin=blob.begin, end=blob.end)
        if identity.xxh3_128(found).hex() != blob.tokens_checksum:
            raise StoreError(f"{blob.file}: its tokens are damaged")
        return bytes(found)

    def verify(self, folder: str, blob: Blob) -> None:
        """Read a whole payload file and compare its checksum.

        Raises:
            StoreError: damaged.
        """
        with self.reading(folder, blob) as reader:
            reader.skip(blob.bytes)
            check_sum(reader, blob)

    def read_image(self, blob: Blob, into: Pages) -> None:
        """See `Folder.read_image`."""
        with self.reading("images", blob) as reader:
            runs.unpack_image(reader, self.geometry, into)
            check_sum(reader, blob)

    def drop(self, name: str) -> int:
        """Remove a record and the files that nothing else needs; returns the bytes freed.

        Raises:
            StoreError: its manifest cannot be removed; then nothing was.
        """
        file = ("entries", f"{name}.json")
        record = self.records[name]
        with telling(self.anchor / "entries" / file[1]):
            self.root.files.unlink(self.folders["entries"], file[1])
        del self.records[name]
        freed = self.sizes.pop(file, 0)
        return freed + self.let_go(record.files())

    def let_go(self, files: dict[File, int]) -> int:
        """Count one use less of each file and remove those without any; bytes freed."""
        freed = 0
        for file in files:
            self.uses[file] -= 1
            if self.uses[file] <= 0:
                del self.uses[file]
                freed += self.remove_file(file)
        return freed

    def remove_file(self, file: File) -> int:
        """Remove a file; returns its bytes, 0 where that fails: the next writer does it."""
        folder, name = file
        if not self.root.forget(self.folders[folder], name):
            return 0
        return self.sizes.pop(file, 0)

    def sweep(self) -> tuple[int, int]:
        """Remove damaged manifests, then what no record needs; returns (files, bytes)."""
        needed = {("entries", f"{name}.json") for name in self.records} | set(self.uses)
        unneeded = [file for file in self.sizes if file not in needed] + self.strays
        before, files = sum(self.sizes.values()), 0
        for file in sorted(unneeded, key=lambda file: file[0] != "entries"):
            folder, name = file
            gone = self.root.forget(self.folders[folder], name)
            files += gone
            if gone:
                self.sizes.pop(file, None)
        return files, before - sum(self.sizes.values())

    def remove(self) -> int:
        """Remove everything that a writer made here, and the folder; returns the bytes freed."""
        freed = sum(map(self.drop, list(self.records))) + self.sweep()[1]
        files, own = self.root.files, self.folders[""]
        size = files.listing(own).get(GEOMETRY) or 0
        if self.root.forget(own, GEOMETRY):
            freed += size
        self.close()
        with suppress(OSError):  # something else lies there
            folder = files.open_subfolder(self.root.folder, self.fingerprint)
            try:
                for name in FOLDERS:
                    files.remove_subfolder(folder, name)
            finally:
                files.close(folder)
            files.remove_subfolder(self.root.folder, self.fingerprint)
        return freed

    def by_age(self) -> list[tuple[float, int, str, str]]:
        """Return (time, order, fingerprint, id) of each record, which sort by their last use.

        Within a fingerprint the order is that of use. The time lets one compare those of several:
        that at which the latest of the entries not used since was made.
        """
        ordered = sorted(self.records.items(), key=lambda item: (item[1].used, item[0]))
        times = accumulate((record.created for _, record in ordered), max)
        return [
            (time, order, self.fingerprint, name)
            for order, (time, (name, _)) in enumerate(zip(times, ordered, strict=True))
        ]


def passes(error: Exception) -> bool:
    """Say whether the system was out of something, so that what lies on disk may well be whole."""
    cause = error if isinstance(error, OSError) else error.__cause__
    return isinstance(cause, OSError) and (cause.errno or 0) not in _LOST


def check_sum(reader: Reader, blob: Blob) -> None:
    """Say no to a file that was read whole and has another checksum."""
    if reader.checksum != blob.checksum:
        raise StoreError(f"checksum {reader.checksum}; it is damaged")


def _of_mark(record: EntryRecord, mark: MarkRecord, tokens: Sequence[bytes]) -> Iterator[bytes]:
    """Yield the tokens of each run of a checkpoint, up to where the next one begins."""
    for at, next_at in zip(mark.runs, [*mark.runs[1:], None], strict=True):
        end = mark.position if next_at is None else record.runs[next_at].begin
        yield tokens[at][: 4 * (end - record.runs[at].begin)]
