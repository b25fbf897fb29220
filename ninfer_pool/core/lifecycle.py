"""What happens to a lease after admission: captures, publishing, commit, abort, quarantine.

Internal: called by `Lease` with the pool's lock held.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from ninfer_pool.core.entry import Checkpoint, Entry, Table
from ninfer_pool.core.eviction import choose_retained, fit_budget, fits_free, free_pages
from ninfer_pool.core.results import Refusal
from ninfer_pool.core.retained import Stretch

if TYPE_CHECKING:
    from ninfer_pool.core.lease import Lease
    from ninfer_pool.core.pool import PrefixPool


SLACK = 64
"""Deadlines of checkpoints that are gone which may be kept until the rest is tidied."""


def extend(pool: PrefixPool, lease: Lease, tokens: int) -> bool:
    """Reserve pages for ``tokens`` more positions, evicting where that suffices."""
    ledger, grant, size = pool.retained.ledger, lease.grant, pool.config.page_tokens
    positions = len(grant.table) * size
    pages = -(-max(0, lease.reserved + tokens - positions) // size)
    if pages > ledger.freeable:
        pool.refuse("no_room", pages)
        return False
    before = ledger.retained
    free_pages(pool.retained, pages, grant.bill)
    grant.bill.needed += pages if ledger.retained < before else 0
    fresh = ledger.take(pages)
    grant.own = np.concatenate((fresh, grant.own))
    grant.table = np.concatenate((grant.table, fresh))
    lease.reserved += tokens
    return True


def capture(pool: PrefixPool, lease: Lease) -> int | None:
    """Return an image for the lease's frontier, -1 where none is needed (plain attention).

    None: it is skipped (G8).
    """
    counters, position = pool.retained.counters, lease.frontier
    if lease.has_checkpoint(position):
        return None
    if position > lease.prompt.shareable or lease.prompt.inside_media(position):
        counters.captures_skipped += 1
        counters.skipped_media += 1
        return None
    grant, count = lease.grant, pool.config.image_pages
    if not count:
        return -1
    if len(grant.spare) <= lease.essential_ahead:
        if pool.retained.ledger.free < count:
            counters.captures_skipped += 1
            counters.skipped_no_room += 1
            return None
        fresh = pool.retained.ledger.take(0, images=1)
        grant.own = np.concatenate((grant.own, fresh))
        grant.spare += fresh.tolist()
    counters.images_saved += 1
    return grant.spare.pop(0)


def distrust(pool: PrefixPool, lease: Lease, why: str) -> None:
    """The engine's position is not the pool's: retain nothing of this lease, offer its source
    and what it has published no more, count it (G5)."""
    if lease.doubt is None:
        lease.doubt = why
        pool.retained.counters.position_mismatches += 1
        pool.last_refusal = Refusal("position_mismatch", 0, pool.freeable_bytes)
        _quarantine_source(pool, lease)
        for mark in lease.taken[: lease.published]:
            _quarantine(pool, mark)


def publish(pool: PrefixPool, lease: Lease) -> None:
    """Make what was taken so far visible (G11), where nothing has to go for it.

    A request evicts in one act, its commit: two acts could together free more than G2 allows.
    """
    if lease.doubt is None and lease.unpublished and fits_free(pool.retained, lease.unpublished):
        _store(pool, lease, lease.unpublished, lease.grant.source)
        lease.published = len(lease.taken)


def commit(pool: PrefixPool, lease: Lease, position: int | None) -> str | None:
    """Retain what was taken, touch what was consumed, end the lease."""
    if position is not None and position != lease.frontier:
        distrust(pool, lease, f"commit at {position}, frontier {lease.frontier}")
    retained, source = pool.retained, lease.grant.source
    if lease.doubt is not None:
        end(pool, lease)
        return None
    pool.note_miss(lease.explanation)
    retained.tick += 1
    retained.counters.committed += 1
    touched = None
    if source is not None:
        revived, touched = _touch(pool, source, lease)
        tier = lease.explanation.tier
        if retained.keeper is not None and tier not in (None, "device"):
            retained.keeper.consumed(source, tier)
        _release_source(pool, lease)
        fit_budget(retained, lease.grant.bill, fresh=[], keep=revived)
        if touched is not None and lease.start < source.position:  # it need not grow
            retained.ranking.used(touched, retained.tick)
            touched = None
    stored = bool(lease.unpublished) and _store(pool, lease, lease.unpublished, source)
    if touched is not None and not stored:
        retained.ranking.used(touched, retained.tick)
    _name_full_hit(pool, lease, source)
    for entry in retained.keys.get(lease.key or "", {}).values():
        if lease.wishes.pin:
            pool.pin_entry(entry)
    end(pool, lease, committed=True)
    return lease.key


def _name_full_hit(pool: PrefixPool, lease: Lease, source: Checkpoint | None) -> None:
    """What was resumed and not gone past is what the commit retains."""
    kept = source is not None and source.path is not None and lease.wishes.retain
    if lease.key is None and kept and lease.frontier == lease.start:
        lease.key, lease.retained = _key(pool, lease, lease.start), lease.start


def _key(pool: PrefixPool, lease: Lease, position: int) -> str:
    namespace = lease.prompt.namespace
    attributes = [item for item in lease.prompt.attributes if item[0] < position]
    return pool.retained.key(namespace, lease.parts(0, position), attributes)


def _touch(pool: PrefixPool, source: Checkpoint, lease: Lease) -> tuple[Entry | None, Entry | None]:
    """Only the consumed checkpoint becomes recent, none that was merely passed.

    Returns the entry that it revived, if it was a superseded tail; and the one that it touched,
    whose policy hears of it only once, when it has grown or turns out not to grow.
    """
    retained = pool.retained
    source.tick = retained.tick
    source.uses += 1
    if source.path is None:
        return None, None
    if source.spare:
        key = _key(pool, lease, source.position)
        return retained.revive(source, lease.prompt.namespace, key), None
    entry = source.path.tip
    if entry is not None and entry.tip is source:
        entry.consume(retained.tick)
        retained.emit("touched", entry)
        return None, entry
    return None, None


def _stretch(pool: PrefixPool, lease: Lease, source: Checkpoint | None, position: int) -> Stretch:
    """The lease's sequence up to ``position``; what it resumed from need not be walked again."""
    known = source is not None and source.path is not None
    origin = lease.start if known else 0
    parts = lease.parts(origin, position)
    namespace = lease.prompt.namespace
    attributes = [item for item in lease.prompt.attributes if item[0] < position]
    return Stretch(
        namespace=namespace,
        view=parts[0] if not parts[1] else memoryview(b"".join(parts)),
        origin=origin,
        source=source if known else None,
        attributes=attributes,
        key=_key(pool, lease, position),
    )


