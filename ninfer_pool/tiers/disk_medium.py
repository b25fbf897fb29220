"""A folder on disk as a tier's medium."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import numpy as np

from ninfer_pool.core.config import PoolConfig
from ninfer_pool.errors import StoreError
from ninfer_pool.tiers.disk.folder import Folder
from ninfer_pool.tiers.disk.geometry import DiskGeometry, same_base
from ninfer_pool.tiers.disk.manifest import Blob, EntryRecord, MarkRecord, RunBlob
from ninfer_pool.tiers.parts import Draft, DraftMark, Image, Part, Run, Stored, covering_end
from ninfer_pool.tiers.payload import Payload, Row, Source
from ninfer_pool.tiers.sources import StagedSource

MANIFEST_BYTES = 2048
MARK_BYTES = 640
RUN_BYTES = 320
"""What a manifest takes at most, about: once, for each checkpoint, for each run."""


class DiskMedium:
    """The medium of the disk tier: see `Folder`. ``used`` counts every byte below the folder."""

    def __init__(self, folder: Folder, config: PoolConfig, *, budget_bytes: int) -> None:
        self.folder = folder
        self.budget = budget_bytes
        self._config = config
        self._clock = config.clock
        self._withheld: list[str] = []
        """Entries that are not offered: with a lifetime where there is no clock, or unreadable."""
        records = folder.records.values()
        self._first = max((record.used for record in records), default=0) + len(records) + 1
        """Where this process's ticks begin in the order of use that outlives it."""

    @property
    def used(self) -> int:
        """Bytes of all files below the folder."""
        return self.folder.bytes

    def size(self, part: Part) -> int:
        """Return the bytes that a part's file takes."""
        if isinstance(part, Run):
            return self.folder.run_bytes(part.begin, part.end)
        return self.folder.image_file_bytes

    def overhead(self, draft: Draft) -> int:
        """Return the bytes of the manifest, at most."""
        runs = {part for mark in draft.marks for part in mark.stored.runs}
        extra = sum(
            4 * len(mark.cuts or ()) * 3 + 8 * len(mark.stored.runs) for mark in draft.marks
        )
        beside = sum(64 + 2 * len(payload) for _, payload in draft.attributes)
        count = MARK_BYTES * len(draft.marks) + RUN_BYTES * len(runs)
        return MANIFEST_BYTES + count + extra + beside

    def takes(self, draft: Draft) -> bool:
        """Say whether an entry is of the model that this folder is for."""
        return same_base(draft.namespace, self.folder.namespace)

    def write(self, part: Part, source: Source) -> Blob:
        """Write a part's file.

        Raises:
            StoreError: it cannot be written.
        """
        rows = source.rows(part)
        if isinstance(part, Run):
            return self.folder.write_run(
                begin=part.begin, end=part.end, tokens=part.tokens, pages=rows
            )
        return self.folder.write_image(_cut(rows, self._config.image_bytes))

    def probe(self) -> tuple[int, float, float]:
        """Write a file, read it and take it away again; return its bytes and both seconds.

        So that it is known how long a request would wait for this disk; (0, 0.0, 0.0) where there
        is no room for it.
        """
        part: Part = Image() if self._config.image_bytes else Run(0, 1, bytes(4))
        size = self.size(part)
        if self.used + size > self.budget:
            return 0, 0.0, 0.0
        pages = max(1, self._config.image_pages)
        rows = np.zeros((pages, self._config.page_bytes), dtype=np.uint8)
        began = time.perf_counter()
        try:
            place = self.write(part, StagedSource({part: list(rows)}))
            try:
                self.folder.settle(place)
                wrote = time.perf_counter()
                self.read(part, place, list(rows), tokens=bytes(4), upto=1)
                done = time.perf_counter()
            finally:
                self.free(place)
        except StoreError:
            return 0, 0.0, 0.0
        return size, wrote - began, done - wrote

    def reclaim(self, size: int) -> None:
        """Remove what nobody can use here, until ``size`` more bytes fit or none is left: entries
        that are not offered, then those of other models, oldest first."""
        while self._withheld and self.used + size > self.budget:
            self.remove(self._withheld.pop(0))
        excess = self.used + size - self.budget
        if excess > 0:
            with suppress(StoreError):
                self.folder.drop_foreign(excess)

    def views(self, place: Blob) -> None:
        """None: it lies on disk."""

    def read(
        self, part: Part, place: Blob, into: Sequence[Row], *, tokens: bytes, upto: int
    ) -> None:
        """Read and verify a part's file.

        Raises:
            StoreError: it is damaged.
        """
        if isinstance(place, RunBlob):
            self.folder.read_run(place, into=into, tokens=tokens, upto=upto)
            return
        size = self._config.image_bytes
        self.folder.read_image(place, _cut(into, size))
        into[-1][size - self._config.page_bytes * (len(into) - 1) :] = 0

    def free(self, place: Blob) -> None:
        """Give up a part's claim to its file, which goes once no record names it either."""
        with suppress(StoreError):
            self.folder.abandon(place)

    def commit(self, draft: Draft, places: dict[Part, Blob]) -> str:
        """Write an entry's manifest; durable when it returns.

        Raises:
            StoreError: it cannot be written; the entry is not there.
        """
        runs = list(dict.fromkeys(run for mark in draft.marks for run in mark.stored.runs))
        index = {run: at for at, run in enumerate(runs)}
        record = EntryRecord(
            namespace=draft.namespace,
            key=draft.key,
            tokens=draft.marks[-1].position,
            prompt_tokens=draft.prompt_tokens,
            priority=draft.priority,
            hits=draft.hits,
            gap=draft.gap,
            used=self._first + draft.used,
            created=time.time(),
            released=draft.released,
            attributes=tuple(draft.attributes),
            runs=tuple(_run_blob(places[run]) for run in runs),
            marks=tuple(self._mark(mark, places, index) for mark in draft.marks),
        )
        images = [mark.image for mark in record.marks if mark.image is not None]
        blobs = {(type(each), each.file): each for each in [*record.runs, *images]}
        for blob in blobs.values():
            self.folder.claim(blob)  # one that the commit settles: parts hold theirs till freed
        try:
            return self.folder.commit(record, wanted=lambda: not draft.cancelled)
        except BaseException:
            for blob in blobs.values():
                self.free(blob)
            raise

    def confirm(self, name: str) -> None:
        """Nothing withdraws it any more."""
        self.folder.confirm(name)

    def withdraw(self) -> None:
        """Take out what was cancelled after it was committed."""
        with suppress(StoreError):
            self.folder.withdraw()

    def _mark(self, mark: DraftMark, places: dict[Part, Blob], index: dict[Run, int]) -> MarkRecord:
        image = mark.stored.image
        return MarkRecord(
            position=mark.position,
            kind=mark.kind,
            cuts=mark.cuts,
            expires=to_wall(mark.expires, self._clock),
            runs=tuple(index[run] for run in mark.stored.runs),
            image=None if image is None else places[image],
        )

    def remove(self, name: str) -> None:
        """Remove an entry's manifest; files stay that parts or other entries need."""
        with suppress(StoreError):  # a file system that fails now: it is gone for this process
            self.folder.remove(name)

    def found(self) -> Iterator[tuple[str, Draft, dict[Part, Blob]]]:
        """Yield what the folder holds, least recently used first, and where its parts lie.

        Files that several entries name become one part. Reads token ids, no payload.
        """
        parts: dict[str, Part] = {}
        known: dict[tuple[Part | None, ...], Stored] = {}
        claimed: set[Part] = set()
        records = sorted(self.folder.records.items(), key=lambda item: item[1].used)
        for number, (name, record) in enumerate(records):
            places: dict[Part, Blob] = {}
            if _over(record):
                self.remove(name)
                continue
            try:
                runs = [self._run(parts, places, blob) for blob in record.runs]
            except StoreError:
                self._withheld.append(name)  # it cannot be read now
                continue
            marks = [
                _draft_mark(
                    mark,
                    _stored(known, runs, mark, parts, places),
                    expires=from_wall(mark.expires, self._clock),
                    tick=number - len(records),
                )
                for mark in record.marks
            ]
            if any(mark.expires is not None and self._clock is None for mark in marks):
                self._withheld.append(name)  # its time cannot be told here
                continue
            tokens = _tokens(record, runs)
            for part in places.keys() - claimed:
                self.folder.claim(places[part])
            claimed |= places.keys()
            yield name, _draft(record, tokens, marks, tick=number - len(records)), places

    def _run(self, parts: dict[str, Part], places: dict[Part, Blob], blob: RunBlob) -> Run:
        part = parts.get(f"runs/{blob.file}")
        if not isinstance(part, Run):
            part = Run(blob.begin, blob.end, self.folder.run_tokens(blob))
            parts[f"runs/{blob.file}"] = part
        places[part] = blob
        return part


