"""The pool's state: catalog and ledger joined, references, lanes, and every kind of removal.

Internal: called under its lock. Nothing here depends on requests.
"""

from __future__ import annotations

import threading
from bisect import insort

from ninfer_pool.core import radix
from ninfer_pool.core.catalog import Catalog
from ninfer_pool.core.config import PoolConfig
from ninfer_pool.core.entry import Checkpoint, Entry
from ninfer_pool.core.events import Journal
from ninfer_pool.core.ghosts import TAIL, Digest, Ghost, Ghosts
from ninfer_pool.core.hooks import TierHooks
from ninfer_pool.core.identity import Namespace
from ninfer_pool.core.ledger import PageLedger, Units
from ninfer_pool.core.results import Counters, Explanation, Refusal


class PoolState:
    """What one pool holds and remembers, under one lock."""

    def __init__(self, config: PoolConfig) -> None:
        self.config = config
        self.lock = threading.RLock()
        self.catalog = Catalog(config)
        self.ledger = PageLedger(config.num_pages, image_pages=config.image_pages)
        self.ghosts = Ghosts(config.ghosts)
        self.journal = Journal(config.events)
        self.counters = Counters()
        self.tick = 0
        """Commits so far: the pool's only clock."""
        self.hooks = TierHooks()
        """The tiers below the device: see `ninfer_pool.tiers.Tiers`, which sets it."""
        self.last_refusal: Refusal | None = None
        self.free_lanes = list(range(config.lanes))
        """Lanes that no lease holds, the least recently used first."""
        self.lane_used = [0] * config.lanes

    # -- lanes, refusals, misses -----------------------------------------------------------

    def return_lane(self, lane: int, *, committed: bool) -> None:
        """Make a lane free; a commit makes it the most recently used (G6)."""
        if committed:
            self.lane_used[lane] = self.tick
        insort(self.free_lanes, lane, key=self.lane_used.__getitem__)

    def refuse(self, reason: str, pages: int) -> None:
        """Record why something was refused."""
        size = self.config.page_bytes
        self.last_refusal = Refusal(reason, pages * size, self.ledger.freeable * size)
        self.counters.refused += 1

    def note_miss(self, explanation: Explanation) -> None:
        """Notify policies of a committed request's miss (G6)."""
        gone, used = explanation.evicted_tick, explanation.used_tick
        if gone is not None and used is not None:
            self.catalog.order.on_ghost_hit(self.tick - gone, self.tick - used, self.tick)
        elif explanation.reason == "no_entry":
            self.catalog.order.on_cold_miss(self.tick)

    def note_peaks(self) -> None:
        """Record the highest retained pages, as counted between operations."""
        peak = max(self.counters.peak_retained_pages, self.ledger.retained)
        self.counters.peak_retained_pages = peak

    # -- references (G4) -------------------------------------------------------------------

    def units_of(self, checkpoint: Checkpoint) -> Units:
        """Return the units that a checkpoint holds: its KV pages and its image."""
        return checkpoint.units(self.config.page_tokens)

    def ref(self, checkpoint: Checkpoint) -> None:
        """Protect a checkpoint: it is pinned, or has just been committed."""
        checkpoint.refs += 1
        if checkpoint.refs == 1:
            self.ledger.ref_pin(self.units_of(checkpoint))

    def ref_lease(self, checkpoint: Checkpoint, units: Units) -> None:
        """Protect a checkpoint for a lease that reads its ``units``."""
        checkpoint.refs += 1
        if checkpoint.refs == 1:
            self.ledger.ref_lease_and_pin(units)
        else:
            self.ledger.ref_lease(units)

    def unref(self, checkpoint: Checkpoint, units: Units | None = None) -> None:
        """Take one protection off; ``units`` are those of the checkpoint, where known."""
        checkpoint.refs -= 1
        if checkpoint.refs == 0:
            self.ledger.unref_pin(self.units_of(checkpoint) if units is None else units)

    def pin(self, entry: Entry) -> None:
        """Protect an entry's checkpoints of now, and the tip that it grows to."""
        if entry.pinned is None:
            entry.pinned = list(self.catalog.path_checkpoints(entry))
            for checkpoint in entry.pinned:
                self.catalog.superseded.discard(checkpoint)
                self.ref(checkpoint)

    def unpin(self, entry: Entry) -> None:
        """Take an entry's pin off."""
        for checkpoint in entry.pinned or ():
            self.unref(checkpoint)
        entry.pinned = None
        entry.inherited = None

    def move_pin(self, entry: Entry) -> None:
        """Pin the new tip of a pinned entry; an inherited pin moves on."""
        if entry.pinned is not None and entry.tip not in entry.pinned:
            if entry.inherited is not None:
                entry.pinned.remove(entry.inherited)
                self.unref(entry.inherited)
            entry.inherited = entry.tip
            entry.pinned.append(entry.tip)
            self.ref(entry.tip)

    # -- removal ---------------------------------------------------------------------------

    def remove_checkpoint(self, checkpoint: Checkpoint) -> int:
        """Remove a checkpoint that is no tip; return how many pages are retained no more."""
        units = self.units_of(checkpoint)
        self.catalog.remove(checkpoint)
        return self.ledger.unref_checkpoint(units)

    def supersede(self, checkpoint: Checkpoint, *, gap: int) -> None:
        """Make a checkpoint superseded, and count it."""
        if not checkpoint.superseded:
            self.catalog.supersede(checkpoint, gap=gap)
            self.counters.superseded += 1

    def truncate(self, entry: Entry, *, cause: str = "evicted") -> int:
        """Remove an entry's tip; it ends at its next private checkpoint, or is removed.

        Returns pages that are retained no more. O(pages of the tip), one hash pass.
        """
        catalog, tip = self.catalog, entry.tip
        node = tip.anchor
        base = catalog.base(entry)
        before = radix.previous_checkpoint(tip)
        if before is not None and before.position <= base:
            before = None
        self._remember(entry.namespace, tip, [tip.position], cause, entry.used)
        catalog.clear_tip(entry)
        dead = catalog.dead_below(node, tip, base if before is None else before.position)
        freed = sum(self.remove_checkpoint(each) for each in dead)
        freed += self.remove_checkpoint(tip)
        if before is None:
            self._forget(entry)
            return freed
        catalog.set_tip(entry, before)
        entry.prompt_tokens = min(entry.prompt_tokens, before.position)
        catalog.rename(entry, catalog.key_of(entry.namespace, before))
        catalog.order.on_truncate(entry, self.tick)
        return freed

    def remove_entry(self, entry: Entry, *, cause: str = "evicted") -> int:
        """Remove an entry with all that only it holds; return pages retained no more.

        Its checkpoints that others protect stay, superseded. O(pages), one hash pass.
        """
        catalog, tip, node = self.catalog, entry.tip, entry.tip.anchor
        base = catalog.base(entry)
        self.unpin(entry)
        private = list(catalog.private_checkpoints(entry, base=base))
        gone = [each for each in private if not each.refs]
        positions = [each.position for each in gone]
        self._remember(entry.namespace, tip, positions, cause, entry.used)
        catalog.clear_tip(entry)
        for checkpoint in private:
            if checkpoint.refs:
                self.supersede(checkpoint, gap=0)
        dead = catalog.dead_below(node, tip, base)
        freed = sum(self.remove_checkpoint(each) for each in dead)
        if tip.node is node and not node.children and set(node.checkpoints) <= set(gone):
            removed = node.checkpoints
            catalog.remove_all(node)
            freed += sum(self.ledger.unref_checkpoint(self.units_of(each)) for each in removed)
        freed += sum(self.remove_checkpoint(each) for each in gone if each.node is not None)
        self._forget(entry)
        return freed

    def remove(self, checkpoint: Checkpoint, *, cause: str) -> None:
        """Remove one checkpoint, protected or not (quarantine, expiry)."""
        catalog = self.catalog
        for entry in catalog.entries.values():
            if entry.pinned and checkpoint in entry.pinned:
                entry.pinned.remove(checkpoint)
                self.unref(checkpoint)
            if entry.inherited is checkpoint:
                entry.inherited = None
        holder, space = checkpoint.anchor.tip, catalog.namespace_of(checkpoint.anchor)
        key = holder.key if holder is not None else ""
        if holder is not None and holder.tip is checkpoint:
            freed = self.truncate(holder, cause=cause)
            if holder.identity in catalog.entries:
                self.move_pin(holder)
        else:
            self._remember(space, checkpoint, [checkpoint.position], cause, checkpoint.tick)
            freed = self.remove_checkpoint(checkpoint)
        if holder is not None:
            kind = "truncated" if holder.identity in catalog.entries else "evicted"
            self.emit(kind, holder, key=key, freed=freed)
        catalog.sweep(space)

    def remove_superseded(self, checkpoint: Checkpoint) -> int:
        """Remove a superseded checkpoint for room, with an event; return pages freed."""
        catalog, node = self.catalog, checkpoint.anchor
        entry, key = node.tip, ""
        space = None if entry is not None else catalog.namespace_of(node)
        if self.journal and space is not None:
            key = catalog.key_of(space, checkpoint)
        freed = self.remove_checkpoint(checkpoint)
        if space is not None:
            catalog.sweep(space)
        if entry is not None:
            self.emit("truncated", entry, freed=freed)
        elif key:
            freed_bytes = freed * self.config.page_bytes
            self.journal.add("evicted", key, (), entry=-1, freed=freed_bytes)
        return freed

    def clear_superseded(self) -> None:
        """Remove every superseded checkpoint that nothing protects."""
        for checkpoint in [each for each in self.catalog.superseded if not each.refs]:
            self.remove_checkpoint(checkpoint)
        for namespace in list(self.catalog.roots):
            self.catalog.sweep(namespace)

    def expire(self, now: float | None) -> None:
        """Remove the checkpoints whose time is over, except those that a lease reads."""
        if now is not None:
            for checkpoint in self.catalog.expired(now):
                self.remove(checkpoint, cause="expired")
                self.counters.expired += 1

    def quarantine(self, checkpoint: Checkpoint | None) -> None:
        """Never offer a checkpoint again (G5)."""
        if checkpoint is not None and checkpoint.node is not None:
            self.remove(checkpoint, cause="quarantined")
            self.counters.quarantined += 1

    def _remember(
        self, namespace: Namespace, tip: Checkpoint, positions: list[int], cause: str, used: int
    ) -> None:
        """Leave a ghost of each position on the path to ``tip``. One hash pass."""
        if self.config.ghosts:
            node = tip.anchor
            carried = radix.attributes_to(node, tip.position)
            state, done = Digest(), 0
            for position in reversed(positions):
                state.update(radix.token_parts(node, done, position))
                tail = b"".join(radix.token_parts(node, max(0, position - TAIL), position))
                ghost = Ghost(position, cause, self.tick, used, state.digest(carried, position))
                self.ghosts.add(namespace, tail, ghost)
                done = position

    def _forget(self, entry: Entry) -> None:
        self.unpin(entry)
        self.catalog.remove_entry(entry)

    # -- events ----------------------------------------------------------------------------

    def emit(self, kind: str, entry: Entry, *, key: str | None = None, freed: int = 0) -> None:
        """Record an event; the oldest is removed when the buffer is full (G8)."""
        if self.journal:
            tip, node = entry.tip, entry.tip.node
            positions = () if node is None else radix.positions_to(node, tip.position)
            freed *= self.config.page_bytes
            key = entry.key if key is None else key
            self.journal.add(kind, key, positions, entry=entry.identity, freed=freed)