def _store(
    pool: PrefixPool, lease: Lease, fresh: list[Checkpoint], source: Checkpoint | None
) -> bool:
    """Retain ``fresh`` as far as the budget allows, then make it fit (G3, G9); say if any."""
    retained, size = pool.retained, pool.config.page_tokens
    chosen = choose_retained(retained, fresh, lease.essential)
    skipped = len(fresh) - len(chosen)
    retained.counters.captures_skipped += skipped
    retained.counters.skipped_no_room += skipped
    if not chosen:
        return False
    stretch = _stretch(pool, lease, source, chosen[-1].position)
    if source is not None and source.stored is None and retained.keeper and source.path:
        retained.keeper.forked(source)
    stored = source.stored if source is not None else None
    known = (lease.start, stored.pieces) if stored is not None else (0, ())
    table = Table(lease.grant.table[: -(-stretch.total // size)].copy(), known=known)
    for mark in chosen:
        mark.table = table
    before = retained.ledger.retained
    entry, stands = retained.attach(
        stretch,
        fresh=chosen,
        prompt_tokens=lease.prompt.asked,
        priority=lease.wishes.priority,
    )
    _set_expiry(pool, lease, stands)
    grant = lease.grant
    grant.bill.needed += max(0, retained.ledger.retained - before)
    new = [mark for mark in chosen if mark.path is not None]
    fit_budget(retained, grant.bill, fresh=new, keep=entry)
    retained.note_peaks()
    lease.key, lease.retained = stretch.key, stretch.total
    return True


def _set_expiry(pool: PrefixPool, lease: Lease, marks: list[Checkpoint]) -> None:
    """A checkpoint lives as long as the longest that any commit of it asked for."""
    ttl, clock = lease.wishes.ttl_seconds, pool.config.clock
    until = clock() + ttl if ttl is not None and clock is not None else inf
    for mark in marks:
        before = 0.0 if mark.expires is None else mark.expires
        mark.expires = max(before, until)
        if before < mark.expires < inf:
            heappush(pool.expiry, (mark.expires, next(pool.serial), mark))
    if len(pool.expiry) > 2 * pool.retained.checkpoints + SLACK:  # most are of what has gone
        pool.expiry = [item for item in pool.expiry if item[2].path and item[2].expires == item[0]]
        heapify(pool.expiry)


def expire(pool: PrefixPool, now: float | None) -> None:
    """Remove the checkpoints whose time is over, but those that a lease reads."""
    busy = []
    while now is not None and pool.expiry and pool.expiry[0][0] <= now:
        item = heappop(pool.expiry)
        mark = item[2]
        if mark.path is None or mark.expires != item[0]:
            continue
        if mark.guards:
            busy.append(item)
            continue
        pool.retained.remove(mark, cause="expired")
        pool.retained.counters.expired += 1
    for item in busy:
        heappush(pool.expiry, item)


def quarantine(pool: PrefixPool, lease: Lease) -> None:
    """Restoring failed: never offer the source again, end the lease."""
    _quarantine_source(pool, lease)
    end(pool, lease)


def _quarantine_source(pool: PrefixPool, lease: Lease) -> None:
    if lease.grant.source is not None:
        _quarantine(pool, lease.grant.source)


def _quarantine(pool: PrefixPool, mark: Checkpoint) -> None:
    if mark.path is not None:
        pool.retained.remove(mark, cause="quarantined")
        pool.retained.counters.quarantined += 1


def _release_source(pool: PrefixPool, lease: Lease) -> None:
    source = lease.grant.source
    if source is not None:
        lease.grant.source = None
        pool.retained.unguard(source, lease.grant.borrowed)


def releasable(pool: PrefixPool, lease: Lease) -> tuple[int, int]:
    """Return the least and the most pages that are free, or may go, once a running lease ends.

    The least are those that it alone counts on; the most all that it counts on.
    """
    with pool.lock:
        ledger, grant = pool.retained.ledger, lease.grant
        units = np.unique(np.concatenate((grant.own, grant.borrowed)))
        alone = units[(ledger.leased[units] == 1) & (ledger.kept[units] == 0)]
        return ledger.size(alone), ledger.size(units)


def end(pool: PrefixPool, lease: Lease, *, committed: bool = False) -> None:
    """Give back what the lease counted on, and its lane."""
    ledger, grant = pool.retained.ledger, lease.grant
    _release_source(pool, lease)
    ledger.unlease(grant.borrowed)
    ledger.unlease(grant.own)
    lease.close()
    pool.forget(lease, committed=committed)
