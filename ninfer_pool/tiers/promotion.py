"""How a checkpoint gets from a tier below back to the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ninfer_pool.core.entry import Checkpoint, PageTable
from ninfer_pool.core.eviction import enforce_budget, evict_for
from ninfer_pool.core.insertion import NewSequence, insert
from ninfer_pool.core.ledger import Pages
from ninfer_pool.core.prompt import Prompt
from ninfer_pool.core.results import EvictionCost
from ninfer_pool.tiers.parts import Kept, Run, Stored, clipped, covering_end
from ninfer_pool.tiers.payload import Payload, Row, pieces
from ninfer_pool.tiers.shelf import Shelf

if TYPE_CHECKING:
    from ninfer_pool.core.pool import PrefixPool


@dataclass(slots=True, kw_only=True)
class Shared:
    """Whole pages of the device that hold the beginning of what is brought back already."""

    mark: Checkpoint | None = None
    pages: int = 0


def shared_with(found: Checkpoint | None, kept: Kept, position: int, *, page_tokens: int) -> Shared:
    """Return what a checkpoint on the device has in common with one below: the same runs."""
    mine: Stored | None = found.stored if found is not None else None
    if found is None or mine is None:
        return Shared()
    upto, theirs = 0, clipped(kept.stored.runs, position)
    for index, (one, other) in enumerate(zip(mine.runs, theirs, strict=False)):
        if one is not other:
            break
        ends = (covering_end(mine.runs, index, found.position),)
        upto = min(*ends, covering_end(theirs, index, position))
    return Shared(mark=found, pages=upto // page_tokens)


def promote(
    pool: PrefixPool,
    payload: Payload | None,
    shelf: Shelf,
    kept: Kept,
    position: int,
    *,
    prompt: Prompt,
    shared: Shared,
    cost: EvictionCost,
) -> int:
    """Bring a checkpoint that ``prompt`` resumes to the device; return the bytes moved.

    ``position`` is the checkpoint's, or one before it with plain attention.

    The caller knows that there is room, and holds its parts on the shelf.

    Raises:
        StoreError: what lies there is damaged; nothing has changed but what went for room.
    """
    state, config = pool.state, pool.config
    ledger, size = state.ledger, config.page_tokens
    count = -(-position // size) - shared.pages
    total = count + config.image_pages
    guarded = state.units_of(shared.mark).copy() if shared.mark is not None else None
    if shared.mark is not None:
        state.ref(shared.mark)
    before = ledger.retained
    evict_for(state, total, cost)
    cost.needed += total if ledger.retained < before else 0
    units = ledger.take(count, images=int(config.image_pages > 0))
    try:
        ids = units[:count].copy()  # interning writes to it
        if shared.mark is not None:
            ids = np.concatenate((shared.mark.table.ids[: shared.pages], ids))
        image = int(units[count]) if config.image_pages else -1
        if payload is not None:
            runs = clipped(kept.stored.runs, position)
            _move(pool, payload, shelf, runs, position, prompt=prompt, ids=ids, skip=shared.pages)
            if image >= 0:
                _move_image(pool, payload, shelf, kept, ledger.pages_of_image(image).tolist())
        mark = _checkpoint(kept, position, ids, image, size)
        mark.lane = kept.lane if kept.lane < config.lanes else 0
        _attach(pool, kept, mark, prompt, cost)
    finally:
        ledger.unref_lease(units)
        if shared.mark is not None:
            state.unref(shared.mark, guarded)
    return total * config.page_bytes


def _checkpoint(kept: Kept, position: int, ids: Pages, image: int, size: int) -> Checkpoint:
    whole = position == kept.position
    runs = clipped(kept.stored.runs, position)
    cuts = kept.cuts
    mark = Checkpoint(
        position=position,
        kind=kept.kind if whole else "junction",
        cuts=cuts if whole or cuts is None else tuple(cut for cut in cuts if cut <= position),
        table=PageTable(ids, known=(position, runs)),
        tail=int(ids[-1]) if position % size else -1,
        image=image,
        lane=kept.lane,
        tick=0,
    )
    mark.stored = kept.stored if whole else Stored(runs, None)
    return mark


def _attach(
    pool: PrefixPool, kept: Kept, mark: Checkpoint, prompt: Prompt, cost: EvictionCost
) -> None:
    state, record = pool.state, kept.record
    mark.expires = kept.expires
    sequence = NewSequence(
        namespace=prompt.namespace,
        tokens=[prompt.buffer[: 4 * mark.position]],
        attributes=prompt.attributes,
        prompt_tokens=min(record.entry.prompt_tokens, mark.position),
        priority=record.entry.priority,
    )
    inserted = insert(state, sequence, [mark])
    entry = inserted.entry
    if entry is not None:
        entry.hits, entry.gap = record.entry.hits, record.entry.gap
        if record.pinned and entry.pinned is None:  # this one alone has been found to fit
            state.ref(entry.tip)
            entry.pinned = [entry.tip]
    enforce_budget(state, cost, fresh=[each for each in inserted.standing if each.node], keep=entry)


def _move(
    pool: PrefixPool,
    payload: Payload,
    shelf: Shelf,
    runs: Sequence[Run],
    position: int,
    *,
    prompt: Prompt,
    ids: Pages,
    skip: int,
) -> None:
    """Fill the device pages ``ids[skip:]`` with the KV below a position."""
    config = pool.config
    pages = ids[skip:].tolist()
    first = shelf.places[runs[0]]
    if shelf.medium.views(first) is not None:
        at = 0
        for rows in pieces(
            runs,
            position,
            page_tokens=config.page_tokens,
            regions=payload.regions,
            rows_of=lambda run: _rows(shelf, run),
        ):
            here, begin = max(0, skip - at), at
            at += len(rows)
            if begin + here < at:
                payload.write(ids[begin + here : at].tolist(), rows[here:])
        return
    into = payload.views(pages)
    staged = into is None
    if into is None:
        into = _scratch(len(pages), config.page_bytes)
    for index, run in enumerate(runs):
        end = covering_end(runs, index, position)
        if end > skip * config.page_tokens:
            _read(shelf, run, prompt, into, end=end, skip=skip)
    if staged:
        payload.write(pages, into)


def _scratch(count: int, page_bytes: int) -> Sequence[Row]:
    return cast(Sequence[Row], np.empty((count, page_bytes), dtype=np.uint8))


def _rows(shelf: Shelf, run: Run) -> Sequence[Row]:
    rows: Sequence[Row] | None = shelf.medium.views(shelf.places[run])
    assert rows is not None, "a tier whose parts lie partly in memory"
    return rows


def _read(
    shelf: Shelf, run: Run, prompt: Prompt, into: Sequence[Row], *, end: int, skip: int
) -> None:
    """Read the rows ``[begin, end)`` of a run, of which the first ``skip`` pages are there."""
    size = shelf.config.page_tokens
    first, last = run.begin // size, -(-end // size)
    spare = [np.empty_like(into[0]) for _ in range(first, min(skip, last))]
    rows = into[max(first, skip) - skip : last - skip]
    if spare:
        rows = [*spare, *rows]
    tokens = prompt.buffer[4 * run.begin : 4 * end].tobytes()
    shelf.medium.read(run, shelf.places[run], rows, tokens=tokens, upto=end)


def _move_image(
    pool: PrefixPool, payload: Payload, shelf: Shelf, kept: Kept, pages: list[int]
) -> None:
    image = kept.stored.image
    assert image is not None, "a checkpoint without its image"
    place: Any = shelf.places[image]
    rows = shelf.medium.views(place)
    if rows is None:
        own = payload.views(pages)
        rows = _scratch(len(pages), pool.config.page_bytes) if own is None else own
        shelf.medium.read(image, place, rows, tokens=b"", upto=0)
        if own is not None:
            return
    payload.write(pages, rows)
