"""Admitting a request: search, choose, check that it fits, only then evict and take (G4)."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace

import numpy as np

from ninfer_pool.core import radix as index
from ninfer_pool.core.entry import Checkpoint
from ninfer_pool.core.eviction import Bill, free_pages
from ninfer_pool.core.grant import Grant, Wishes
from ninfer_pool.core.ledger import Pages, Units
from ninfer_pool.core.lookup import Found, Rules, explain, find
from ninfer_pool.core.operations import CopyPage
from ninfer_pool.core.planner import canonical_cuts, plan_captures
from ninfer_pool.core.prompt import Prompt
from ninfer_pool.core.results import Explanation, Refusal
from ninfer_pool.core.retained import Retained


@dataclass(slots=True, kw_only=True)
class Request:
    """One call of acquire, with what its search found."""

    prompt: Prompt
    wishes: Wishes
    reserve_tokens: int
    cuts: tuple[int, ...]
    found: Found
    explanation: Explanation
    bill: Bill = field(default_factory=Bill)


def search(
    retained: Retained, prompt: Prompt, wishes: Wishes, rules: Rules, reserve_tokens: int
) -> Request:
    """Look the prompt up and explain what was found. Changes nothing."""
    config = retained.config
    cuts = canonical_cuts(prompt.boundaries, grid=config.grid, min_chunk=config.min_chunk)
    found = find(retained, prompt, cuts, rules)
    explanation = explain(retained, prompt, found, rules)
    if not explanation.resumable:
        found.mark, found.position, found.exact, found.kind = None, 0, True, None
    return Request(
        prompt=prompt,
        wishes=wishes,
        reserve_tokens=reserve_tokens,
        cuts=cuts,
        found=found,
        explanation=explanation,
    )


def admit(retained: Retained, request: Request, lane: int) -> Grant | Refusal:
    """Take the pages that the request needs, or say why not, with nothing changed.

    A resume that does not fit beside what it resumes from is replanned to a cold start.
    """
    found = request.found
    demand = _demand(retained, request, found)
    if demand.pages > demand.freeable and found.mark is not None:
        found = Found(hops=found.hops, matched=found.matched)
        demand = _demand(retained, request, found)
    if demand.pages > demand.freeable:
        size = retained.config.page_bytes
        return Refusal("no_room", demand.pages * size, demand.freeable * size)
    return _take(retained, request, found, demand, lane)


@dataclass(slots=True, kw_only=True)
class _Demand:
    pages: int
    """Own pages without which the request cannot run."""
    images: int
    """Images worth evicting for: the captures planned and the frontier's."""
    freeable: int
    captures: list[tuple[int, str]]
    source: Units
    """What the checkpoint to resume from holds."""


