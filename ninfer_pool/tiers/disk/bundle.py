"""One entry as one file, for people: to keep, to move to another machine, to attach to a report.

A safetensors file: ``tokens`` I32 (n,), ``pages`` U8 (p, page_bytes), then for each checkpoint
``image.<position>`` U8 (image_bytes,), and ``tail.<position>`` U8 (page_bytes,) where its KV
differs from the line's in a partly covered page. Its metadata's one value is the manifest, with
a checksum of every tensor. Without ``tokens`` it can be looked at, not loaded.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from ninfer_pool.core.identity import Namespace
from ninfer_pool.errors import StoreError
from ninfer_pool.tiers.disk import manifest
from ninfer_pool.tiers.disk.bundle_header import (
    Bundle,
    check_bundle,
    check_fit,
    check_tokens,
    header_for,
    parse_header,
    tensors_of,
)
from ninfer_pool.tiers.disk.files import Files, locating, telling
from ninfer_pool.tiers.disk.geometry import Bytes, DiskGeometry, Pages
from ninfer_pool.tiers.disk.root import TEMPORARY
from ninfer_pool.tiers.disk.runs import check_pages
from ninfer_pool.tiers.disk.stream import Reader, Writer

MAX_HEADER_BYTES = 3 * manifest.MAX_MANIFEST_BYTES
"""The manifest within it, with every quote escaped, and the tensors' sizes."""
_UNKNOWN = "0" * 32


def write_bundle(
    path: Path,
    bundle: Bundle,
    *,
    tokens: bytes | None,
    pages: Iterable[Bytes],
    images: Mapping[int, Bytes],
    tails: Mapping[int, Bytes],
    files: Files | None = None,
) -> int:
    """Write a bundle, at once or not at all, over what ``path`` was; returns its bytes.

    Rows of a partly covered page that belong to no token of the entry are written as zeros.

    Args:
        path: a file; its folder is there.
        bundle: what to say of the entry.
        tokens: its int32 ids; None leaves them out, and a salt too.
        pages: uint8 (page_bytes,) of each page of its KV; taken one by one.
        images: uint8 (image_bytes,) by position; looked up one by one.
        tails: uint8 (page_bytes,) by position, of those marks that have one.

    Raises:
        StoreError: it cannot be written, or does not fit together.
    """
    if path.exists() and not path.is_file():
        raise StoreError(f"{path}: no file; needs a path that is free, or a file to replace")
    files = files or Files()
    bundle = replace(bundle, salted=bundle.namespace.salt is not None)
    check_bundle(bundle)
    if tokens is None:
        bundle = replace(bundle, namespace=replace(bundle.namespace, salt=None))
    else:
        check_tokens(bundle, tokens)
    given = _given(bundle, tokens=tokens, pages=pages, images=images, tails=tails)
    with locating(path), telling(path):
        folder = files.open_folder(path.parent)
        draft = TEMPORARY + secrets.token_hex(8)
        try:
            size = _write(files, folder, draft, bundle, given)
            files.rename(folder, draft, path.name)
            files.sync(folder)
        except BaseException:
            _forget(files, folder, draft)
            raise
        finally:
            files.close(folder)
    return size


def _write(
    files: Files, folder: int, draft: str, bundle: Bundle, given: dict[str, Iterator[Bytes]]
) -> int:
    """Write the tensors after room for the header, which only then can name their checksums."""
    sums = dict.fromkeys(given, _UNKNOWN)
    room = len(header_for(bundle, sums))
    file = files.create(folder, draft)
    try:
        files.write(file, [memoryview(bytes(room))])
        for name, parts in given.items():
            writer = Writer(files, file)
            writer.write(part.data for part in parts)
            sums[name] = writer.checksum
        files.write_beginning(file, header_for(bundle, sums))
        files.sync(file)
        return files.size(file)
    finally:
        files.close(file)


def _forget(files: Files, folder: int, name: str) -> None:
    try:
        files.unlink(folder, name)
    except OSError:
        return


def _given(
    bundle: Bundle,
    *,
    tokens: bytes | None,
    pages: Iterable[Bytes],
    images: Mapping[int, Bytes],
    tails: Mapping[int, Bytes],
) -> dict[str, Iterator[Bytes]]:
    """The parts of each tensor, made when they are written."""
    geometry = bundle.geometry
    states = bundle.marks if geometry.image_bytes else ()
    own = [mark for mark in bundle.marks if mark.tail]
    for name, marks, found in (("images", states, images), ("tails", own, tails)):
        right = [mark.position for mark in marks]
        if sorted(found) != right:
            raise StoreError(f"{name}: of positions {sorted(found)}; needs those of {right}")
    given: dict[str, Iterator[Bytes]] = {}
    if tokens is not None:
        given["tokens"] = iter([np.frombuffer(tokens, dtype=np.uint8)])
    given["pages"] = _trimmed(bundle, pages)
    for mark in states:
        given[f"image.{mark.position}"] = _image(geometry, images, mark.position)
    for mark in own:
        given[f"tail.{mark.position}"] = _tail(geometry, tails, mark.position)
    return given


def _image(geometry: DiskGeometry, images: Mapping[int, Bytes], position: int) -> Iterator[Bytes]:
    image = images[position]
    check_pages([image], 1, geometry.image_bytes)
    yield image


