"""The tiers below the device, joined to a pool."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ninfer_pool.core import radix
from ninfer_pool.core.entry import Checkpoint, Entry
from ninfer_pool.core.eviction import evict_entry
from ninfer_pool.core.hooks import TierHooks
from ninfer_pool.core.identity import Attribute, Namespace
from ninfer_pool.core.lookup import Lookup, LookupFilter
from ninfer_pool.core.pool import PrefixPool
from ninfer_pool.core.prompt import Prompt
from ninfer_pool.core.results import EntryInfo, EvictionCost, TierStats
from ninfer_pool.errors import ConfigError, StoreError
from ninfer_pool.tiers import saving
from ninfer_pool.tiers.ahead import Ahead
from ninfer_pool.tiers.describe import describe, describe_draft, tier_stats
from ninfer_pool.tiers.device import compose
from ninfer_pool.tiers.disk_medium import DiskMedium, geometry_of
from ninfer_pool.tiers.down import Descent
from ninfer_pool.tiers.flushing import flush
from ninfer_pool.tiers.memory import HostMemory
from ninfer_pool.tiers.parts import Draft, Record
from ninfer_pool.tiers.payload import Payload, Source
from ninfer_pool.tiers.rates import Rates
from ninfer_pool.tiers.shelf import Shelf, unconsumed
from ninfer_pool.tiers.sources import ShelfSource
from ninfer_pool.tiers.up import Ascent
from ninfer_pool.tiers.worker import tell_fault

RATED_BYTES = 8 << 20
"""What is moved to learn how fast host memory is, about."""


class Tiers(TierHooks):
    """Host memory and disk below a pool's device pages.

    What the device has no room for goes to the first tier before it is evicted, from there to
    the next, whole entries with every checkpoint, under the pool's own policy. A request that
    would resume deeper from a tier has that checkpoint brought back first, where this is quicker
    than prefilling. Making it attaches it to the pool; give it up with `close`.

    Args:
        pool: the pool.
        payload: how its pages are reached; None: nothing is moved, only counted (simulation).
        shelves: the tiers, the fastest first; see `host_shelf` and `disk_shelf`.
        namespace: the model's: `load` takes only files of it; None: of any.
        rates: bytes and tokens a second; None: measured at the start (with a thread) and later.
        background: writes to disk happen in a thread of their own; else where they are due.

    Guarantees as the pool's: budgets hold at every moment (G9), an entry is offered by a tier
    only when its last byte is there (G11), failures of a tier never fail a request (G8).

    Raises:
        ConfigError: the pool has tiers already.
    """

    def __init__(
        self,
        pool: PrefixPool,
        payload: Payload | None,
        *,
        shelves: Sequence[Shelf] = (),
        namespace: Namespace | None = None,
        rates: Rates | None = None,
        background: bool = False,
    ) -> None:
        if type(pool.state.hooks) is not TierHooks:
            raise ConfigError("pool: it has tiers already; needs one that has none")
        self.pool = pool
        self.payload = payload
        self.namespace = namespace
        self.opening_seconds = 0.0
        """How long it took to index what the folder held."""
        self.shelves = list(shelves)
        self.searchable = self.shelves
        self.rates = rates or Rates()
        self.down = Descent(pool, payload, self.shelves, background=background)
        self.ahead = Ahead(self.down)
        self.up = Ascent(pool, payload, self.shelves, self.down)
        for shelf in self.shelves:
            shelf.rates = self.rates
            shelf.on_change = self._changed
        pool.state.hooks = self
        self._open_disk()
        self._measure_host()

    def _measure_host(self) -> None:
        """Learn how fast pages are moved between the device and host memory, by moving some."""
        config = self.pool.config
        for shelf in self.shelves:
            if isinstance(shelf.medium, HostMemory) and self.payload and self.down.background:
                pages = range(min(config.num_pages, max(1, RATED_BYTES // config.page_bytes)))
                rows = self.payload.allocate(len(pages))
                self.payload.read(pages, list(rows))  # which also touches the memory
                began = time.perf_counter()
                self.payload.read(pages, list(rows))
                size = len(pages) * config.page_bytes
                self.rates.note_restore(shelf.name, size, time.perf_counter() - began)

    def _changed(self) -> None:
        self.pool.state.catalog.version += 1
        self.ahead.changes += 1

    def _open_disk(self) -> None:
        """Offer what the folder holds."""
        for shelf in self.shelves:
            if isinstance(shelf.medium, DiskMedium):
                for name, draft, places in shelf.medium.found():
                    shelf.places.update(places)
                    shelf.add(draft, name=name, tick=draft.used)
                shelf.make_room(0, tick=0)
                if self.down.background:
                    size, writing, reading = shelf.medium.probe()
                    shelf.traffic.note_write(size, writing)
                    self.rates.note_restore(shelf.name, size, reading)

    # -- what the pool asks ----------------------------------------------------------------

    def on_evict(self, entry: Entry | None, checkpoint: Checkpoint) -> None:
        """See `TierHooks`. Whatever goes wrong here is told, and fails no request (G8)."""
        if self.shelves:
            try:
                self.down.leaving(entry, checkpoint)
            except Exception:
                self.shelves[0].traffic.failed += 1
                tell_fault()

    def on_branch(self, source: Checkpoint) -> None:
        """See `TierHooks`: from now on it is known what both are made of, so it is stored once."""
        if self.shelves:
            compose(self.pool.state, [source])

    def on_consume(self, source: Checkpoint, tier: str) -> None:
        """See `TierHooks`."""
        if source.stored is not None:
            self.up.consumed(source.stored, tier)

    def expire(self, now: float) -> None:
        """See `TierHooks`."""
        for shelf in self.shelves:
            shelf.expire(now)

    def promote(
        self, above: Lookup, filter: LookupFilter, *, reserve_tokens: int, cost: EvictionCost
    ) -> str | None:
        """See `TierHooks`."""
        return self.up.promote(above, filter, reserve_tokens=reserve_tokens, cost=cost)

    def remove(self, entry: Entry) -> None:
        """See `TierHooks`: the sequence, what it continues, and what alone continues it."""
        node, position = entry.tip.anchor, entry.tip.position
        tokens, carried = radix.tokens_to(node, position), radix.attributes_to(node, position)
        self._forget(entry.namespace, tokens, carried)

    def _forget(self, namespace: Namespace, tokens: bytes, carried: list[Attribute]) -> None:
        self.down.cancel(self.down.related(namespace, tokens))
        for shelf in self.shelves:
            hops = shelf.walk(namespace, memoryview(tokens), carried)
            for record in list(_same_conversation(hops, len(tokens) // 4)):
                if not record.pinned:
                    shelf.remove(record)

    def evict(self, key: str) -> bool:
        """See `TierHooks`."""
        drafts = [draft for draft in self.down.every() if draft.key == key]
        self.down.cancel(drafts)
        found = bool(drafts)
        for shelf in self.shelves:
            for record in list(shelf.keys.get(key, {}).values()):
                if record.entry.identity in shelf.records and not record.pinned:
                    found = True
                    namespace, carried = record.entry.namespace, record.attributes
                    tokens = shelf.sequence(record)
                    self._forget(namespace, tokens, carried)
                    self._drop_above(namespace, tokens, carried)
        return found

    def _drop_above(self, namespace: Namespace, tokens: bytes, carried: list[Attribute]) -> None:
        """Remove what the device still has of a sequence that was deleted below."""
        state = self.pool.state
        root = state.catalog.roots.get(namespace)
        hops = [] if root is None else radix.walk(root, memoryview(tokens), carried)
        tips = [node.tip for node, upto in hops if node.tip and node.tip.tip.position <= upto]
        for entry in tips:
            if not state.catalog.protects(entry):
                evict_entry(state, entry, EvictionCost())

    def clear(self) -> int:
        """See `TierHooks`."""
        self.down.cancel(self.down.every())
        gone = sum(not record.pinned for _, record in self._only_below())
        for shelf in self.shelves:
            for record in list(shelf.records.values()):
                if not record.pinned:
                    shelf.remove(record)
        return gone

    def entries(
        self, where: Callable[[Namespace], bool] | None = None, newest: int | None = None
    ) -> list[EntryInfo]:
        """See `TierHooks`. What is on its way to a tier is one of them."""
        found: list[tuple[Shelf, Record] | Draft] = [*self._only_below(), *self.down.on_its_way()]
        if where is not None:
            found = [each for each in found if where(_namespace(each))]
        first = 0 if newest is None else max(0, len(found) - newest)
        return [self._described(each) for each in found[first:]]

    def _described(self, found: tuple[Shelf, Record] | Draft) -> EntryInfo:
        if isinstance(found, Draft):
            return describe_draft(found, self.shelves[-1])
        return describe(*found)

    def _only_below(self) -> Iterator[tuple[Shelf, Record]]:
        """Yield what lies in no higher tier, by key, the lowest tier's first."""
        for at, shelf in reversed(list(enumerate(self.shelves))):
            above = self.shelves[:at]
            for record in sorted(shelf.records.values(), key=lambda r: r.entry.used):
                key = record.entry.key
                if key not in self.pool.state.catalog.keys and not any(
                    key in s.keys for s in above
                ):
                    yield shelf, record

    def find(self, key: str) -> list[EntryInfo]:
        """See `TierHooks`."""
        for shelf in self.shelves:
            if key in shelf.keys:
                return [describe(shelf, record) for record in shelf.keys[key].values()]
        return [self._described(draft) for draft in self.down.on_its_way() if draft.key == key]

    def set_pin(self, key: str, *, pinned: bool) -> bool:
        """See `TierHooks`. A pin below the device lasts as long as the process."""
        changed = False
        for shelf in self.shelves:
            for record in shelf.keys.get(key, {}).values():
                changed = changed or record.pinned != pinned or pinned
                record.pinned = pinned
        return changed

    def release(self, key: str) -> bool:
        """See `TierHooks`."""
        found = False
        for shelf in self.shelves:
            for record in shelf.keys.get(key, {}).values():
                shelf.release(record, tick=self.pool.state.tick)
                found = True
        return found

    def stats(self) -> tuple[TierStats, ...]:
        """See `TierHooks`."""
        return tuple(tier_stats(shelf) for shelf in self.shelves)

    def check(self) -> None:
        """See `TierHooks`."""
        if not self.down.every() and not self.down.worker.busy:
            for shelf in self.shelves:
                shelf.check()

    # -- what an engine calls --------------------------------------------------------------

    def step(self, *, max_bytes: int = 8 << 20) -> bool:
        """Store some of what is next to go, up to about ``max_bytes``; False: nothing is due.

        Call it between steps of the engine, on its thread. O(1) where nothing is due.
        """
        if not self.shelves or self.pool.state.hooks is not self:
            return False
        with self.pool.state.lock:
            return self.ahead.step(max_bytes)

    def flush(self, *, seconds: float | None = None) -> int:
        """Write everything to disk, the most recently used first; return how many entries were
        left out, for want of time or room.

        For a shutdown: nothing else may use the pool meanwhile. Without a disk tier nothing
        outlives the process, and nothing is done.
        """
        with self.pool.state.lock:
            self.ahead.end()
        deadline = None if seconds is None else time.monotonic() + seconds
        return flush(self.down, deadline)

    def prefetch(self, prompt: Prompt, *, notify: Callable[[], None] | None = None) -> bool:
        """Begin to bring what ``prompt`` would resume from disk nearer, off this thread.

        True: it is on its way, and ``notify`` is called once it is there; ask again then. False:
        there is nothing to wait for. For requests that wait; `PrefixPool.acquire` needs none of
        it, but reads from disk itself meanwhile.
        """
        return bool(self.shelves) and self.up.prefetch(prompt, notify)

    def close(self) -> None:
        """Finish what is being written and give the folder back; the pool goes on without.

        Twice is once.
        """
        self.down.worker.close()
        if self.pool.state.hooks is not self:
            return
        with self.pool.state.lock:
            self.ahead.end()
            self.pool.state.hooks = TierHooks()
            self._changed()
        for shelf in self.shelves:
            if isinstance(shelf.medium, DiskMedium):
                shelf.medium.folder.close()

    # -- files -----------------------------------------------------------------------------

    def save(self, key: str, path: Path, *, tokens: bool) -> int:
        """See `PrefixPool.save`."""
        payload = self._payload()
        geometry = geometry_of(self.pool.config, payload)
        with self.pool.state.lock:
            draft, source = self._found(key)
            return saving.save(
                draft, source, path, pool=self.pool, geometry=geometry, tokens=tokens
            )

    def _found(self, key: str) -> tuple[Draft, Source]:
        entries = self.pool.state.catalog.keys.get(key, {})
        if entries:
            entry = next(iter(entries.values()))
            return self.down.whole(entry)
        for shelf in self.shelves:
            for record in shelf.keys.get(key, {}).values():
                return shelf.draft(record, spares=True), ShelfSource(shelf)
        raise StoreError(f"key: {key!r:.80}; no entry lies under it, see PrefixPool.entries")

    def load(self, path: Path) -> str:
        """See `PrefixPool.load`."""
        payload = self._payload()
        geometry = geometry_of(self.pool.config, payload)
        return saving.load(
            path, pool=self.pool, payload=payload, geometry=geometry, namespace=self.namespace
        )

    def _payload(self) -> Payload:
        if self.payload is None:
            raise ConfigError("payload: None; needs one, to reach the pages")
        return self.payload


def _same_conversation(hops: list[radix.Step], total: int) -> Iterator[Record]:
    """Yield the records that end on the way of a sequence, and the only one that continues it, or
    whose answer's tail it parts from: that tail was the same conversation's, an answer ago."""
    if not hops:
        return
    for kept in radix.checkpoints_upto(hops, total):
        record: Record = kept.record  # type: ignore[attr-defined]
        if record.tip is kept:
            yield record
    node, upto = hops[-1]
    if upto < total:
        yield from unconsumed(node, upto)
    else:
        forks = node.children_from(total)  # what leaves before its end is another's
        below = [sub for fork in forks for sub in fork.subtree()]
        beyond = {
            kept.record: None
            for sub in (node, *below)
            for kept in sub.checkpoints
            if kept.position > total and kept.record.tip is kept  # type: ignore[attr-defined]
        }
        if len(beyond) == 1:
            yield from beyond


def _namespace(found: tuple[Shelf, Record] | Draft) -> Namespace:
    return found.namespace if isinstance(found, Draft) else found[1].entry.namespace
