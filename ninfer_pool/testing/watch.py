"""A witness of every eviction: each victim must be legal, next in order, and needed.

It looks inside a pool: for tests of a pool or of a policy, never in an engine.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

from ninfer_pool.core.entry import Checkpoint, Entry
from ninfer_pool.core.lease import Lease, Pending
from ninfer_pool.core.policy import Policy
from ninfer_pool.core.policy.priority import VictimOrder
from ninfer_pool.core.pool import PrefixPool
from ninfer_pool.core.prompt import Prompt


class IllegalVictim(AssertionError):
    """Something went that had to stay, or before its turn, or without need; or was offered
    although it is no entry."""


class Victim(NamedTuple):
    """A checkpoint or entry removed for room."""

    what: str
    pages: int
    """Pages retained no more."""
    free: int
    """Pages that were free before it went."""
    over: bool
    """Whether a bound was exceeded before it went."""


def picture(pool: PrefixPool, *, order: bool = True) -> Any:
    """Return everything that an answer or a victim could depend on, to compare (G6, G7).

    ``victims``: also read the policy; False for one whose order changes by reading, as S3-FIFO.
    """
    with pool.state.lock:
        state = pool.state
        ranked = list(state.catalog.order.victims(state.tick)) if order else []
        if isinstance(state.catalog.order, Questioned):
            state.catalog.order.offered = None  # reading evicts no entry
        marks = [
            (mark.position, mark.tick, mark.uses, mark.refs, mark.superseded)
            for root in state.catalog.roots.values()
            for node in root.subtree()
            for mark in node.checkpoints
        ]
        return (
            copy.deepcopy({"tick": state.tick, "entries": pool.entries()}),
            [entry.key for entry in ranked],
            [(mark.position, mark.kind) for mark in state.catalog.superseded],
            marks,
            sorted(state.ledger.free_pages().tolist()),
            sorted((state.lane_used[lane], lane) for lane in state.free_lanes),
            len(pool.events()),
        )


class Questioned(VictimOrder):
    """A ranking that notes what its policies offer, and refuses what they may not."""

    __slots__ = ("offered",)

    def __init__(self, make: Callable[[], Policy]) -> None:
        super().__init__(make)
        self.offered: list[Entry] | None = None
        """The entries offered since the last victim; None: none were requested."""

    def truncation_candidates(self, tick: int) -> Iterator[Entry]:
        """See `Policy.truncation_candidates`."""
        return self._note(super().truncation_candidates(tick))

    def victims(self, tick: int) -> Iterator[Entry]:
        """See `Policy.victims`: each entry once, the released first, then by priority."""
        return self._note(self._each_once(super().victims(tick)))

    def _note(self, offers: Iterator[Entry]) -> Iterator[Entry]:
        self.offered = []
        return self._noting(offers)

    def _noting(self, offers: Iterator[Any]) -> Iterator[Entry]:
        for entry in offers:
            if not isinstance(entry, Entry) or entry.identity not in self._of:
                raise IllegalVictim(f"the policy offers {entry!r}, which is no entry of its own")
            assert self.offered is not None
            self.offered.append(entry)
            yield entry

    def _each_once(self, offers: Iterator[Entry]) -> Iterator[Entry]:
        seen: set[int] = set()
        last = (-1, 0)
        for entry in offers:
            identity = getattr(entry, "identity", None)
            if identity in seen:
                raise IllegalVictim(f"the policy offers {entry!r} twice")
            rank = self._of.get(identity, last) if identity is not None else last
            if rank < last:
                raise IllegalVictim(f"{entry!r} is offered after entries of a higher priority")
            last = rank
            if identity is not None:
                seen.add(identity)
            yield entry


class Watch:
    """Judges every victim that a pool takes for room (G1, G2, G4); the pool must be new.

    Use it for the two calls that may evict to admit, `acquire` and `extend`, and call `settle`
    after every other one: each victim then was needed when it went, so that together they free
    at most the need and the largest of them.

    Raises:
        IllegalVictim: from any call of the pool, and from `settle`.
    """

    def __init__(self, pool: PrefixPool) -> None:
        assert not pool.state.catalog.entries, "watch a pool from its beginning"
        self.pool = pool
        self.count = 0
        """Victims judged so far."""
        self._victims: list[Victim] = []
        self._leases: list[Lease] = []
        self._inside = False
        self._ranking = Questioned(pool.config.make_policy)
        state: Any = pool.state
        state.catalog.order = self._ranking
        judges: dict[str, Any] = {
            "truncate": self._judge_tip,
            "remove_entry": self._judge_entry,
            "remove_superseded": self._judge_spare,
            "remove_checkpoint": self._judge_thinned,
        }
        for name, judge in judges.items():
            setattr(state, name, partial(self._hook, judge, getattr(state, name)))

    # -- calls that may evict --------------------------------------------------------------

    def acquire(self, prompt: Prompt, **options: Any) -> Lease | Pending | None:
        """Acquire; each victim must have gone while there was still too little free."""
        self.settle()
        lease: Lease | Pending | None = self.pool.acquire(prompt, **options)
        taken = 0
        if isinstance(lease, Lease):
            self._leases.append(lease)
            taken = self.pool.state.ledger.size(lease.own)
        self._settle_for(taken)
        return lease

    def extend(self, lease: Lease, tokens: int) -> bool:
        """Extend; each victim must have gone while there was still too little free."""
        self.settle()
        before = len(lease.pages)
        done = lease.extend(tokens)
        self._settle_for(len(lease.pages) - before)
        return done

    def _settle_for(self, pages: int) -> None:
        for victim in self._taken():
            if victim.free >= pages:
                raise IllegalVictim(
                    f"{victim.what} went for {pages} pages while {victim.free} were free (G2)"
                )

    def settle(self) -> None:
        """Each victim since the last call must have gone while a bound was exceeded."""
        for victim in self._taken():
            if not victim.over:
                raise IllegalVictim(f"{victim.what} went while everything fitted (G1)")

    def _taken(self) -> list[Victim]:
        victims, self._victims = self._victims, []
        return victims

    # -- victims ---------------------------------------------------------------------------

    def _hook(
        self,
        judge: Callable[..., str | None],
        right: Callable[..., int],
        what: Any,
        **options: Any,
    ) -> int:
        if self._inside:
            return right(what, **options)
        name = judge(what, **options)
        state, config = self.pool.state, self.pool.config
        most = config.max_entries
        over = state.ledger.retained > config.retained_pages
        if isinstance(what, Entry) and judge == self._judge_entry:
            over = most is not None and len(state.catalog.entries) > most
        free = state.ledger.free
        self._inside = True
        try:
            pages = right(what, **options)
        finally:
            self._inside = False
        if name is not None:
            self.count += 1
            self._victims.append(Victim(name, pages, free, over))
            self._ranking.offered = None
        return pages

    def _judge_tip(self, entry: Entry, *, cause: str = "evicted") -> str | None:
        if cause != "evicted":
            return None
        self._no_spare_stays()
        self._refuse_protected([entry.tip], f"the tip of {entry!r}")
        offered = self._ranking.offered or []
        self._next(entry, offered, [before for before in offered if before.tip.refs])
        return f"the tip of {entry!r}"

    def _judge_entry(self, entry: Entry, *, cause: str = "evicted") -> str | None:
        state, offered = self.pool.state, self._ranking.offered
        if offered is None or cause != "evicted":  # a caller's wish
            self._refuse_protected(state.catalog.private_checkpoints(entry), f"{entry!r}")
            return None
        # The entry just committed may be passed over once, and goes where no other can: then
        # what a lease reads of it stays without it.
        passed = [e for e in offered if any(m.refs for m in state.catalog.private_checkpoints(e))]
        fresh = [e for e in offered if e.tip.tick == state.tick and not e.pinned]
        if entry not in fresh or any(e not in passed for e in offered if e is not entry):
            self._refuse_protected(state.catalog.private_checkpoints(entry), f"{entry!r}")
        fresh = [e for e in fresh if e not in passed or e is entry][:1]
        last = offered if fresh != [entry] else [*(e for e in offered if e is not entry), entry]
        self._next(entry, last, [*passed, *fresh])
        return f"{entry!r}"

    def _judge_spare(self, mark: Checkpoint) -> str:
        self._refuse_protected([mark], f"superseded {mark!r}")
        before = takewhile(lambda other: other is not mark, self.pool.state.catalog.superseded)
        if not mark.superseded or not all(other.refs for other in before):
            raise IllegalVictim(f"superseded {mark!r} is not the first to go")
        return f"superseded {mark!r}"

    def _judge_thinned(self, mark: Checkpoint) -> str | None:
        if self._ranking.offered is None:
            return None  # replaced, or cleared away
        self._no_spare_stays()
        self._refuse_protected([mark], f"{mark!r}")
        if not all(entry.tip.refs for entry in self.pool.state.catalog.entries.values()):
            raise IllegalVictim(f"{mark!r} went although a tip could go")
        return f"{mark!r}"

    def _next(self, entry: Entry, offered: list[Entry], passed: list[Entry]) -> None:
        if not offered or offered[-1] is not entry:
            raise IllegalVictim(f"{entry!r} goes, which the policy did not offer last")
        if [other for other in offered[:-1] if other not in passed]:
            raise IllegalVictim(f"{entry!r} goes before others that the policy offered first")

    def _no_spare_stays(self) -> None:
        if not all(mark.refs for mark in self.pool.state.catalog.superseded):
            raise IllegalVictim("a superseded checkpoint stays where another goes")

    def _refuse_protected(self, marks: Iterable[Checkpoint], what: str) -> None:
        """By who holds what, not only by the pool's own count."""
        self._leases = [lease for lease in self._leases if not lease.ended]
        held = {id(lease.source) for lease in self._leases}
        for entry in self.pool.state.catalog.entries.values():
            held |= {id(mark) for mark in entry.pinned or ()}
        for mark in marks:
            if mark.refs or id(mark) in held:
                raise IllegalVictim(f"{what} goes although it is pinned or leased (G4)")