def _over(record: EntryRecord) -> bool:
    """Say whether the time of every checkpoint is over."""
    now = time.time()
    return all(mark.expires is not None and mark.expires <= now for mark in record.marks)


def _tokens(record: EntryRecord, runs: Sequence[Run]) -> bytes:
    """Return an entry's token ids, int32: those of its deepest checkpoint's runs."""
    own = [runs[at] for at in record.marks[-1].runs]
    ends = [covering_end(own, index, record.tokens) for index in range(len(own))]
    return b"".join(run.tokens[: 4 * (end - run.begin)] for run, end in zip(own, ends, strict=True))


def _cut(rows: Sequence[Row], size: int) -> list[Row]:
    """Return an image's pages up to its end; those that lie together as one piece."""
    if isinstance(rows, np.ndarray) and rows.flags.c_contiguous:
        return [rows.reshape(-1)[:size]]
    last = size - sum(map(len, rows[:-1]))
    return [*rows[:-1], rows[-1][:last]]


def _run_blob(blob: Blob) -> RunBlob:
    assert isinstance(blob, RunBlob), "a run in an image's file"
    return blob


def _stored(
    known: dict[tuple[Part | None, ...], Stored],
    runs: list[Run],
    mark: MarkRecord,
    parts: dict[str, Part],
    places: dict[Part, Blob],
) -> Stored:
    own = [runs[at] for at in mark.runs]
    image = None
    if mark.image is not None:
        part = parts.setdefault(f"images/{mark.image.file}", Image())
        assert isinstance(part, Image), "an image in a run's file"
        places[part] = mark.image
        image = part
    return known.setdefault((*own, image), Stored(own, image))