def _demand(retained: Retained, request: Request, found: Found) -> _Demand:
    config, prompt = retained.config, request.prompt
    tokens = len(prompt) + request.reserve_tokens
    pages = -(-tokens // config.page_tokens) - found.position // config.page_tokens
    captures = []
    if request.wishes.retain:
        captures = plan_captures(
            prompt,
            start=found.position,
            cuts=request.cuts,
            grid=config.grid,
            worth=worth_tokens(config.image_pages, config.page_tokens),
            end_logits=config.end_logits or not config.image_bytes,
            junctions=_junctions(found),
            exact=request.wishes.exact,
        )
    images = len(captures) + 1 if request.wishes.retain and config.image_pages else 0
    ledger, source = retained.ledger, np.empty(0, dtype=np.int32)
    freeable = ledger.freeable
    if found.mark is not None:
        source = retained.units_of(found.mark)
        least = freeable - ledger.size(source)
        enough = pages + images * config.image_pages <= least
        freeable = least if enough else freeable - ledger.yielding(source)
    return _Demand(pages=pages, images=images, freeable=freeable, captures=captures, source=source)


def worth_tokens(image_pages: int, page_tokens: int) -> int:
    """Tokens that an optional checkpoint must spare to be worth its image: a tenth of its size.

    Plain attention resumes at any token: no optional checkpoint is worth anything.
    """
    return max(1, image_pages * page_tokens // 10) if image_pages else sys.maxsize


def _junctions(found: Found) -> list[int]:
    """Positions past the resume where another sequence was seen to part from this prompt."""
    return sorted(
        {
            position
            for path, upto in found.hops
            for position in [*(path.forks or ()), *([upto] if upto < path.end else [])]
            if found.position < position <= upto
        }
    )


def _take(
    retained: Retained,
    request: Request,
    found: Found,
    demand: _Demand,
    lane: int,
) -> Grant:
    ledger, config = retained.ledger, retained.config
    source = found.mark
    shared = borrowed = demand.source
    if source is not None:
        retained.borrow(source, borrowed)
        shared = source.table.ids[: found.position // config.page_tokens]
    images = 0
    if config.image_pages:
        images = min(demand.images, (demand.freeable - demand.pages) // config.image_pages)
    bill = request.bill
    total = demand.pages + images * config.image_pages
    before = ledger.retained
    free_pages(retained, total, bill)
    bill.needed += total if ledger.retained < before else 0
    own = ledger.take(demand.pages, images=images)
    table = np.concatenate((shared, own[: demand.pages]))
    copies, claimed = _copies(retained, found, table, request.wishes)
    retained.counters.peak_used_pages = max(
        retained.counters.peak_used_pages, ledger.total - ledger.free
    )
    return Grant(
        lane=lane,
        source=source,
        start=found.position,
        reserve_tokens=request.reserve_tokens,
        exact=found.exact,
        planned=_planned(request, demand, config.grid),
        table=table,
        own=own,
        spare=own[demand.pages :].tolist(),
        borrowed=borrowed,
        cuts=request.cuts,
        captures=demand.captures,
        copies=copies,
        claimed=claimed,
        explanation=_final(request, found),
        bill=bill,
    )


def _planned(request: Request, demand: _Demand, grid: int) -> bool:
    """Say whether no capture adds a cut that is not canonical: a junction's would."""
    stops = {*request.cuts, len(request.prompt)}
    return all(position in stops or position % grid == 0 for position, _ in demand.captures)


def _final(request: Request, found: Found) -> Explanation:
    """The explanation of what was granted: a hit given up for want of room says so."""
    before = request.explanation
    if found.mark is not None or not before.resumable:
        return before
    matched = max(before.matched, before.resumable)
    return replace(
        before, reason="no_room", resumable=0, lost=matched, matched=matched, kind=None, exact=True
    )


def _copies(
    retained: Retained, found: Found, table: Pages, wishes: Wishes
) -> tuple[list[CopyPage], bool]:
    """Return the copy of a partly filled last page that the lease goes on writing, if any.

    With a claim the page is continued in place, where nothing retained lies past the checkpoint
    on it and no other lease reads or writes it.
    """
    source, size = found.mark, retained.config.page_tokens
    whole, rest = divmod(found.position, size)
    if source is None:
        return [], False
    last = int(source.kv_pages(size)[whole]) if rest else -1
    alone = not rest or retained.ledger.leased[last] == 1
    if wishes.claim and alone and found.position == source.position and _is_last(source):
        if rest:
            table[whole] = last
        return [], True
    return [CopyPage(last, int(table[whole]))] if rest else [], False


def _is_last(mark: Checkpoint) -> bool:
    path = mark.where
    return path.positions[-1] == mark.position and not any(
        child.start >= mark.position for child in path.children()
    )


def lane_of(
    retained: Retained, found: Found, free: list[int], *, wanted: int | None, near: int | None
) -> int | None:
    """Return the lane to run in: the one asked for, the home lane, one near, the least recent.

    ``free`` is ordered by last use. With ``affinity="strict"`` only the home lane can resume.
    """
    home = found.mark.lane if found.mark is not None else None
    if retained.config.affinity == "strict" and home is not None:
        return home if home in free and wanted in (None, home) else None
    if wanted is not None:
        return wanted if wanted in free else None
    wished = (lane for lane in (home, near) if lane is not None and lane in free)
    return next(wished, free[0] if free else None)


def covers(prompt: Prompt, other: Prompt) -> int:
    """Return how many leading tokens two prompts share, attributes included. O(matched)."""
    if prompt.namespace != other.namespace:
        return 0
    path = index.Path(
        parent=None, start=0, label=bytearray(other.buffer), attributes=list(other.attributes)
    )
    upto = index.walk(path, prompt.buffer, prompt.attributes)[-1][1]
    return min(upto, prompt.shareable, other.shareable)
