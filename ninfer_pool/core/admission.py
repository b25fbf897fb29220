"""Admitting a request: search, check that it fits, only then evict and take (G4)."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import numpy as np

from ninfer_pool.core.entry import Checkpoint
from ninfer_pool.core.eviction import evict_for
from ninfer_pool.core.explain import explain
from ninfer_pool.core.lease import Lease
from ninfer_pool.core.ledger import Pages, Units
from ninfer_pool.core.lookup import Lookup, LookupFilter, find, prompt_cuts
from ninfer_pool.core.operations import CopyPage
from ninfer_pool.core.planner import plan_captures
from ninfer_pool.core.progress import RequestOptions
from ninfer_pool.core.prompt import Prompt
from ninfer_pool.core.results import EvictionCost, Explanation, Refusal
from ninfer_pool.core.state import PoolState


def search(state: PoolState, prompt: Prompt, filter: LookupFilter) -> tuple[Lookup, Explanation]:
    """Look a prompt up on the device and explain the result."""
    lookup = find(state.catalog, prompt, prompt_cuts(state.config, prompt), filter)
    explanation = explain(state, lookup, filter)
    if not explanation.resumable:
        lookup.give_up()
    return lookup, explanation


def search_below(
    state: PoolState,
    lookup: Lookup,
    explanation: Explanation,
    filter: LookupFilter,
    options: RequestOptions,
    cost: EvictionCost,
    *,
    free: bool,
) -> tuple[Lookup, Explanation]:
    """Have a deeper checkpoint promoted where a lane is free, then search again."""
    hooks, catalog = state.hooks, state.catalog
    if filter.now is not None:
        hooks.expire(filter.now)
    if not free:
        return lookup, explanation
    version = catalog.version
    tier = hooks.promote(lookup, filter, reserve_tokens=options.reserve_tokens, cost=cost)
    if version != catalog.version:
        lookup, explanation = search(state, lookup.prompt, filter)
    if tier is not None and lookup.checkpoint is not None:
        explanation = replace(explanation, tier=tier)
    return lookup, explanation


def admit(
    state: PoolState,
    lookup: Lookup,
    explanation: Explanation,
    options: RequestOptions,
    *,
    lane: int,
    cost: EvictionCost,
) -> Lease | Refusal:
    """Take the pages that the request needs, or return why not, with nothing changed.

    A resume that does not fit next to its source is replanned to a cold start.
    """
    demand = PageDemand.of(state, lookup, options)
    if demand.pages > demand.freeable and lookup.checkpoint is not None:
        lookup.give_up()
        explanation = _without_room(explanation)
        demand = PageDemand.of(state, lookup, options)
    if demand.pages > demand.freeable:
        size = state.config.page_bytes
        return Refusal("no_room", demand.pages * size, demand.freeable * size)
    return _take(state, lookup, explanation, options, demand, lane=lane, cost=cost)


@dataclass(slots=True, kw_only=True)
class PageDemand:
    """The pages that a request needs."""

    pages: int
    """Own pages without which the request cannot run."""
    images: int
    """Images worth evicting for: the captures planned and the frontier's."""
    freeable: int
    captures: list[tuple[int, str]]
    source: Units
    """All that the checkpoint to resume from holds."""

    @classmethod
    def of(cls, state: PoolState, lookup: Lookup, options: RequestOptions) -> PageDemand:
        """Return the demand of a request that resumes ``lookup``."""
        config, prompt, ledger = state.config, lookup.prompt, state.ledger
        tokens = prompt.length + options.reserve_tokens
        pages = -(-tokens // config.page_tokens) - lookup.position // config.page_tokens
        captures = []
        if options.retain:
            captures = plan_captures(
                prompt,
                start=lookup.position,
                cuts=lookup.cuts or (),
                grid=config.grid,
                worth=worth_tokens(config.image_pages, config.page_tokens),
                end_logits=config.end_logits or not config.image_bytes,
                junctions=_junctions(lookup),
                exact=options.exact,
            )
        images = len(captures) + 1 if options.retain and config.image_pages else 0
        source, freeable = np.empty(0, dtype=np.int32), ledger.freeable
        if lookup.checkpoint is not None:
            source = lookup.checkpoint.units(config.page_tokens)
            least = freeable - ledger.size(source)
            enough = pages + images * config.image_pages <= least
            freeable = least if enough else freeable - ledger.evictable(source)
        return cls(pages=pages, images=images, freeable=freeable, captures=captures, source=source)


def worth_tokens(image_pages: int, page_tokens: int) -> int:
    """Return the tokens that make an optional checkpoint worth its image: a tenth of its size.

    Plain attention resumes at any token: no optional checkpoint is worth anything.
    """
    return max(1, image_pages * page_tokens // 10) if image_pages else sys.maxsize


def _junctions(lookup: Lookup) -> list[int]:
    """Return the positions past the resume where another sequence parts from this prompt."""
    return sorted(
        {
            position
            for node, upto in lookup.steps
            for position in [*(node.children or ()), *([upto] if upto < node.end else [])]
            if lookup.position < position <= upto
        }
    )


def _take(
    state: PoolState,
    lookup: Lookup,
    explanation: Explanation,
    options: RequestOptions,
    demand: PageDemand,
    *,
    lane: int,
    cost: EvictionCost,
) -> Lease:
    ledger, config, source = state.ledger, state.config, lookup.checkpoint
    shared = demand.source
    if source is not None:
        state.ref_lease(source, demand.source)
        shared = source.table.ids[: lookup.position // config.page_tokens]
    images = 0
    if config.image_pages:
        images = min(demand.images, (demand.freeable - demand.pages) // config.image_pages)
    total = demand.pages + images * config.image_pages
    before = ledger.retained
    if ledger.free < total:
        evict_for(state, total, cost)
    cost.needed += total if ledger.retained < before else 0
    own = ledger.take(demand.pages, images=images)
    pages = np.concatenate((shared, own[: demand.pages]))
    copies, claimed = _copies(state, lookup, pages, claim=options.claim)
    peak = max(state.counters.peak_used_pages, ledger.total - ledger.free)
    state.counters.peak_used_pages = peak
    return Lease(
        state,
        lookup,
        explanation,
        options,
        lane=lane,
        pages=pages,
        own=own,
        spare_images=own[demand.pages :].tolist(),
        borrowed=demand.source,
        captures=demand.captures,
        planned=_is_planned(lookup, demand, config.grid),
        copies=copies,
        claimed=claimed,
        cost=cost,
    )


def _is_planned(lookup: Lookup, demand: PageDemand, grid: int) -> bool:
    """Return whether every capture is at a canonical cut: a junction's would add one."""
    stops = {*(lookup.cuts or ()), lookup.prompt.length}
    return all(position in stops or position % grid == 0 for position, _ in demand.captures)


def _without_room(before: Explanation) -> Explanation:
    """Return the explanation of a hit that was given up for want of room."""
    matched = max(before.matched, before.resumable)
    return replace(
        before, reason="no_room", resumable=0, lost=matched, matched=matched, kind=None, exact=True
    )


def _copies(
    state: PoolState, lookup: Lookup, pages: Pages, *, claim: bool
) -> tuple[list[CopyPage], bool]:
    """Return the copy of a partly filled last page that the lease continues, if any.

    With a claim the page is continued in place. For that no retained position may be past the
    checkpoint on it, and no other lease may read or write it.
    """
    source, size = lookup.checkpoint, state.config.page_tokens
    whole, rest = divmod(lookup.position, size)
    if source is None:
        return [], False
    last = int(source.kv_pages(size)[whole]) if rest else -1
    alone = not rest or state.ledger.lease_refs[last] == 1
    if claim and alone and lookup.position == source.position and _is_last(source):
        if rest:
            pages[whole] = last
        return [], True
    return [CopyPage(last, int(pages[whole]))] if rest else [], False


def _is_last(checkpoint: Checkpoint) -> bool:
    node, position = checkpoint.anchor, checkpoint.position
    return node.positions[-1] == position and not any(node.children_from(position))


def choose_lane(
    state: PoolState, lookup: Lookup, *, wanted: int | None, near: int | None
) -> int | None:
    """Return the lane to run in: the wanted one, the home lane, ``near``, the least recent.

    With ``affinity="strict"`` only the home lane can resume.
    """
    free = state.free_lanes
    home = lookup.checkpoint.lane if lookup.checkpoint is not None else None
    if state.config.affinity == "strict" and home is not None:
        return home if home in free and wanted in (None, home) else None
    if wanted is not None:
        return wanted if wanted in free else None
    for lane in (home, near):
        if lane is not None and lane in free:
            return lane
    return free[0] if free else None
