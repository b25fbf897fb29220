"""The device's entries as a tier above others: what they are made of, and their bytes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from ninfer_pool.core import radix
from ninfer_pool.core.config import PoolConfig
from ninfer_pool.core.entry import Checkpoint, Entry, Known
from ninfer_pool.core.ledger import Pages
from ninfer_pool.core.state import PoolState
from ninfer_pool.tiers.parts import (
    Draft,
    Image,
    Part,
    Piece,
    Run,
    Stored,
    Stretch,
    covering_end,
    cut,
    draft_mark_of,
    draft_of_entry,
    named,
    without_spares,
)

RUN_BYTES = 16 << 20
"""Bytes of KV in one run at most, about: what is moved at a time."""


def draft_of(state: PoolState, entry: Entry) -> Draft:
    """Return an entry of the device as one that a tier may store. O(pages).

    Checkpoints that were never stored learn here what they are made of.
    """
    every = sorted(state.catalog.path_checkpoints(entry), key=lambda mark: mark.position)
    marks = without_spares(every)
    compose(state, marks)
    tip = entry.tip
    tokens = radix.tokens_to(tip.anchor, tip.position)
    carried = radix.attributes_to(tip.anchor, tip.position)
    return draft_of_entry(entry, marks, tokens=tokens, attributes=carried)


def compose(state: PoolState, marks: list[Checkpoint]) -> None:
    """Give every checkpoint of one way (ascending) its `Stored`; those that have one keep it.

    What lies on the same pages as the deepest shares its runs. A partly filled page of another
    computation becomes a run of its own, so that no image is ever paired with other KV.
    """
    config, tip = state.config, marks[-1]
    size = config.page_tokens
    pages = tip.kv_pages(size)
    line = {mark for mark in marks if _same_pages(mark, pages, size)}
    if tip.stored is None:
        upto, pieces = tip.table.known
        own = tip.tail >= 0 and tip.tail != tip.table.ids[tip.position // size]
        line_end = tip.position // size * size if own else tip.position
        upto = min(upto, line_end)
        cuts = [mark.position for mark in marks if mark in line]
        pieces = cut(pieces, upto) + _stretches(upto, cuts, config)
        if line_end > tip.table.known[0]:
            tip.table.known = (line_end, pieces)
        tip.stored = Stored(pieces, _image(mark=tip))
    whole_line = tip.stored.pieces
    for mark in marks:
        if mark.stored is not None:
            continue
        if mark in line:
            pieces = cut(whole_line, mark.position)
        else:
            edge = mark.position // size * size
            upto, known = mark.table.known
            if _shares_whole(mark, pages, size):
                pieces, upto = cut(whole_line, edge), edge
            else:
                upto = min(upto, edge)
                pieces = cut(known, upto)
            pieces += _stretches(upto, [mark.position], config)
        mark.stored = Stored(pieces, _image(mark=mark))


def _image(*, mark: Checkpoint) -> Image | None:
    return Image() if mark.image >= 0 else None


def _shares_whole(mark: Checkpoint, pages: Pages, size: int) -> bool:
    whole = mark.position // size
    return np.array_equal(mark.table.ids[:whole], pages[:whole])


def _same_pages(mark: Checkpoint, pages: Pages, size: int) -> bool:
    tail = mark.tail < 0 or mark.tail == pages[mark.position // size]
    return bool(tail) and _shares_whole(mark, pages, size)


def _stretches(begin: int, ends: list[int], config: PoolConfig) -> tuple[Piece, ...]:
    """Return stretches from ``begin`` that end at each of ``ends`` past it."""
    size = config.page_tokens
    most = max(1, RUN_BYTES // config.page_bytes) * size
    bounds = [begin, *sorted(end for end in set(ends) if end > begin)]
    return tuple(
        Stretch(start, end, most=most, page_tokens=size) for start, end in pairwise(bounds)
    )


def renew(marks: Iterable[Checkpoint], lost: Iterable[Run], tokens: bytes) -> dict[Stored, Stored]:
    """Make runs anew that no tier and no checkpoint has whole any more; return what took the
    place of what. ``tokens`` are those that the checkpoints' sequence begins with.

    Such a run went on where another sequence parted from it, and that sequence has gone: what is
    left of it is what these checkpoints use.
    """
    fresh: dict[Run, Run] = {}
    for run in lost:
        ends = [
            covering_end(mark.stored.runs, mark.stored.runs.index(run), mark.position)
            for mark in marks
            if mark.stored is not None and run in mark.stored.runs
        ]
        fresh[run] = Run(run.begin, max(ends))
        fresh[run].learn(tokens)
    replaced: dict[Stored, Stored] = {}
    for mark in marks:
        old = mark.stored
        if old is not None and not fresh.keys().isdisjoint(old.runs):
            runs = [fresh.get(run, run) for run in old.runs]
            mark.stored = replaced.setdefault(old, Stored(runs, old.image))
            mark.table.known = _renewed(mark.table.known, fresh)
    return replaced


def _renewed(known: Known, fresh: dict[Run, Run]) -> Known:
    upto, pieces = known
    runs = named(pieces)
    for index, run in enumerate(runs):
        new = fresh.get(run, run)
        if new.end < covering_end(runs, index, upto):
            return new.end, (*(fresh.get(each, each) for each in runs[:index]), new)
    return upto, tuple(fresh.get(run, run) for run in runs)


def pages_of(
    state: PoolState, marks: Iterable[Checkpoint], parts: Iterable[Part]
) -> dict[Part, list[int]]:
    """Return the ids of the device pages that hold each part, of those that these marks have."""
    size = state.config.page_tokens
    wanted = set(parts)
    found: dict[Part, list[int]] = {}
    for mark in sorted(marks, key=lambda mark: -mark.position):
        stored: Stored | None = mark.stored
        if stored is None or wanted.isdisjoint(stored.parts()):
            continue
        pages = mark.kv_pages(size)
        for index, run in enumerate(stored.runs):
            whole = run.end <= covering_end(stored.runs, index, mark.position)
            if run in wanted and whole and run not in found:
                found[run] = pages[run.begin // size : -(-run.end // size)].tolist()
        if stored.image in wanted and stored.image is not None:
            found[stored.image] = state.ledger.pages_of_image(mark.image).tolist()
    return found


def draft_of_spare(state: PoolState, mark: Checkpoint) -> Draft:
    """Return a superseded checkpoint as an entry of its own, whose conversation is over."""
    compose(state, [mark])
    namespace = state.catalog.namespace_of(mark.anchor)
    return Draft(
        namespace=namespace,
        key=state.catalog.key_of(namespace, mark),
        tokens=radix.tokens_to(mark.anchor, mark.position),
        attributes=radix.attributes_to(mark.anchor, mark.position),
        prompt_tokens=0,
        priority=0,
        released=True,
        hits=0,
        gap=0,
        created=mark.tick,
        used=mark.tick,
        marks=[draft_mark_of(mark, spare=mark.superseded)],
    )
