"""Runs and images as files: what is in them, packed from pages and unpacked into pages.

A file is a safetensors file whose header follows from the geometry and the positions alone, so
a reader knows its every byte count beforehand and compares the header instead of parsing it.

* run: ``tokens`` I32 (n,); then U8: ``head`` (rows of a first, partly covered page), ``pages``
  (w, page_bytes), ``tail`` (rows of a last, partly covered page); what is empty is left out
* image: ``image`` U8 (image_bytes,)
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import numpy as np

from ninfer_pool.errors import StoreError
from ninfer_pool.tiers.disk.geometry import Bytes, DiskGeometry, Pages
from ninfer_pool.tiers.disk.stream import Reader

BYTE = np.dtype(np.uint8)
Tensors = list[tuple[str, str, tuple[int, ...], int]]
"""(name, dtype, shape, bytes) of each."""


class Rows(NamedTuple):
    """The rows ``[first, last)`` of one page."""

    first: int
    last: int
    whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """How token positions ``[begin, end)`` lie on pages.

    ``head`` and ``tail`` are the rows of a first and last page that are only partly covered,
    None where there is none; ``whole`` counts the pages between. What lies within one page is a
    head if it begins inside the page, else a tail.
    """

    page_tokens: int
    head: Rows | None
    whole: int
    tail: Rows | None

    @classmethod
    def of(cls, begin: int, end: int, page_tokens: int) -> Span:
        """Split ``[begin, end)``; an ``end`` before ``begin`` is taken as ``begin``. O(1)."""
        edge, end = -(-begin // page_tokens) * page_tokens, max(begin, end)
        head = None
        if begin < min(edge, end):
            start = edge - page_tokens
            head = Rows(begin - start, min(end, edge) - start, whole=False)
        whole, left = divmod(max(0, end - edge), page_tokens)
        tail = Rows(0, left, whole=False) if left else None
        return cls(page_tokens=page_tokens, head=head, whole=whole, tail=tail)

    def rows(self) -> list[Rows]:
        """Return the rows on each page that it touches. O(pages)."""
        head = [] if self.head is None else [self.head]
        tail = [] if self.tail is None else [self.tail]
        return head + [Rows(0, self.page_tokens, whole=True)] * self.whole + tail


def header_of(tensors: Tensors, *, metadata: Mapping[str, str] | None = None) -> bytes:
    """Return a safetensors header as the library writes it; empty tensors are left out."""
    found: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for name, dtype, shape, size in tensors:
        if size:
            found[name] = {"dtype": dtype, "shape": shape, "data_offsets": (at, at + size)}
            at += size
    raw = json.dumps(found, separators=(",", ":")).encode("ascii")
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw


@lru_cache(maxsize=1024)
def run_header(geometry: DiskGeometry, begin: int, end: int) -> bytes:
    """Return the header of the file of a run. O(1)."""
    span, count = Span.of(begin, end, geometry.page_tokens), end - begin
    head, tail = (_stored_bytes(geometry, part) if part else 0 for part in (span.head, span.tail))
    return header_of(
        [
            ("tokens", "I32", (count,), 4 * count),
            ("head", "U8", (head,), head),
            ("pages", "U8", (span.whole, geometry.page_bytes), span.whole * geometry.page_bytes),
            ("tail", "U8", (tail,), tail),
        ]
    )


def run_bytes(geometry: DiskGeometry, begin: int, end: int) -> int:
    """Return the bytes of the file of a run. O(1)."""
    span = Span.of(begin, end, geometry.page_tokens)
    parts = sum(_stored_bytes(geometry, part) for part in (span.head, span.tail) if part)
    header = len(run_header(geometry, begin, end))
    return header + 4 * (end - begin) + parts + span.whole * geometry.page_bytes


@lru_cache(maxsize=16)
def image_header(geometry: DiskGeometry) -> bytes:
    """Return the header of the file of an image."""
    size = geometry.image_bytes
    return header_of([("image", "U8", (size,), size)])


def image_file_bytes(geometry: DiskGeometry) -> int:
    """Return the bytes of the file of an image."""
    return len(image_header(geometry)) + geometry.image_bytes


def pack(
    geometry: DiskGeometry, pages: Pages, *, begin: int, end: int, tokens: bytes
) -> Iterator[memoryview]:
    """Yield the bytes of a run's file, in order; whole pages without a copy.

    Args:
        pages: uint8 (page_bytes,) of each page that ``[begin, end)`` touches, in order.
        tokens: the int32 ids of ``[begin, end)``.
    """
    rows = Span.of(begin, end, geometry.page_tokens).rows()
    check_pages(pages, len(rows), geometry.page_bytes)
    if len(tokens) != 4 * (end - begin):
        raise StoreError(f"tokens: {len(tokens)} bytes for positions {begin} to {end}; needs int32")
    yield memoryview(run_header(geometry, begin, end))
    yield memoryview(tokens)
    for page, (first, last, whole) in zip(pages, rows, strict=True):
        yield (page if whole else geometry.take(page, first, last)).data


def check_pages(pages: Pages, count: int, page_bytes: int) -> None:
    """Say no to other than ``count`` contiguous pages of uint8 (page_bytes,).

    Raises:
        StoreError: names what is off.
    """
    if len(pages) != count:
        raise StoreError(f"pages: {len(pages)}; the positions lie on {count}")
    alike = isinstance(pages, np.ndarray) and pages.flags.c_contiguous
    shape = (page_bytes,)
    for page in pages[:1] if alike else pages:
        fits = page.dtype == BYTE and page.shape == shape and page.flags.c_contiguous
        if not fits:
            raise StoreError(
                f"pages: {page.dtype} of shape {page.shape}; needs contiguous uint8 ({page_bytes},)"
            )


def unpack(
    reader: Reader,
    geometry: DiskGeometry,
    *,
    begin: int,
    end: int,
    tokens: bytes,
    into: Pages,
    upto: int,
) -> None:
    """Read a run's file into pages, touching only rows of positions ``[begin, upto)``.

    The whole file is read, for its checksum, which the caller compares afterwards: until then
    what is in ``into`` is not to be trusted. Whole pages are read in place; at most two pages
    and one batch are held besides.

    Args:
        tokens: int32 ids from ``begin`` on, of at least ``[begin, upto)``.
        into: writable uint8 (page_bytes,) of each page that ``[begin, upto)`` touches.

    Raises:
        StoreError: the header or the tokens are others; then nothing was touched.
    """
    stored = Span.of(begin, end, geometry.page_tokens).rows()
    wanted = Span.of(begin, min(end, upto), geometry.page_tokens).rows()
    check_pages(into, len(wanted), geometry.page_bytes)
    _check_beginning(reader, geometry, begin=begin, end=end, tokens=tokens, upto=min(end, upto))
    views: list[memoryview] = []
    late: list[tuple[int, Bytes]] = []
    places = [
        held.whole and (rows.whole or geometry.rows is None)
        for held, rows in zip(stored, wanted, strict=False)
    ]
    for in_place, group in groupby(range(len(wanted)), key=places.__getitem__):
        if in_place:
            views += _views(into, list(group))
            continue
        for index in group:
            scratch = np.empty(_stored_bytes(geometry, stored[index]), dtype=np.uint8)
            views.append(scratch.data)
            late.append((index, scratch))
    reader.read(views)
    reader.skip(sum(_stored_bytes(geometry, rows) for rows in stored[len(wanted) :]))
    for index, scratch in late:
        rows, held = wanted[index], stored[index]
        packed = geometry.take(scratch, rows.first, rows.last) if held.whole else scratch
        of = rows if held.whole else held
        geometry.put(into[index], packed, rows=(rows.first, rows.last), of=(of.first, of.last))


def _views(pages: Pages, indices: list[int]) -> list[memoryview]:
    """Return pages that follow one another as memory: one piece where they lie together."""
    if isinstance(pages, np.ndarray) and pages.flags.c_contiguous:
        return [pages[indices[0] : indices[-1] + 1].reshape(-1).data]
    return [pages[index].data for index in indices]


def read_tokens(reader: Reader, geometry: DiskGeometry, *, begin: int, end: int) -> bytearray:
    """Read a run's file up to the end of its tokens and return them, int32.

    Raises:
        StoreError: the header is another.
    """
    expected = run_header(geometry, begin, end)
    header, tokens = bytearray(len(expected)), bytearray(4 * (end - begin))
    reader.read([memoryview(header), memoryview(tokens)])
    if header != expected:
        raise StoreError("header: not that of the run that it should hold")
    return tokens


def image_pieces(geometry: DiskGeometry, given: Pages) -> list[Bytes]:
    """Return the pieces that an image lies in, one after the other.

    Raises:
        StoreError: they are not contiguous uint8 of image_bytes in all.
    """
    pieces = [given] if isinstance(given, np.ndarray) else list(given)
    fit = all(each.dtype == np.uint8 and each.flags.c_contiguous for each in pieces)
    size = sum(each.nbytes for each in pieces)
    if not fit or size != geometry.image_bytes:
        raise StoreError(f"image: {size} bytes; needs contiguous uint8 of {geometry.image_bytes}")
    return pieces


def unpack_image(reader: Reader, geometry: DiskGeometry, into: Pages) -> None:
    """Read an image's file into uint8 (image_bytes,), whole or in pieces; as `unpack`."""
    pieces = image_pieces(geometry, into)
    expected = image_header(geometry)
    header = bytearray(len(expected))
    reader.read([memoryview(header)])
    if header != expected:
        raise StoreError("header: not that of an image")
    reader.read(piece.data for piece in pieces)


def _stored_bytes(geometry: DiskGeometry, rows: Rows) -> int:
    return geometry.page_bytes if rows.whole else geometry.part_bytes(rows.last - rows.first)


def _check_beginning(
    reader: Reader, geometry: DiskGeometry, *, begin: int, end: int, tokens: bytes, upto: int
) -> None:
    found = read_tokens(reader, geometry, begin=begin, end=end)
    if len(tokens) < 4 * (upto - begin) or not found.startswith(tokens):
        raise StoreError(f"tokens: not those of positions {begin} to {upto}")
