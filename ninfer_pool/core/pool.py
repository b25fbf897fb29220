"""The pool: what an engine holds."""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Callable
from itertools import count
from pathlib import Path as FilePath

from ninfer_pool.core import lifecycle
from ninfer_pool.core.admission import Request, admit, covers, lane_of, search
from ninfer_pool.core.checks import check_pool
from ninfer_pool.core.config import PoolConfig
from ninfer_pool.core.describe import describe
from ninfer_pool.core.entry import Checkpoint, Entry
from ninfer_pool.core.eviction import Bill, drop_entry
from ninfer_pool.core.grant import Wishes
from ninfer_pool.core.hooks import Below, NoTiers
from ninfer_pool.core.lease import Lease
from ninfer_pool.core.lookup import Matches, Rules, deepest_resume, explain, find_anywhere, lookup
from ninfer_pool.core.namespace import Namespace
from ninfer_pool.core.planner import canonical_cuts
from ninfer_pool.core.prompt import Prompt
from ninfer_pool.core.request_checks import check_flags, check_lanes, check_prompt, check_request
from ninfer_pool.core.results import EntryInfo, Event, Explanation, Pending, Refusal, Stats
from ninfer_pool.core.retained import Retained
from ninfer_pool.errors import ConfigError


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
        self.retained = Retained(config)
        self.last_refusal: Refusal | None = None
        """Why the last `acquire` that said no did so."""
        self.lock = threading.RLock()
        self._leases: dict[Lease, None] = {}
        self._free_lanes = list(range(config.lanes))
        self._lane_used = [0] * config.lanes
        self.expiry: list[tuple[float, int, Checkpoint]] = []
        self.serial = count()
        self.below: Below = NoTiers()
        """The tiers below the device: see `ninfer_pool.tiers.Tiers`, which sets it."""

    # -- reading (G7) ----------------------------------------------------------------------

    def lookup(self, prompt: Prompt) -> Matches:
        """Return the positions where ``prompt`` can be resumed, ascending. O(matched bytes).

        Asked again with the same `Prompt` while nothing was stored or removed, as a scheduler
        does for what waits, it answers from memory: O(1). `acquire` always compares anew.
        """
        check_prompt(prompt)
        clock = self.config.clock
        with self.lock:
            return lookup(self.retained, prompt, clock() if clock is not None else None)

    def explain(self, prompt: Prompt, *, read: bool = True, exact: bool = False) -> Explanation:
        """Return why ``prompt`` would hit as deep as it would, and what would help."""
        check_prompt(prompt)
        rules = self._rules(read=read, exact=exact)
        with self.lock:
            cuts = self._cuts(prompt)
            found = find_anywhere(self.retained, prompt, cuts, rules)
            return explain(self.retained, prompt, found, rules)

    def key(self, prompt: Prompt) -> str:
        """Return the key of a prompt's whole sequence in this pool. One hash pass."""
        check_prompt(prompt)
        return self.retained.key(prompt.namespace, [prompt.buffer], prompt.attributes)

    def find(self, key: str) -> list[EntryInfo]:
        """Return every entry stored under ``key``: normally one or none."""
        with self.lock:
            found = [describe(self.retained, entry) for entry in self._holders(key)]
            return found or self.below.find(key)

    def entries(
        self, *, where: Callable[[Namespace], bool] | None = None, newest: int | None = None
    ) -> list[EntryInfo]:
        """Return all entries, or those of some namespaces, or the newest, the oldest first.

        Those that lie only in a tier below come before all that lie on the device.
        """
        with self.lock:
            every = self.retained.entries.values()
            found = [entry for entry in every if where is None or where(entry.namespace)]
            first = 0 if newest is None else max(0, len(found) - newest)
            told = [describe(self.retained, entry) for entry in found[first:]]
            left = None if newest is None else max(0, newest - len(told))
            return self.below.entries(where, left) + told

    def events(self, since: int = 0) -> list[Event]:
        """Return the events numbered ``since`` and later that are still remembered.

        Raises:
            ConfigError: ``since`` is not an int.
        """
        if type(since) is not int:
            raise ConfigError(f"since: {since!r}; needs an int")
        with self.lock:
            return list(self.retained.journal.since(since))

    def stats(self) -> Stats:
        """Return sizes and counters. O(1)."""
        with self.lock:
            retained, ledger = self.retained, self.retained.ledger
            size = self.config.page_bytes
            return Stats(
                entries=len(retained.entries),
                checkpoints=retained.checkpoints,
                superseded=len(retained.spares),
                leases=len(self._leases),
                pages_total=ledger.total,
                pages_free=ledger.free,
                retained_bytes=ledger.retained * size,
                image_bytes=retained.checkpoints * self.config.image_pages * size,
                pinned_bytes=ledger.protected * size,
                counters=retained.counters.copy(),
                tiers=self.below.stats(),
            )

    @property
    def running(self) -> int:
        """Leases that have not ended."""
        return len(self._leases)

    def check(self) -> None:
        """Recount everything and compare; AssertionError names what is off. O(everything)."""
        with self.lock:
            check_pool(self.retained, list(self._leases))
            self.below.check()

    def _rules(self, *, read: bool = True, exact: bool = False) -> Rules:
        clock = self.config.clock
        return Rules(read=read, exact=exact, now=clock() if clock is not None else None)

    def _cuts(self, prompt: Prompt) -> tuple[int, ...]:
        config = self.config
        return canonical_cuts(prompt.boundaries, grid=config.grid, min_chunk=config.min_chunk)

    # -- admission -------------------------------------------------------------------------

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
        """Lease the deepest resumable prefix of ``prompt`` and room for what is to come.

        Args:
            reserve_tokens: room for generated tokens beyond the prompt.
            read: False: resume nothing. retain: False: leave nothing.
            pin: keep what is committed until `unpin`.
            priority: entries of lower priority go first.
            ttl_seconds: what is committed is not offered after that long; needs a clock.
            lane: the lane to run in; None: the home lane, else ``near``, else the least
                recently used.
            near: the lane to prefer where there is no home lane that is free.
            exact: resume only where the bits are those of a cold run.
            claim: continue the entry in place where possible, without copying its last page.
            wait_for_shared: answer `Pending` where a running lease will take a deeper
                checkpoint of this prompt.

        Returns:
            a `Lease`; `Pending`; or None where there is no room or no lane, with nothing
            changed: see `last_refusal` (G4).

        Raises:
            PromptError: an argument that cannot be used.
        """
        wishes = Wishes(
            retain=retain,
            pin=pin,
            priority=priority,
            ttl_seconds=ttl_seconds,
            claim=claim,
            exact=exact,
        )
        check_request(self.config, prompt, reserve_tokens, wishes)
        check_lanes(self.config.lanes, lane=lane, near=near)
        check_flags(
            read=read, retain=retain, pin=pin, exact=exact, claim=claim, wait=wait_for_shared
        )
        with self.lock:
            rules = self._rules(read=read, exact=exact)
            rules.lane = lane if self.config.affinity == "strict" else None
            lifecycle.expire(self, rules.now)
            request = search(self.retained, prompt, wishes, rules, reserve_tokens)
            if self.retained.tiers and read:
                free = bool(self._free_lanes) and lane in (None, *self._free_lanes)
                request = self.below.raise_up(prompt, request, rules, lane=free)
            pending = self._pending(request, read=read) if wait_for_shared else None
            return pending or self._admit(request, lane, near=near)

    def _pending(self, request: Request, *, read: bool) -> Pending | None:
        best: Pending | None = None
        for lease in self._leases if read else ():
            deepest = deepest_resume(self.config, request.prompt)
            shared = min(deepest, covers(request.prompt, lease.prompt))
            for position, _ in lease.planned_captures:
                known = max(request.found.position, best.position if best else 0)
                if max(known, lease.frontier) < position <= shared and lease.doubt is None:
                    best = Pending(position, lease)
        return best

    def _admit(self, request: Request, wanted: int | None, *, near: int | None) -> Lease | None:
        counters = self.retained.counters
        lane = lane_of(self.retained, request.found, self._free_lanes, wanted=wanted, near=near)
        if lane is None:
            strict = self.config.affinity == "strict" and request.found.mark is not None
            self.refuse("home_lane_busy" if strict and self._free_lanes else "no_lane", 0)
            return None
        grant = admit(self.retained, request, lane)
        if isinstance(grant, Refusal):
            self.last_refusal = grant
            counters.refused += 1
            return None
        lease = Lease(self, request.prompt, request.wishes, grant)
        self._leases[lease] = None
        self._free_lanes.remove(lane)
        counters.acquired += 1
        counters.input_tokens += len(request.prompt)
        counters.reused_tokens += lease.start
        return lease

    def note_miss(self, explanation: Explanation) -> None:
        """Tell policies what a committed request's reason says about the pressure (G6)."""
        tick = self.retained.tick
        gone, used = explanation.evicted_tick, explanation.used_tick
        if gone is not None and used is not None:
            self.retained.ranking.returned(tick - gone, tick - used, tick)
        elif explanation.reason == "no_entry":
            self.retained.ranking.stranger(tick)

    # -- verbs that take a key -------------------------------------------------------------

    def pin(self, key: str) -> bool:
        """Never evict the entry of that key (G4); False unless the key names one entry.

        Its checkpoints of now are kept, and the tip that it grows to.
        """
        with self.lock:
            entry = self._named(key)
            if entry is not None:
                self.pin_entry(entry)
                return True
            return self.below.set_pin(key, pinned=True)

    def pin_entry(self, entry: Entry) -> None:
        """See `pin`."""
        if entry.pinned is None:
            entry.pinned = list(self.retained.path_marks(entry))
            for mark in entry.pinned:
                self.retained.spares.discard(mark)
                self.retained.guard(mark)

    def unpin(self, key: str) -> bool:
        """Take the pin off; False unless the key names one entry that is pinned."""
        with self.lock:
            entry = self._named(key)
            below = self.below.set_pin(key, pinned=False)
            if entry is None or entry.pinned is None:
                return below
            self.retained.unpin(entry)
            return True

    def release(self, key: str) -> bool:
        """Tell that the conversation is over: its entry goes before others of its priority."""
        with self.lock:
            entry = self._named(key)
            if entry is not None and not entry.released:
                self.retained.ranking.removed(entry)
                entry.released = True
                self.retained.ranking.added(entry, self.retained.tick)
            return self.below.release(key) or entry is not None

    def evict(self, key: str) -> bool:
        """Remove an entry whole, from every tier; False unless the key names one that nothing
        protects."""
        with self.lock:
            entry = self._named(key)
            if entry is None:
                return self.below.evict(key)
            if any(m.guards for m in self.retained.private_marks(entry)):
                return False
            self.below.forget(entry)
            drop_entry(self.retained, entry, Bill())
            return True

    def clear(self) -> int:
        """Remove every entry that nothing protects, from every tier, and every ghost; return how
        many went."""
        with self.lock:
            before = len(self.retained.entries) + self.below.clear()
            for entry in list(self.retained.entries.values()):
                if not any(mark.guards for mark in self.retained.private_marks(entry)):
                    drop_entry(self.retained, entry, Bill())
            self.retained.clear_spares()
            self.retained.ghosts.clear()
            return before - len(self.retained.entries)

    def _named(self, key: str) -> Entry | None:
        entries = self._holders(key)
        return entries[0] if len(entries) == 1 else None

    def _holders(self, key: object) -> list[Entry]:
        """Every entry of that key; none for what is no key at all, such as None."""
        return list(self.retained.keys.get(key, {}).values()) if isinstance(key, str) else []

    # -- files -----------------------------------------------------------------------------

    def save(self, entry: EntryInfo | str, path: str | FilePath, *, tokens: bool = True) -> int:
        """Write an entry, by itself or its key, whole, to one file; return the file's bytes.

        ``tokens=False`` leaves the token ids out: such a file can be looked at, not loaded.

        Raises:
            ConfigError: no tiers were attached, so the pool cannot reach its pages.
            StoreError: no such entry, or the file cannot be written.
        """
        key = entry.key if isinstance(entry, EntryInfo) else entry
        return self.below.save(key, FilePath(path), tokens=tokens)

    def load(self, path: str | FilePath) -> str:
        """Retain what a file holds, with every checkpoint; return its key.

        Raises:
            ConfigError: as `save`.
            RoomError: no room on the device now.
            StoreError: damaged, of other weights or sizes, without tokens, or larger than the pool.
        """
        return self.below.load(FilePath(path))

    # -- what leases and their life cycle ask -----------------------------------------------

    @property
    def free_lanes(self) -> int:
        """Lanes that no lease holds."""
        return len(self._free_lanes)

    @property
    def freeable_bytes(self) -> int:
        """Bytes that are free, or would be if everything unprotected went."""
        return self.retained.ledger.freeable * self.config.page_bytes

    def refuse(self, reason: str, pages: int) -> None:
        """Note why something was refused."""
        self.last_refusal = Refusal(reason, pages * self.config.page_bytes, self.freeable_bytes)
        self.retained.counters.refused += 1

    def forget(self, lease: Lease, *, committed: bool) -> None:
        """Take an ended lease out; a commit makes its lane the most recently used (G6)."""
        del self._leases[lease]
        if committed:
            self._lane_used[lease.lane] = self.retained.tick
        insort(self._free_lanes, lease.lane, key=self._lane_used.__getitem__)
