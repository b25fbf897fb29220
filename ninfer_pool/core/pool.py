"""The pool: the class that an engine holds. It checks arguments, takes the lock, delegates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

from ninfer_pool.core.admission import admit, choose_lane, search, search_below
from ninfer_pool.core.audit import audit, describe
from ninfer_pool.core.config import PoolConfig
from ninfer_pool.core.entry import Entry
from ninfer_pool.core.eviction import evict_entry
from ninfer_pool.core.explain import explain
from ninfer_pool.core.identity import Namespace
from ninfer_pool.core.lease import Lease, Pending
from ninfer_pool.core.lookup import (
    Lookup,
    LookupFilter,
    Matches,
    deepest_resume,
    find_anywhere,
    matches,
    prompt_cuts,
    shared_tokens,
)
from ninfer_pool.core.progress import AcquireOptions, RequestOptions, check_flags
from ninfer_pool.core.prompt import Prompt
from ninfer_pool.core.results import EntryInfo, Event, EvictionCost, Explanation, Refusal, Stats
from ninfer_pool.core.state import PoolState
from ninfer_pool.errors import ConfigError, PromptError

if TYPE_CHECKING:
    from typing_extensions import Unpack


class PrefixPool:
    """A keyed pool of retained prefixes under one byte budget.

    Thread-safe under one lock; no method blocks on anything else. It decides and returns
    operations as plain data; the engine carries them out.

    >>> from ninfer_pool import Namespace, PoolConfig, PrefixPool, Prompt
    >>> pool = PrefixPool(PoolConfig(num_pages=64, page_bytes=4096, image_bytes=8192))
    >>> space = Namespace(weights="sha256:1", kv_dtype="bf16")
    >>> prompt = Prompt(list(range(100)), namespace=space)
    >>> with pool.acquire(prompt) as lease:
    ...     for chunk in lease.chunks():
    ...         lease.advance(prompt.tokens[chunk.begin : chunk.end])
    ...         _ = lease.checkpoint(chunk.checkpoint, position=chunk.end)
    ...     key = lease.commit()
    >>> pool.lookup(prompt)[-1].position
    100
    """

    def __init__(self, config: PoolConfig) -> None:
        if not isinstance(config, PoolConfig):
            raise ConfigError(f"config: {type(config).__name__}; needs a PoolConfig")
        self.config = config
        self.state = PoolState(config)
        """Its internals: for tiers and tests; an engine needs none of them."""
        self.lock = self.state.lock
        """The lock that every method takes. Hold it to make several calls at one moment."""
        self._leases: dict[Lease, None] = {}

    @property
    def last_refusal(self) -> Refusal | None:
        """Why the last `acquire` that returned None did so."""
        return self.state.last_refusal

    # -- reading (G7) ----------------------------------------------------------------------

    def lookup(self, prompt: Prompt) -> Matches:
        """Return the positions where ``prompt`` can be resumed, ascending. O(matched bytes).

        Repeated with the same `Prompt` while nothing was stored or removed, as a scheduler does
        for waiting requests, the result is remembered: O(1). `acquire` always compares again.
        """
        _check_prompt(prompt)
        clock, catalog = self.config.clock, self.state.catalog
        with self.lock:
            seen = prompt.seen
            if seen is not None and seen[0] is catalog and seen[1] == catalog.version:
                remembered: Matches = seen[2]
                return remembered
            tiers = self.state.hooks.searchable
            if clock is not None:  # a checkpoint may expire while the catalog stays as it is
                return matches(catalog, tiers, prompt, now=clock())
            found = matches(catalog, tiers, prompt, now=None)
            prompt.seen = (catalog, catalog.version, found)
            return found

    def explain(self, prompt: Prompt, *, read: bool = True, exact: bool = False) -> Explanation:
        """Return why ``prompt`` would hit as deep as it would, and what would help."""
        _check_prompt(prompt)
        filter = LookupFilter(read=read, exact=exact, now=self._now())
        state = self.state
        with state.lock:
            cuts = prompt_cuts(self.config, prompt)
            tiers = state.hooks.searchable
            return explain(state, find_anywhere(state.catalog, tiers, prompt, cuts, filter), filter)

    def key(self, prompt: Prompt) -> str:
        """Return the key of a prompt's whole sequence in this pool. One hash pass."""
        _check_prompt(prompt)
        return self.state.catalog.key(prompt.namespace, [prompt.buffer], prompt.attributes)

    def find(self, key: str) -> list[EntryInfo]:
        """Return every entry stored under ``key``: normally one or none."""
        with self.state.lock:
            found = [describe(self.state, entry) for entry in self._holders(key)]
            return found or self.state.hooks.find(key)

    def entries(
        self, *, where: Callable[[Namespace], bool] | None = None, newest: int | None = None
    ) -> list[EntryInfo]:
        """Return all entries, or those of some namespaces, or the newest, the oldest first.

        Those held only in a tier below come before all that the device holds.
        """
        state = self.state
        with state.lock:
            every = state.catalog.entries.values()
            found = [entry for entry in every if where is None or where(entry.namespace)]
            first = 0 if newest is None else max(0, len(found) - newest)
            infos = [describe(state, entry) for entry in found[first:]]
            left = None if newest is None else max(0, newest - len(infos))
            return state.hooks.entries(where, left) + infos

    def events(self, since: int = 0) -> list[Event]:
        """Return the events numbered ``since`` and later that are still remembered.

        Raises:
            ConfigError: ``since`` is not an int.
        """
        if type(since) is not int:
            raise ConfigError(f"since: {since!r}; needs an int")
        with self.state.lock:
            return list(self.state.journal.since(since))

    def stats(self) -> Stats:
        """Return sizes and counters. O(1)."""
        state = self.state
        with state.lock:
            catalog, ledger = state.catalog, state.ledger
            size = self.config.page_bytes
            return Stats(
                entries=len(catalog.entries),
                checkpoints=catalog.checkpoints,
                superseded=len(catalog.superseded),
                leases=len(self._leases),
                pages_total=ledger.total,
                pages_free=ledger.free,
                retained_bytes=ledger.retained * size,
                image_bytes=catalog.checkpoints * self.config.image_pages * size,
                pinned_bytes=ledger.pinned * size,
                counters=state.counters.copy(),
                tiers=state.hooks.stats(),
            )

    @property
    def running(self) -> int:
        """Leases that have not ended."""
        return len(self._leases)

    def check(self) -> None:
        """Recount everything and compare; AssertionError names the difference. O(everything)."""
        with self.state.lock:
            audit(self.state, [lease.hold() for lease in self._leases])
            self.state.hooks.check()

    @property
    def free_lanes(self) -> int:
        """Lanes that no lease holds."""
        return len(self.state.free_lanes)

    @property
    def freeable_bytes(self) -> int:
        """Bytes that are free, or would be if everything unprotected were evicted."""
        return self.state.ledger.freeable * self.config.page_bytes

    def _now(self) -> float | None:
        clock = self.config.clock
        return clock() if clock is not None else None

    # -- admission -------------------------------------------------------------------------

    @overload
    def acquire(
        self,
        prompt: Prompt,
        *,
        wait_for_shared: Literal[False] = False,
        **options: Unpack[AcquireOptions],
    ) -> Lease | None: ...
    @overload
    def acquire(
        self, prompt: Prompt, *, wait_for_shared: bool, **options: Unpack[AcquireOptions]
    ) -> Lease | Pending | None: ...
    def acquire(
        self,
        prompt: Prompt,
        *,
        reserve_tokens: int = 0,
        read: bool = True,
        retain: bool = True,
        pin: bool = False,
        priority: int = 0,
        ttl_seconds: float | None = None,
        lane: int | None = None,
        near: int | None = None,
        exact: bool = False,
        claim: bool = False,
        wait_for_shared: bool = False,
    ) -> Lease | Pending | None:
        """Lease the deepest resumable prefix of ``prompt`` and room for the tokens to come.

        Args:
            reserve_tokens: room for generated tokens beyond the prompt.
            read: False: resume nothing. retain: False: leave nothing.
            pin: keep the committed entry until `unpin`.
            priority: entries of lower priority are evicted first.
            ttl_seconds: the committed entry is not offered after that long; needs a clock.
            lane: the lane to run in; None: the home lane, else ``near``, else the least
                recently used.
            near: the lane to prefer where there is no home lane that is free.
            exact: resume only where the bits are those of a cold run.
            claim: continue the entry in place where possible, without copying its last page.
            wait_for_shared: return `Pending` where a running lease will reach a deeper checkpoint.

        Returns:
            a `Lease`; `Pending`; or None: no room or no lane, nothing changed, `last_refusal` (G4).

        Raises:
            PromptError: an argument that cannot be used.
        """
        options = RequestOptions(
            reserve_tokens=reserve_tokens,
            retain=retain,
            pin=pin,
            priority=priority,
            ttl_seconds=ttl_seconds,
            exact=exact,
            claim=claim,
        )
        _check_prompt(prompt)
        options.check(self.config)
        _check_lanes(self.config.lanes, lane=lane, near=near)
        check_flags(read=read, wait_for_shared=wait_for_shared)
        state = self.state
        with state.lock:
            strict = lane if self.config.affinity == "strict" else None
            filter = LookupFilter(read=read, exact=exact, now=self._now(), lane=strict)
            state.expire(filter.now)
            cost = EvictionCost()
            lookup, explanation = search(state, prompt, filter)
            if read and state.hooks.searchable:
                free = bool(state.free_lanes) and lane in (None, *state.free_lanes)
                lookup, explanation = search_below(
                    state, lookup, explanation, filter, options, cost, free=free
                )
            if wait_for_shared and read and (pending := self._pending(lookup)):
                return pending
            chosen = choose_lane(state, lookup, wanted=lane, near=near)
            if chosen is None:
                home = self.config.affinity == "strict" and lookup.checkpoint is not None
                state.refuse("home_lane_busy" if home and state.free_lanes else "no_lane", 0)
                return None
            return self._open(admit(state, lookup, explanation, options, lane=chosen, cost=cost))

    def _pending(self, lookup: Lookup) -> Pending | None:
        best: Pending | None = None
        for lease in self._leases:
            deepest = deepest_resume(self.config, lookup.prompt)
            shared = min(deepest, shared_tokens(lookup.prompt, lease.prompt))
            for position, _ in lease.planned_captures:
                known = max(lookup.position, best.position if best else 0)
                if max(known, lease.frontier) < position <= shared and lease.doubt is None:
                    best = Pending(position, lease)
        return best

    def _open(self, lease: Lease | Refusal) -> Lease | None:
        state, counters = self.state, self.state.counters
        if isinstance(lease, Refusal):
            state.last_refusal = lease
            counters.refused += 1
            return None
        self._leases[lease] = None
        lease.on_end = self._leases.pop
        state.free_lanes.remove(lease.lane)
        counters.acquired += 1
        counters.input_tokens += lease.prompt.length
        counters.reused_tokens += lease.start
        return lease

    # -- verbs that take a key -------------------------------------------------------------

    def pin(self, key: str) -> bool:
        """Never evict the entry of that key (G4); False unless the key names one entry.

        Its checkpoints of now are protected, and the tip that it grows to.
        """
        with self.state.lock:
            entry = self._named(key)
            if entry is not None:
                self.state.pin(entry)
                return True
            return self.state.hooks.set_pin(key, pinned=True)

    def unpin(self, key: str) -> bool:
        """Take the pin off; False unless the key names one entry that is pinned."""
        with self.state.lock:
            entry = self._named(key)
            below = self.state.hooks.set_pin(key, pinned=False)
            if entry is None or entry.pinned is None:
                return below
            self.state.unpin(entry)
            return True

    def release(self, key: str) -> bool:
        """Record that the conversation is over: its entry goes before others of its priority."""
        state = self.state
        with state.lock:
            entry = self._named(key)
            if entry is not None:
                order = state.catalog.order
                order.move(entry, state.tick, priority=entry.priority, released=True)
            return state.hooks.release(key) or entry is not None

    def evict(self, key: str) -> bool:
        """Remove an entry whole, from every tier; False unless the key names one unprotected."""
        state = self.state
        with state.lock:
            entry = self._named(key)
            if entry is None:
                return state.hooks.evict(key)
            if state.catalog.protects(entry):
                return False
            state.hooks.remove(entry)
            evict_entry(state, entry, EvictionCost())
            return True

    def clear(self) -> int:
        """Remove every unprotected entry from every tier, and every ghost; return how many."""
        state = self.state
        with state.lock:
            entries = state.catalog.entries
            before = len(entries) + state.hooks.clear()
            for entry in list(entries.values()):
                if not state.catalog.protects(entry):
                    evict_entry(state, entry, EvictionCost())
            state.clear_superseded()
            state.ghosts.clear()
            return before - len(entries)

    def _named(self, key: str) -> Entry | None:
        entries = self._holders(key)
        return entries[0] if len(entries) == 1 else None

    def _holders(self, key: object) -> list[Entry]:
        """Return every entry of that key; none where it is no str, such as None."""
        keys = self.state.catalog.keys
        return list(keys.get(key, {}).values()) if isinstance(key, str) else []

    # -- files -----------------------------------------------------------------------------

    def save(self, entry: EntryInfo | str, path: str | Path, *, tokens: bool = True) -> int:
        """Write an entry, by itself or its key, whole, to one file; return the file's bytes.

        ``tokens=False`` leaves the token ids out: such a file can be read, not loaded.

        Raises:
            ConfigError: no tiers were attached, so the pool cannot reach its pages.
            StoreError: no such entry, or the file cannot be written.
        """
        key = entry.key if isinstance(entry, EntryInfo) else entry
        return self.state.hooks.save(key, Path(path), tokens=tokens)

    def load(self, path: str | Path) -> str:
        """Retain the entry of a file, with every checkpoint; return its key.

        Raises:
            ConfigError: as `save`.
            RoomError: no room on the device now.
            StoreError: damaged, of other weights or sizes, without tokens, or larger than the pool.
        """
        return self.state.hooks.load(Path(path))


def _check_prompt(prompt: object) -> None:
    if not isinstance(prompt, Prompt):
        raise PromptError(f"prompt: {type(prompt).__name__}; needs a Prompt")


def _check_lanes(lanes: int, **wanted: object) -> None:
    for name, lane in wanted.items():
        if lane is not None and (type(lane) is not int or not 0 <= lane < lanes):
            raise PromptError(f"{name}: {lane!r}; needs an int of 0 to {lanes - 1}")
