"""One sequence's state as llama.cpp writes it, split into pages of positions and rebuilt.

The library does not document the bytes of ``llama_state_seq_get_data``, so they are read strictly.
The engine's construction fails where the bytes of a probe differ from this form:

- u32 magic, u32 sequence.
- Attention: u32 streams, and for each u32 cells. One stream has cells; after its number follow:
    - cells × (i32 position, u32 1, fields that the model adds, i32 sequence),
    - u32 values transposed, u32 layers,
    - keys: layers × (i32 type, u64 row bytes, cells × row),
    - values: the same; transposed: layers × (i32 type, u32 element bytes, u32 row elements,
    - row elements × cells × element).
- Recurrent: the bytes of ``LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY`` after their magic and sequence.

Cells are stored in the order of their positions, 0 first. This module needs numpy only.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ninfer_pool.errors import ConfigError

Bytes = npt.NDArray[np.uint8]
HEAD = 8
"""Bytes before either part: magic and sequence."""
MOST_STREAMS = 256
EXTRA = (0, 2, 3)
"""int32 fields that a cell may have in addition to position, count and sequence."""


class StateError(ConfigError):
    """A state whose bytes have an unknown form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSection:
    """Keys or values of one layer: ggml's type, bytes per position; ``element`` if transposed."""

    type: int
    row: int
    element: int = 0

    @property
    def head(self) -> bytes:
        """The bytes before the rows."""
        if not self.element:
            return struct.pack("<iQ", self.type, self.row)
        return struct.pack("<iII", self.type, self.element, self.row // self.element)

    def rows(self, raw: Bytes, count: int) -> Bytes:
        """Return the section's bytes as (count, row), by position."""
        if not self.element:
            return raw.reshape(count, self.row)
        return raw.reshape(-1, count, self.element).swapaxes(0, 1).reshape(count, self.row)

    def raw(self, rows: Bytes) -> Bytes:
        """Return rows, (count, row), as the section's bytes."""
        if self.element:
            rows = rows.reshape(len(rows), -1, self.element).swapaxes(0, 1)
        return np.ascontiguousarray(rows).reshape(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayout:
    """The places of a state's bytes; a page has ``page_tokens`` cells and their rows of each part.

    ``cell`` is the number of int32 fields per cell. ``parts`` are the keys of every layer, then
    the values.
    """

    magic: int
    cell: int
    transposed: bool
    parts: tuple[KVSection, ...]
    page_tokens: int = 64

    @classmethod
    def read(cls, blob: Bytes, *, count: int, tail: int, page_tokens: int = 64) -> StateLayout:
        """Read the layout from a state of ``count`` positions with ``tail`` bytes after attention.

        Raises:
            StateError: it is none of the known ones.
        """
        for extra in EXTRA:
            reader = _Reader(blob)
            found = reader.layout(count, extra=extra, page_tokens=page_tokens)
            if found is not None and reader.left == tail:
                return found
        raise StateError(
            f"state: {blob.size} bytes of {count} positions in an unknown form; needs "
            "keys and values of every layer by position (no sliding window, no compressed KV)"
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.page_tokens * (4 * self.cell + sum(part.row for part in self.parts))

    def _regions(self) -> Iterator[tuple[KVSection, slice]]:
        """Yield each part's bytes in a page, after the cells."""
        begin = 4 * self.cell * self.page_tokens
        for part in self.parts:
            end = begin + part.row * self.page_tokens
            yield part, slice(begin, end)
            begin = end

    @staticmethod
    def find(blob: Bytes) -> tuple[int, int]:
        """Return the number of positions in a state, and the offset of their cells."""
        streams = int(blob[HEAD : HEAD + 4].view("<u4")[0])
        counts = blob[HEAD + 4 : HEAD + 4 + 4 * streams].view("<u4")
        stream = int(np.flatnonzero(counts)[0])
        return int(counts[stream]), HEAD + 4 + 4 * (stream + 1)

    def to_pages(self, blob: Bytes, slab: Bytes, pages: Sequence[int], *, begin: int) -> None:
        """Write the positions from ``begin``, where a page begins, on into ``pages`` of the slab.

        Raises:
            StateError: cells that are not in the order of their positions.
        """
        count, offset = self.find(blob)
        cells = blob[offset : offset + 4 * self.cell * count].view("<i4").reshape(count, self.cell)
        if not np.array_equal(cells[:, 0], np.arange(count)):
            raise StateError("state: cells out of order; needs one cell per position, 0 first")
        kept = cells[begin:].copy()
        kept[:, -1] = 0  # the sequence: the same bytes whichever lane computed them
        ids, size = np.asarray(pages), self.page_tokens
        self._put(slab, ids, slice(0, 4 * self.cell * size), kept.view(np.uint8))
        offset += cells.nbytes + 8
        for part, region in self._regions():
            offset += len(part.head)
            rows = part.rows(blob[offset : offset + part.row * count], count)
            self._put(slab, ids, region, rows[begin:])
            offset += part.row * count

    def _put(self, slab: Bytes, ids: npt.NDArray[Any], region: slice, rows: Bytes) -> None:
        whole = np.zeros((len(ids) * self.page_tokens, rows.shape[1]), dtype=np.uint8)
        whole[: len(rows)] = rows
        slab[ids, region] = whole.reshape(len(ids), -1)

    def from_pages(
        self,
        slab: Bytes,
        pages: Sequence[int],
        *,
        count: int,
        streams: int,
        sequence: int,
        tail: Bytes,
    ) -> Bytes:
        """Return the state of one sequence: ``count`` positions from ``pages``, then ``tail``."""
        ids = np.asarray(pages)

        def rows(region: slice) -> Bytes:
            return slab[ids, region].reshape(len(ids) * self.page_tokens, -1)[:count]

        cells = rows(slice(0, 4 * self.cell * self.page_tokens)).copy().view("<i4")
        cells[:, -1] = sequence
        before, after = bytes(4 * sequence), bytes(4 * (streams - 1 - sequence))
        head = struct.pack("<III", self.magic, sequence, streams) + before
        counted = struct.pack("<I", count)
        layers = struct.pack("<II", self.transposed, len(self.parts) // 2)
        sections: list[bytes | npt.NDArray[Any]] = [head, counted, cells, layers]
        for part, region in self._regions():
            sections += [part.head, part.raw(rows(region))]
        return np.concatenate([_flat(section) for section in [*sections, after, tail]])


def _flat(section: bytes | npt.NDArray[Any]) -> Bytes:
    if isinstance(section, bytes):
        return np.frombuffer(section, dtype=np.uint8)
    return section.reshape(-1).view(np.uint8)


class _Reader:
    """Reads a state from its first byte on; its methods return None for invalid bytes."""

    def __init__(self, blob: Bytes) -> None:
        self._blob = blob
        self._at = 0

    @property
    def left(self) -> int:
        return self._blob.size - self._at

    def take(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + form, self._blob.data, self._at)
        self._at += struct.calcsize("<" + form)
        return values

    def layout(self, count: int, *, extra: int, page_tokens: int) -> StateLayout | None:
        try:
            magic, sequence, streams = self.take("III")
            if not sequence < streams <= MOST_STREAMS:
                return None
            if self.take(f"{sequence + 1}I") != (*[0] * sequence, count):
                return None
            cells = [self.take(f"{3 + extra}i") for _ in range(count)]
            if [cell[:2] for cell in cells] != [(position, 1) for position in range(count)]:
                return None
            transposed, layers = self.take("II")
            keys = [self.part(count, transposed=False) for _ in range(layers)]
            values = [self.part(count, transposed=bool(transposed)) for _ in range(layers)]
            if any(self.take(f"{streams - 1 - sequence}I")):
                return None
        except struct.error:
            return None
        parts = tuple(part for part in (*keys, *values) if part is not None)
        if transposed > 1 or len(parts) != 2 * layers or not layers or self.left < 0:
            return None
        return StateLayout(
            magic=magic,
            cell=3 + extra,
            transposed=bool(transposed),
            parts=parts,
            page_tokens=page_tokens,
        )

    def part(self, count: int, *, transposed: bool) -> KVSection | None:
        if transposed:
            kind, element, elements = self.take("iII")
            part = KVSection(type=kind, row=element * elements, element=element)
        else:
            kind, row = self.take("iQ")
            part = KVSection(type=kind, row=row)
        self._at += part.row * count
        return part if part.row > 0 and self.left >= 0 else None