def _draft_mark(mark: MarkRecord, stored: Stored, *, expires: float | None, tick: int) -> DraftMark:
    return DraftMark(
        position=mark.position,
        kind=mark.kind,
        cuts=mark.cuts,
        expires=expires,
        lane=0,
        tick=tick,
        uses=0,
        superseded=False,
        stored=stored,
    )


def _draft(record: EntryRecord, tokens: bytes, marks: list[DraftMark], *, tick: int) -> Draft:
    return Draft(
        namespace=record.namespace,
        key=record.key,
        tokens=tokens,
        attributes=list(record.attributes),
        prompt_tokens=record.prompt_tokens,
        priority=record.priority,
        released=record.released,
        hits=record.hits,
        gap=record.gap,
        created=tick,
        used=tick,
        marks=marks,
    )


def to_wall(expires: float | None, clock: Callable[[], float] | None) -> float | None:
    """Return a deadline of the pool's clock as seconds of the wall clock; None for never."""
    if expires is None or clock is None or expires == float("inf"):
        return None
    return time.time() + expires - clock()


def from_wall(expires: float | None, clock: Callable[[], float] | None) -> float | None:
    """Return a deadline of the wall clock as one of the pool's clock."""
    if expires is None or clock is None:
        return expires
    return clock() + expires - time.time()


def geometry_of(config: PoolConfig, payload: Payload) -> DiskGeometry:
    """Return what a pool's pages and images mean, for files."""
    return DiskGeometry(
        page_bytes=config.page_bytes,
        page_tokens=config.page_tokens,
        image_bytes=config.image_bytes,
        grid=config.grid,
        min_chunk=config.min_chunk,
        layout=payload.layout,
        rows=payload.regions,
    )