def _tail(geometry: DiskGeometry, tails: Mapping[int, Bytes], position: int) -> Iterator[Bytes]:
    page = tails[position]
    check_pages([page], 1, geometry.page_bytes)
    yield _last(geometry, page, position)


def _trimmed(bundle: Bundle, pages: Iterable[Bytes]) -> Iterator[Bytes]:
    count = 0
    for page in pages:
        check_pages([page], 1, bundle.geometry.page_bytes)
        count += 1
        yield page if count < bundle.pages else _last(bundle.geometry, page, bundle.tokens)
    if count != bundle.pages:
        raise StoreError(f"pages: {count}; needs {bundle.pages}")


def _last(geometry: DiskGeometry, page: Bytes, position: int) -> Bytes:
    """The page before ``position`` with nothing in it but rows of the entry's tokens."""
    count = position % geometry.page_tokens
    if not count or geometry.rows is None:
        return page
    clean = np.zeros_like(page)
    geometry.put(clean, geometry.take(page, 0, count), rows=(0, count), of=(0, count))
    return clean


def _read_header(files: Files, file: int) -> bytes:
    """Return a file's header, its length included."""
    length = bytearray(8)
    files.read(file, [memoryview(length)], 0)
    size = int.from_bytes(length, "little")
    if size > MAX_HEADER_BYTES:
        raise StoreError(f"header: {size} bytes; at most {MAX_HEADER_BYTES}")
    if size > files.size(file) - 8:
        raise EOFError(f"has a header of {size} bytes")
    raw = bytearray(size)
    files.read(file, [memoryview(raw)], 8)
    return bytes(length + raw)


class BundleReader:
    """An open bundle: what it says, and its tensors, each verified when it is read."""

    def __init__(
        self, files: Files, file: int, *, geometry: DiskGeometry | None, namespace: Namespace | None
    ) -> None:
        self._files = files
        self._file = file
        header = _read_header(files, file)
        self.bundle, self._sums = parse_header(header)
        check_fit(self.bundle, geometry, namespace)
        self._offsets: dict[str, tuple[int, int]] = {}
        at = len(header)
        for name, _, _, size in tensors_of(self.bundle, self._sums):
            self._offsets[name] = (at, size)
            at += size
        found = files.size(file)
        if found != at:
            raise StoreError(f"{found} bytes; needs {at}")

    @property
    def has_tokens(self) -> bool:
        """Whether it can be loaded: its token ids were not left out."""
        return "tokens" in self._sums

    def tokens(self) -> bytes:
        """Return the int32 token ids, which are those that its key names.

        Raises:
            StoreError: left out, or damaged.
        """
        if not self.has_tokens:
            raise StoreError("tokens: left out of this file; it can be looked at, not loaded")
        raw = bytearray(4 * self.bundle.tokens)
        self._read("tokens", [memoryview(raw)])
        check_tokens(self.bundle, bytes(raw))
        return bytes(raw)

    def read_pages(self, into: Pages) -> None:
        """Read the KV into pages, writable uint8 (page_bytes,) each.

        Raises:
            StoreError: damaged; then what is in ``into`` is of no use.
        """
        check_pages(into, self.bundle.pages, self.bundle.geometry.page_bytes)
        self._read("pages", (page.data for page in into))

    def read_image(self, position: int, into: Bytes) -> None:
        """Read the image of the checkpoint at ``position``; as `read_pages`."""
        check_pages([into], 1, self.bundle.geometry.image_bytes)
        self._read(f"image.{position}", [into.data])

    def read_tail(self, position: int, into: Bytes) -> None:
        """Read the page of the checkpoint's own at ``position``; as `read_pages`."""
        check_pages([into], 1, self.bundle.geometry.page_bytes)
        self._read(f"tail.{position}", [into.data])

    def verify(self) -> None:
        """Read every tensor and compare its checksum.

        Raises:
            StoreError: damaged.
        """
        for name, (_, size) in self._offsets.items():
            with self._checking(name) as reader:
                reader.skip(size)
        if self.has_tokens:
            self.tokens()

    def _read(self, name: str, views: Iterable[memoryview]) -> None:
        if name not in self._offsets:
            raise StoreError(f"{name}: not in this file")
        with self._checking(name) as reader:
            reader.read(views)

    @contextmanager
    def _checking(self, name: str) -> Iterator[Reader]:
        reader = Reader(self._files, self._file)
        reader.offset, _ = self._offsets[name]
        with telling(name):
            yield reader
        if reader.checksum != self._sums[name]:
            raise StoreError(f"{name}: checksum {reader.checksum}; it is damaged")


@contextmanager
def read_bundle(
    path: Path,
    *,
    geometry: DiskGeometry | None = None,
    namespace: Namespace | None = None,
    files: Files | None = None,
) -> Iterator[BundleReader]:
    """Open a bundle. With ``geometry`` and ``namespace`` only one that fits them.

    A namespace's salt and adapter do not count: the bundle has its own.

    Raises:
        StoreError: no bundle, damaged, of another version, or it does not fit; says in what.
    """
    files = files or Files()
    with locating(path), telling(path):
        folder = files.open_folder(path.parent)
        try:
            file = files.open(folder, path.name)
        finally:
            files.close(folder)
        try:
            yield BundleReader(files, file, geometry=geometry, namespace=namespace)
        finally:
            files.close(file)
