"""One entry as one file, and back: kept, moved to another machine, attached to a report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ninfer_pool.core.entry import Checkpoint, PageTable
from ninfer_pool.core.eviction import enforce_budget, evict_for
from ninfer_pool.core.identity import Namespace
from ninfer_pool.core.insertion import NewSequence, insert
from ninfer_pool.core.ledger import Pages
from ninfer_pool.core.results import EvictionCost
from ninfer_pool.errors import RoomError, StoreError
from ninfer_pool.tiers.disk.bundle import BundleReader, read_bundle, write_bundle
from ninfer_pool.tiers.disk.bundle_header import Bundle, BundleMark
from ninfer_pool.tiers.disk.geometry import DiskGeometry
from ninfer_pool.tiers.disk_medium import from_wall, to_wall
from ninfer_pool.tiers.parts import Draft, DraftMark, Image, Run, covering_end
from ninfer_pool.tiers.payload import Payload, Row, Source, assemble

if TYPE_CHECKING:
    from ninfer_pool.core.pool import PrefixPool


def save(
    draft: Draft,
    source: Source,
    path: Path,
    *,
    pool: PrefixPool,
    geometry: DiskGeometry,
    tokens: bool,
) -> int:
    """Write an entry to a file; return its bytes. See `PrefixPool.save`."""
    clock, line = pool.config.clock, draft.marks[-1].stored.runs
    own = {mark.position: _tail_run(mark, line, geometry.page_tokens) for mark in draft.marks}
    marks = {mark.position: mark for mark in draft.marks if own[mark.position] is not _APART}
    bundle = Bundle(
        geometry=geometry,
        namespace=draft.namespace,
        key=draft.key,
        tokens=draft.marks[-1].position,
        prompt_tokens=draft.prompt_tokens,
        priority=draft.priority,
        created=time.time(),
        attributes=tuple(draft.attributes),
        marks=tuple(
            BundleMark(
                position=mark.position,
                kind=mark.kind,
                cuts=mark.cuts,
                expires=to_wall(mark.expires, clock),
                tail=own[mark.position] is not None,
            )
            for mark in marks.values()
        ),
    )
    pages = _Pages(source, geometry)
    images = _Images(source, geometry, marks) if geometry.image_bytes else {}
    tails = {at: pages.last(mark) for at, mark in marks.items() if isinstance(own[at], Run)}
    return write_bundle(
        path,
        bundle,
        tokens=draft.tokens if tokens else None,
        pages=pages.of(line, bundle.tokens),
        images=images,
        tails=tails,
    )


_APART = object()
"""A checkpoint whose KV is of another computation than the tip's, not only its last page."""


def _tail_run(mark: DraftMark, line: Sequence[Run], page_tokens: int) -> object:
    """Return None where a checkpoint's KV is the line's, its last run where only its partly
    filled page is not, else `_APART`."""
    mine, same = mark.stored.runs, 0
    for index, (one, other) in enumerate(zip(mine, line, strict=False)):
        if one is not other:
            break
        same = min(
            covering_end(mine, index, mark.position), covering_end(line, index, mark.position)
        )
    if same >= mark.position:
        return None
    return mine[-1] if same >= mark.position // page_tokens * page_tokens else _APART


class _Pages:
    """An entry's pages, put together from its runs."""

    def __init__(self, source: Source, geometry: DiskGeometry) -> None:
        self._source = source
        self._geometry = geometry

    def of(self, runs: Sequence[Run], position: int) -> Iterator[Row]:
        """Yield the pages below ``position``."""
        return assemble(
            runs,
            position,
            page_tokens=self._geometry.page_tokens,
            regions=self._geometry.rows,
            rows_of=self._source.rows,
        )

    def last(self, mark: DraftMark) -> Row:
        """Return a checkpoint's last page."""
        whole = mark.position // self._geometry.page_tokens
        return next(islice(self.of(mark.stored.runs, mark.position), whole, None)).copy()


class _Images(Mapping[int, Row]):
    """Images by position, read when they are asked for."""

    def __init__(self, source: Source, geometry: DiskGeometry, marks: dict[int, DraftMark]) -> None:
        self._source = source
        self._bytes = geometry.image_bytes
        self._marks = marks

    def __getitem__(self, position: int) -> Row:
        image = self._marks[position].stored.image
        assert isinstance(image, Image), "a checkpoint without its image"
        return np.concatenate(self._source.rows(image))[: self._bytes]

    def __iter__(self) -> Iterator[int]:
        return iter(self._marks)

    def __len__(self) -> int:
        return len(self._marks)


@dataclass(slots=True, kw_only=True)
class _Room:
    """Pages taken for what is loaded."""

    line: Pages
    tails: dict[int, int]
    images: dict[int, int]


