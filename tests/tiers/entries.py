"""Small stores and the entries in them: sizes, pages of random bytes, and records that fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ninfer_pool import Namespace
from ninfer_pool.core import identity
from ninfer_pool.tiers.disk.files import Files
from ninfer_pool.tiers.disk.folder import Folder
from ninfer_pool.tiers.disk.geometry import DiskGeometry
from ninfer_pool.tiers.disk.manifest import Blob, EntryRecord, MarkRecord, RunBlob
from tests.tiers.failing_files import UnsyncedFiles

MIB = 1 << 20
Bytes = npt.NDArray[np.uint8]

SPACE = Namespace(weights="sha256:made", kv_dtype="int8", rope="theta=1e7", draft="mtp1")
# Two regions and padding: 3 × 4 rows of 5 bytes, then 2 × 4 rows of 7 from byte 64 on.
SMALL = DiskGeometry(
    page_bytes=128, page_tokens=4, image_bytes=96, grid=16, min_chunk=0,
    layout="made", rows=((0, 3, 5), (64, 2, 7)),
)  # fmt: skip
WHOLE = replace(SMALL, rows=None)


@dataclass
class Talk:
    """One conversation's tokens, KV pages and images, from a seed."""

    seed: int
    tokens: int
    geometry: DiskGeometry = SMALL
    namespace: Namespace = SPACE
    ids: npt.NDArray[np.int32] = field(init=False)
    pages: Bytes = field(init=False)

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.seed)
        self.ids = random.integers(0, 50_000, self.tokens, dtype=np.int32)
        count = -(-self.tokens // self.geometry.page_tokens)
        shape = (count, self.geometry.page_bytes)
        self.pages = random.integers(0, 256, shape, dtype=np.uint8)

    def image(self, position: int) -> Bytes:
        """The continuation state at a position."""
        random = np.random.default_rng([self.seed, position])
        return random.integers(0, 256, self.geometry.image_bytes, dtype=np.uint8)

    def rows(self, begin: int, end: int) -> Bytes:
        """The pages that positions ``[begin, end)`` touch."""
        size = self.geometry.page_tokens
        return self.pages[begin // size : -(-end // size)]

    def token_bytes(self, begin: int, end: int) -> bytes:
        """Their int32 ids."""
        return self.ids[begin:end].tobytes()

    def write(self, folder: Folder, *edges: int) -> list[RunBlob]:
        """Write runs from each edge to the next."""
        return [
            folder.write_run(
                begin=begin, end=end, tokens=self.token_bytes(begin, end),
                pages=self.rows(begin, end),
            )
            for begin, end in pairwise(edges)
        ]  # fmt: skip

    def record(
        self, folder: Folder, runs: Sequence[RunBlob], *positions: int, used: int = 0,
        created: float = 1e9, attributes: tuple[tuple[int, bytes], ...] = (),
    ) -> EntryRecord:  # fmt: skip
        """Write images at ``positions`` and return the record of all; not committed yet."""
        images = {at: folder.write_image(self.image(at)) for at in positions}
        return self.entry(runs, images, used=used, created=created, attributes=attributes)

    def entry(
        self, runs: Sequence[RunBlob], images: dict[int, Blob], *, used: int = 0,
        created: float = 1e9, attributes: tuple[tuple[int, bytes], ...] = (),
    ) -> EntryRecord:  # fmt: skip
        """The record of runs and images that are written."""
        end, space = max(images), self.geometry
        digest = self.namespace.digest(grid=space.grid, min_chunk=space.min_chunk)
        return EntryRecord(
            namespace=self.namespace,
            key=identity.sequence_key(digest, [self.token_bytes(0, end)], attributes),
            tokens=end, prompt_tokens=min(end, 3), priority=-1, hits=2, gap=5, used=used,
            created=created, released=False, attributes=attributes, runs=tuple(runs),
            marks=tuple(
                MarkRecord(
                    position=at, kind="turn", cuts=(at,), expires=None, image=image,
                    runs=tuple(index for index, run in enumerate(runs) if run.begin < at),
                )
                for at, image in sorted(images.items())
            ),
        )  # fmt: skip

    def commit(self, folder: Folder, *edges: int, used: int = 0, created: float = 1e9) -> str:
        """Write and commit the whole conversation, in runs between edges, a mark at each."""
        edges = edges or (0, self.tokens)
        runs = self.write(folder, *edges)
        return folder.commit(self.record(folder, runs, *edges[1:], used=used, created=created))

    def check(self, folder: Folder, record: EntryRecord) -> None:
        """Everything that a record holds is bit for bit what was written."""
        assert folder.tokens(record) == self.token_bytes(0, record.tokens)
        size = self.geometry.page_tokens
        for mark in record.marks:
            slab = np.zeros_like(self.rows(0, mark.position))
            runs = [record.runs[index] for index in mark.runs]
            for index, run in enumerate(runs):
                upto = runs[index + 1].begin if index + 1 < len(runs) else mark.position
                into = list(slab[run.begin // size : -(-upto // size)])
                tokens = self.token_bytes(run.begin, upto)
                folder.read_run(run, into=into, tokens=tokens, upto=upto)
            assert_rows(self.geometry, slab, self.rows(0, mark.position), upto=mark.position)
            assert mark.image is not None
            image = np.zeros(self.geometry.image_bytes, dtype=np.uint8)
            folder.read_image(mark.image, image)
            assert (image == self.image(mark.position)).all()


def assert_rows(geometry: DiskGeometry, found: Bytes, right: Bytes, *, upto: int) -> None:
    """Token rows of positions ``[0, upto)`` are the same."""
    for index, (one, other) in enumerate(zip(found, right, strict=True)):
        last = min(geometry.page_tokens, upto - index * geometry.page_tokens)
        assert (geometry.take(one, 0, last) == geometry.take(other, 0, last)).all()


def opened(path: Path, *, geometry: DiskGeometry = SMALL, files: Files | None = None) -> Folder:
    """The store at ``path``, as its writer."""
    files = files or UnsyncedFiles()
    return Folder(path, geometry=geometry, namespace=SPACE, files=files)


def tree_bytes(path: Path) -> int:
    """Bytes of all plain files below a folder."""
    return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
