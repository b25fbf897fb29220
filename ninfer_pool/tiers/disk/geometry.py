"""What the bytes on disk mean: sizes, where token rows lie in a page, and the fingerprint."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ninfer_pool.core.identity import Namespace, encode_number, encode_text, is_text, xxh3_128
from ninfer_pool.errors import GeometryError, NamespaceError, StoreError

VERSION = 1
"""Of the format on disk; it is part of every fingerprint."""
MAX_TEXT = 65_536
MAX_REGIONS = 16_384
MAX_BYTES = 2**40

Bytes: TypeAlias = npt.NDArray[np.uint8]
"""Raw bytes, uint8 (n,)."""
Pages: TypeAlias = Sequence[Bytes] | Bytes
"""Pages in order, uint8 (page_bytes,) each: apart, or the rows of one array."""
Rows: TypeAlias = tuple[tuple[int, int, int], ...]

_LEAST = {"page_bytes": 1, "page_tokens": 1, "image_bytes": 0, "grid": 1, "min_chunk": 0}
SHARED = ("weights", "kv_dtype", "rope", "draft", "rank", "world_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskGeometry:
    """The sizes of what is stored.

    Args:
        page_bytes, page_tokens: bytes and token positions of one page.
        image_bytes: bytes of one continuation state; 0 for plain attention.
        grid, min_chunk: where prefill is cut, as in `PoolConfig`.
        layout: names what lies where in a page and an image; equal texts, equal meaning.
        rows: (offset, outer, row_bytes) of each region of a page that holds token rows:
            ``page[offset:][: outer * page_tokens * row_bytes]`` seen as (outer, page_tokens,
            row_bytes). What lies in no region is padding, not stored for a partly covered page.
            None: a partly covered page is stored whole.

    Raises:
        GeometryError: names the field and what would be right.
    """

    page_bytes: int
    page_tokens: int
    image_bytes: int
    grid: int
    min_chunk: int
    layout: str
    rows: Rows | None = None

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= MAX_BYTES:
                raise GeometryError(f"{name}: {value!r}; needs an int of {least} to {MAX_BYTES}")
        if not is_text(self.layout) or len(self.layout) > MAX_TEXT:
            raise GeometryError(f"layout: needs valid Unicode of at most {MAX_TEXT} characters")
        if self.rows is not None:
            _check_rows(self.rows, self.page_bytes, self.page_tokens)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's rows; 0 where ``rows`` is None."""
        return sum(outer * size for _, outer, size in self.rows or ())

    def part_bytes(self, count: int) -> int:
        """Return what ``count`` rows of a partly covered page take on disk, in bytes."""
        return self.page_bytes if self.rows is None else count * self.row_bytes

    def take(self, page: Bytes, first: int, last: int) -> Bytes:
        """Return rows ``[first, last)`` of a page, packed: uint8 (part_bytes(last - first),)."""
        if self.rows is None:
            return page
        parts = [view[:, first:last].reshape(-1) for view in self._regions(page)]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint8)

    def put(
        self, page: Bytes, packed: Bytes, *, rows: tuple[int, int], of: tuple[int, int]
    ) -> None:
        """Set ``rows`` (first, last) of a page from packed ones, which are rows ``of`` a page."""
        if self.rows is None:
            page[:] = packed
            return
        count, at = of[1] - of[0], 0
        for view in self._regions(page):
            outer, _, size = view.shape
            end = at + outer * count * size
            source = packed[at:end].reshape(outer, count, size)
            view[:, slice(*rows)] = source[:, rows[0] - of[0] : rows[1] - of[0]]
            at = end

    def _regions(self, page: Bytes) -> list[npt.NDArray[np.uint8]]:
        return [
            page[offset : offset + outer * self.page_tokens * size].reshape(
                outer, self.page_tokens, size
            )
            for offset, outer, size in self.rows or ()
        ]

    def fingerprint(self, namespace: Namespace) -> str:
        """Return 32 hexadecimal digits that stand for all of this and a namespace.

        A namespace's salt and adapter are left out: each entry has its own. xxh3-128 of
        ``b"NPst"``, the format's version, the five sizes, the layout, the number of regions
        (-1 for None) and their numbers, then the namespace's fields; see `Namespace`.
        """
        numbers = [-1] if self.rows is None else [len(self.rows), *sum(self.rows, ())]
        parts = [b"NPst", encode_number(VERSION)]
        parts += [encode_number(getattr(self, name)) for name in _LEAST]
        parts += [encode_text(self.layout), *map(encode_number, numbers)]
        for name in SHARED:
            value = getattr(namespace, name)
            parts.append(encode_number(value) if isinstance(value, int) else encode_text(value))
        return xxh3_128(*parts).hex()


class VersionError(StoreError):
    """Something on disk of another version of the format: left alone."""


def _check_rows(rows: object, page_bytes: int, page_tokens: int) -> None:
    if not isinstance(rows, tuple) or len(rows) > MAX_REGIONS:
        raise GeometryError(f"rows: needs None or a tuple of at most {MAX_REGIONS} regions")
    end = 0
    for index, region in enumerate(rows):
        if not isinstance(region, tuple) or [type(number) for number in region] != [int] * 3:
            raise GeometryError(f"rows[{index}]: {region!r}; needs (offset, outer, row_bytes)")
        offset, outer, size = region
        if offset < end or outer < 1 or size < 1:
            raise GeometryError(
                f"rows[{index}]: {region!r}; needs an offset of {end} or more, and sizes above 0"
            )
        end = offset + outer * page_tokens * size
        if end > page_bytes:
            raise GeometryError(f"rows[{index}]: ends at byte {end} of a page of {page_bytes}")


def same_base(one: Namespace, other: Namespace) -> bool:
    """Say whether two namespaces differ in nothing but salt and adapter."""
    return all(getattr(one, name) == getattr(other, name) for name in SHARED)


def encode_geometry(geometry: DiskGeometry, namespace: Namespace) -> bytes:
    """Return what ``geometry.json`` holds."""
    fields = dataclasses.asdict(geometry)
    fields["namespace"] = {name: getattr(namespace, name) for name in SHARED}
    found = {"version": VERSION, "fingerprint": geometry.fingerprint(namespace), **fields}
    return (json.dumps(found, indent=1) + "\n").encode("ascii")


def geometry_of(fields: dict[str, Any]) -> DiskGeometry:
    """Return the geometry of fields as JSON has them; TypeError, KeyError for others."""
    rows = fields["rows"]
    return DiskGeometry(**{**fields, "rows": None if rows is None else tuple(map(tuple, rows))})


def decode_geometry(raw: bytes, fingerprint: str) -> tuple[DiskGeometry, Namespace]:
    """Return what ``geometry.json`` says.

    Raises:
        StoreError: damaged, of another version, or not what ``fingerprint`` stands for.
    """
    try:
        found: Any = json.loads(raw)
        version = found.pop("version")
        if version != VERSION:
            raise VersionError(f"version: {version!r:.40}; this ninfer-pool reads {VERSION}")
        named, shared = found.pop("fingerprint"), found.pop("namespace")
        geometry, namespace = geometry_of(found), Namespace(**shared)
        if not named == fingerprint == geometry.fingerprint(namespace):
            raise StoreError("fingerprint: does not stand for what the file says")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise StoreError(f"geometry.json: {type(error).__name__}; it is damaged") from None
    except (GeometryError, NamespaceError) as error:
        raise StoreError(f"geometry.json: {error}") from None
    return geometry, namespace
