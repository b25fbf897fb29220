"""Up: a checkpoint in a tier below that a request resumes is brought back to the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ninfer_pool.core import radix
from ninfer_pool.core.entry import Checkpoint, Node
from ninfer_pool.core.lookup import Lookup, LookupFilter, Searchable, deepest_resume, find
from ninfer_pool.core.planner import canonical_cuts
from ninfer_pool.core.prompt import Prompt
from ninfer_pool.core.results import EvictionCost
from ninfer_pool.errors import StoreError
from ninfer_pool.tiers.disk.section import passes
from ninfer_pool.tiers.disk_medium import DiskMedium
from ninfer_pool.tiers.down import Descent
from ninfer_pool.tiers.parts import Draft, Kept, Part, Record, Stored
from ninfer_pool.tiers.payload import Payload
from ninfer_pool.tiers.promotion import Shared, promote, shared_with
from ninfer_pool.tiers.shelf import Shelf
from ninfer_pool.tiers.sources import ShelfSource

if TYPE_CHECKING:
    from ninfer_pool.core.pool import PrefixPool


class Ascent:
    """Brings checkpoints back. Called under the pool's lock."""

    def __init__(
        self,
        pool: PrefixPool,
        payload: Payload | None,
        shelves: Sequence[Shelf],
        down: Descent,
    ) -> None:
        self.pool = pool
        self.payload = payload
        self.shelves = shelves
        self.down = down
        self._fetched: Record | None = None
        """The last record that was brought nearer, or is on its way."""

    def promote(
        self, above: Lookup, filter: LookupFilter, *, reserve_tokens: int, cost: EvictionCost
    ) -> str | None:
        """See `TierHooks`. What is damaged is counted, forgotten, and the next best is taken."""
        prompt, config = above.prompt, self.pool.config
        deepest = deepest_resume(config, prompt)
        tried: set[Checkpoint | None] = set()
        while above.position < deepest:
            best = self._best(above, filter)
            if best is None or best[1].checkpoint in tried:
                return None
            shelf, found = best
            tried.add(found.checkpoint)
            kept = found.checkpoint
            assert isinstance(kept, Kept), "a tier that holds what is no checkpoint of it"
            at = found.position
            shared = shared_with(above.checkpoint, kept, at, page_tokens=config.page_tokens)
            if not self._fits(prompt, at, shared, reserve_tokens):
                return None
            if self._promote(shelf, kept, at, prompt=prompt, shared=shared, cost=cost):
                return shelf.name
            # something may have gone for it
            above = find(self.pool.state.catalog, prompt, above.cuts, filter)
            if above.position < config.minimum_tokens:
                above.give_up()
        return None

    def _best(self, above: Lookup, filter: LookupFilter) -> tuple[Shelf, Lookup] | None:
        best, position = None, above.position
        for shelf in self.shelves:
            if not _goes_on(shelf, above.checkpoint, above.prompt):
                continue
            found = find(shelf, above.prompt, above.cuts, filter)
            if found.checkpoint is None or found.position <= position:
                continue
            if found.position < self.pool.config.minimum_tokens:
                continue
            if shelf.cheaper_than_prefill(found.position, above=above.position):
                best, position = (shelf, found), found.position
        return best

    def _fits(self, prompt: Prompt, at: int, shared: Shared, reserve_tokens: int) -> bool:
        """Say whether a checkpoint and the request that resumes it fit, whatever else goes."""
        state, config = self.pool.state, self.pool.config
        ledger, size = state.ledger, config.page_tokens
        back = -(-at // size) - shared.pages + config.image_pages
        own = -(-(len(prompt) + reserve_tokens) // size) - at // size
        firm = guarded = 0
        if shared.mark is not None:
            units = state.units_of(shared.mark)
            firm = ledger.evictable(units)
            guarded = ledger.size(units[ledger.pin_refs[units] == 0])
        room = config.retained_pages - ledger.pinned - guarded
        return back + own <= ledger.freeable - firm and back <= room

    def _promote(
        self,
        shelf: Shelf,
        kept: Kept,
        at: int,
        *,
        prompt: Prompt,
        shared: Shared,
        cost: EvictionCost,
    ) -> bool:
        parts = dict.fromkeys(kept.stored.parts())
        shelf.hold(parts)
        shelf.reading.append(kept.record)
        started = time.perf_counter()
        try:
            size = promote(
                self.pool, self.payload, shelf, kept, at,
                prompt=prompt, shared=shared, cost=cost,
            )  # fmt: skip
        except (StoreError, OSError) as error:
            shelf.traffic.failed += 1
            if not passes(error):  # damaged: nobody is offered it again
                for record in list(shelf.owners.get(kept.stored, ())):
                    shelf.remove(record)
            return False
        finally:
            shelf.reading.remove(kept.record)
            shelf.drop(parts)
        seconds = time.perf_counter() - started
        if self.payload is not None:
            shelf.rates.note_restore(shelf.name, size, seconds)
        shelf.traffic.promoted += 1
        shelf.traffic.promoted_bytes += size
        return True

    def consumed(self, stored: Stored, tier: str) -> None:
        """A request that resumed what was brought back from ``tier`` has been committed."""
        shelf = next(shelf for shelf in self.shelves if shelf.name == tier)
        for record in shelf.owners.get(stored, ()):
            for kept in record.marks:
                if kept.stored is stored:
                    shelf.consumed(kept, tick=self.pool.state.tick)

    # -- ahead of time ---------------------------------------------------------------------

    def prefetch(self, prompt: Prompt, notify: Callable[[], None] | None) -> bool:
        """See `Tiers.prefetch`."""
        shelf, worker = self.shelves[-1], self.down.worker
        if not isinstance(shelf.medium, DiskMedium) or not self.down.background:
            return False
        with self.pool.state.lock:
            if worker.busy and self._coming(prompt):
                return worker.after(notify)
            record = self._on_disk(prompt, shelf)
            if record is None:
                return False
            if record is self._fetched:
                return record in shelf.reading and worker.after(notify)
            if worker.busy:
                return False
            self._fetched = record
            shelf.reading.append(record)
            draft = shelf.draft(record, spares=False)
            parts = draft.parts()
            shelf.hold(parts)
            if len(self.shelves) > 1:
                self.down.expect(draft)
            worker.submit(lambda: self._fetch(shelf, record, draft, parts, notify))
        return True

    def _coming(self, prompt: Prompt) -> bool:
        """Say whether a prompt resumes what is being stored deeper than anything that is there."""
        deepest, best = deepest_resume(self.pool.config, prompt), 0
        for draft in self.down.on_its_way():
            upto = min(_in_common(draft, prompt), deepest)
            best = max([best, *(m.position for m in draft.marks if m.position <= upto)])
        if best < max(1, self.pool.config.minimum_tokens):
            return False
        places: list[Searchable] = [self.pool.state.catalog, *self.shelves]
        return best > max(found.position for found in self._searched(prompt, places))

    def _searched(self, prompt: Prompt, places: Sequence[Searchable]) -> list[Lookup]:
        config, clock = self.pool.config, self.pool.config.clock
        rules = LookupFilter(now=clock() if clock is not None else None)
        cuts = canonical_cuts(prompt.boundaries, grid=config.grid, min_chunk=config.min_chunk)
        return [find(place, prompt, cuts, rules) for place in places]

    def _on_disk(self, prompt: Prompt, shelf: Shelf) -> Record | None:
        """Return the record on disk that a prompt resumes deeper than anything above, if any."""
        found, *above = self._searched(prompt, [shelf, self.pool.state.catalog, *self.shelves[:-1]])
        if (
            not isinstance(found.checkpoint, Kept)
            or found.position < self.pool.config.minimum_tokens
        ):
            return None
        if found.position <= max(each.position for each in above):
            return None
        return (
            found.checkpoint.record
            if shelf.cheaper_than_prefill(found.position, above=above[0].position)
            else None
        )

    def _fetch(
        self,
        disk: Shelf,
        record: Record,
        draft: Draft,
        parts: dict[Part, None],
        notify: Callable[[], None] | None,
    ) -> None:
        """On the worker's thread: to host memory, or at least to the system's page cache."""
        source = ShelfSource(disk)
        try:
            if len(self.shelves) > 1:
                self.down.store_now(self.shelves[0], draft, source)
            else:
                for part in parts:
                    source.rows(part)
        except (StoreError, OSError):
            disk.traffic.failed += 1
        finally:
            with self.pool.state.lock:
                disk.reading.remove(record)
                disk.drop(parts)
            self.down.worker.after(notify)


def _in_common(draft: Draft, prompt: Prompt) -> int:
    """Return how many tokens a draft and a prompt begin with alike, attributes included."""
    if draft.namespace != prompt.namespace:
        return 0
    path = Node(parent=None, start=0, tokens=bytearray(draft.tokens), attributes=draft.attributes)
    return radix.walk(path, prompt.buffer, prompt.attributes)[-1][1]


def _goes_on(shelf: Shelf, mark: Checkpoint | None, prompt: Prompt) -> bool:
    """Say whether a prompt that resumes ``mark`` on the device might resume deeper from a tier.

    Where the same checkpoint lies there, only what comes after it is compared. O(that).
    """
    if mark is None or not shelf.config.image_bytes:
        return True
    owners = shelf.owners.get(mark.stored, ())  # equal files are one, whoever they belong to
    own = next((each for each in owners if each.entry.namespace == prompt.namespace), None)
    if own is None:
        return True
    at = mark.position
    kept = next(kept for kept in own.marks if kept.stored is mark.stored)
    above, path = radix.path_to(kept.anchor, at)
    rest = prompt.buffer[4 * at :]
    hops = radix.walk(path, rest, prompt.attributes, origin=at, known=above)
    deepest = next(radix.checkpoints_upto(hops, deepest_resume(shelf.config, prompt)), None)
    return deepest is not None and deepest.position > at