def load(
    path: Path,
    *,
    pool: PrefixPool,
    payload: Payload,
    geometry: DiskGeometry,
    namespace: Namespace | None,
) -> str:
    """Retain what a file holds, on the device, every checkpoint with it; return its key.

    Raises:
        StoreError: see `PrefixPool.load`.
    """
    with read_bundle(path, geometry=geometry, namespace=namespace) as reader, pool.state.lock:
        bundle, tokens = reader.bundle, reader.tokens()
        marks = [mark for mark in bundle.marks if _lives(pool, mark)]
        if not marks or marks[-1].position != bundle.tokens:
            raise StoreError(f"{path.name}: its time is over; needs one whose expires is to come")
        if pool.state.catalog.key(bundle.namespace, [tokens], bundle.attributes) != bundle.key:
            raise StoreError(f"{path.name}: key {bundle.key}; needs one of this pool's grid")
        units = _take(pool, bundle, marks)
        try:
            room = _divide(pool, bundle, marks, units)
            _fill(pool, payload, reader, room)
            _attach(pool, bundle, marks, tokens, room)
        finally:
            pool.state.ledger.unref_lease(units)
        return bundle.key


def _lives(pool: PrefixPool, mark: BundleMark) -> bool:
    if mark.expires is None:
        return True
    return pool.config.clock is not None and mark.expires > time.time()


def _take(pool: PrefixPool, bundle: Bundle, marks: list[BundleMark]) -> Pages:
    state, config = pool.state, pool.config
    ledger = state.ledger
    pages = bundle.pages + sum(mark.tail for mark in marks)
    images = len(marks) if config.image_pages else 0
    total = pages + images * config.image_pages
    room = min(ledger.freeable, config.retained_pages - ledger.pinned)
    size = config.page_bytes
    if total > config.retained_pages:
        most = config.retained_pages * size
        raise StoreError(f"no room: needs {total * size} bytes; the pool holds {most}")
    if total > room:
        raise RoomError(f"no room now: needs {total * size} bytes; {room * size} can be freed")
    evict_for(state, total, EvictionCost())
    return ledger.take(pages, images=images)


def _divide(pool: PrefixPool, bundle: Bundle, marks: list[BundleMark], units: Pages) -> _Room:
    line, rest = units[: bundle.pages].copy(), units[bundle.pages :].tolist()
    own = [mark.position for mark in marks if mark.tail]
    images = rest[len(own) :] if pool.config.image_pages else [-1] * len(marks)
    return _Room(
        line=line,
        tails=dict(zip(own, rest, strict=False)),
        images=dict(zip((mark.position for mark in marks), images, strict=True)),
    )


def _fill(pool: PrefixPool, payload: Payload, reader: BundleReader, room: _Room) -> None:
    """Read everything into the device's pages; all of it is verified before any is offered."""
    _into(pool, payload, room.line.tolist(), reader.read_pages)
    for position, page in room.tails.items():
        _into(pool, payload, [page], partial(_read_tail, reader, position))
    for position, image in room.images.items():
        if image >= 0:
            buffer = np.zeros(pool.config.image_pages * pool.config.page_bytes, dtype=np.uint8)
            reader.read_image(position, buffer[: pool.config.image_bytes])
            pages = pool.state.ledger.pages_of_image(image).tolist()
            payload.write(pages, list(buffer.reshape(len(pages), -1)))


def _read_tail(reader: BundleReader, position: int, rows: list[Row]) -> None:
    reader.read_tail(position, rows[0])


def _into(
    pool: PrefixPool, payload: Payload, pages: list[int], read: Callable[[list[Row]], None]
) -> None:
    views = payload.views(pages)
    size = (len(pages), pool.config.page_bytes)
    rows = list(np.empty(size, dtype=np.uint8) if views is None else views)
    read(rows)
    if views is None:
        payload.write(pages, rows)


def _attach(
    pool: PrefixPool, bundle: Bundle, marks: list[BundleMark], tokens: bytes, room: _Room
) -> None:
    """Retain the checkpoints: those with a page of their own first, each a computation apart."""
    state = pool.state
    groups = [[mark] for mark in marks if mark.tail] + [[m for m in marks if not m.tail]]
    every: list[Checkpoint] = []
    entry = None
    for group in groups:
        table = PageTable(room.line.copy())
        made = [_checkpoint(pool, mark, table, room) for mark in group]
        end = made[-1].position
        sequence = NewSequence(
            namespace=bundle.namespace,
            tokens=[memoryview(tokens)[: 4 * end]],
            attributes=bundle.attributes,
            prompt_tokens=min(bundle.prompt_tokens, end),
            priority=bundle.priority,
        )
        entry = insert(state, sequence, made).entry
        every += made
    stay = [mark for mark in every if mark.node is not None]
    for mark in stay:  # the later groups do not make the earlier ones useless
        state.catalog.superseded.discard(mark)
    enforce_budget(state, EvictionCost(), fresh=stay, keep=entry)


def _checkpoint(pool: PrefixPool, mark: BundleMark, table: PageTable, room: _Room) -> Checkpoint:
    whole, rest = divmod(mark.position, pool.config.page_tokens)
    tail = room.tails.get(mark.position, int(table.ids[whole])) if rest else -1
    if mark.tail:
        table.ids = np.append(table.ids[:whole], np.int32(tail))
    made = Checkpoint(
        position=mark.position,
        kind=mark.kind,
        cuts=mark.cuts,
        table=table,
        tail=tail,
        image=room.images[mark.position],
        lane=0,
        tick=0,
    )
    made.expires = from_wall(mark.expires, pool.config.clock)
    return made
