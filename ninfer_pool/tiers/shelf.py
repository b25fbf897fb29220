"""A tier below the device: whole entries, an index over them, and the order in which they go.

Internal: `Tiers` calls this under the pool's lock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any

from ninfer_pool.core import radix
from ninfer_pool.core.config import PoolConfig
from ninfer_pool.core.entry import Entry, Node
from ninfer_pool.core.identity import Attribute, Namespace
from ninfer_pool.core.insertion import NEVER_SUPERSEDED
from ninfer_pool.core.policy.priority import VictimOrder
from ninfer_pool.core.radix import Step
from ninfer_pool.tiers.medium import Medium, Traffic
from ninfer_pool.tiers.parts import (
    Draft,
    DraftMark,
    Kept,
    Part,
    Record,
    Run,
    Stored,
    all_parts,
    draft_mark_of,
    draft_of_entry,
    one_each,
    without_spares,
)
from ninfer_pool.tiers.rates import Rates

SLACK = 64
"""Deadlines of records that have gone, beyond as many as there are records."""


class Shelf:
    """One tier's entries.

    A record goes whole. Pieces that several records share are counted, and stay until the last
    of them has gone.
    """

    def __init__(
        self,
        name: str,
        medium: Medium,
        *,
        config: PoolConfig,
        rates: Rates,
        keeps_spares: bool,
    ) -> None:
        self.name = name
        self.medium = medium
        self.config = config
        self.keeps_spares = keeps_spares
        self.roots: dict[Namespace, Node] = {}
        self.records: dict[int, Record] = {}
        self.keys: dict[str, dict[int, Record]] = {}
        self.owners: dict[Stored, list[Record]] = {}
        self.places: dict[Part, Any] = {}
        self.users: dict[Part, int] = {}
        self.spares: dict[Kept, None] = {}
        self.ranking = VictimOrder(config.make_policy)
        self.on_evict: Callable[[Record], None] = lambda record: None
        """Told before a record goes for room."""
        self.on_change: Callable[[], None] = lambda: None
        """Told when what can be found here has changed."""
        self.traffic = Traffic()
        self.reading: list[Record] = []
        """Records that are being read: they stay meanwhile."""
        self.reserved = 0
        """Bytes that what is being stored still needs."""
        self.latest: int | None = None
        """While all is written out: nothing goes for room that was used then or later."""
        self.rates = rates
        self._deadlines: list[tuple[float, int, Record]] = []
        self._serial = 0

    # -- finding ---------------------------------------------------------------------------

    def walk(
        self, namespace: Namespace, view: memoryview, attributes: Sequence[Attribute]
    ) -> list[Step]:
        """Return how far ``view`` follows what lies here under ``namespace``."""
        root = self.roots.get(namespace)
        return [] if root is None else radix.walk(root, view, attributes)

    def cheaper_than_prefill(self, position: int, *, above: int) -> bool:
        """Say whether restoring up to ``position`` is quicker than prefilling from ``above``."""
        config = self.config
        size = (-(-position // config.page_tokens) + config.image_pages) * config.page_bytes
        return self.rates.pays(self.name, size, position - above)

    def holds(self, stored: object) -> bool:
        """Say whether a checkpoint is part of a record here."""
        return stored in self.owners

    def missing(self, parts: Iterable[Part]) -> list[Part]:
        """Return those parts that do not lie here."""
        return [part for part in parts if part not in self.places]

    @property
    def checkpoints(self) -> int:
        """Checkpoints of all records, those that are shared counted once."""
        return len(self.owners)

    # -- what lies here --------------------------------------------------------------------

    def hold(self, parts: Iterable[Part]) -> None:
        """Count one more user of each part: it is being read, written, or in a record."""
        for part in parts:
            self.users[part] = self.users.get(part, 0) + 1

    def drop(self, parts: Iterable[Part]) -> None:
        """Count one user less; what has none is given back."""
        for part in parts:
            self.users[part] -= 1
            if not self.users[part]:
                del self.users[part]
                if part in self.places:
                    self.medium.free(self.places.pop(part))

    def could_hold(self, draft: Draft, *, sparing: Iterable[Record] = ()) -> bool:
        """Say whether an entry fits beside those spared, whatever else goes. O(their parts)."""
        firm = draft.parts()
        for record in {*sparing, *self.reading}:
            sheds = self.keeps_spares
            firm.update(all_parts(k.stored for k in record.marks if not (k.superseded and sheds)))
        for record in self.records.values():
            if record.pinned:
                firm.update(record.parts)
        size = sum(map(self.medium.size, firm)) + self.medium.overhead(draft)
        return size + self.reserved <= self.medium.budget

    def make_room(
        self,
        size: int,
        *,
        tick: int,
        sparing: Iterable[Record] = (),
        keep: Container[Stored] = (),
    ) -> bool:
        """Let records go until ``size`` more bytes fit; False where they never will.

        Records in ``sparing`` stay, but for superseded checkpoints of theirs not in ``keep``.
        """
        medium, spared = self.medium, set(sparing)
        size += self.reserved
        medium.reclaim(size)
        while medium.used + size > medium.budget:
            spares = self.spares if self.keeps_spares else ()
            spare = next((k for k in spares if k.stored not in keep), None)
            if spare is not None:
                self._shed(spare)
                continue
            record = next((r for r in self.order(tick) if r not in spared), None)
            if record is None:
                return False
            self.on_evict(record)
            if self.records.get(record.entry.identity) is record:
                self.remove(record)
        return True

    def expire(self, now: float) -> None:
        """Remove the records whose checkpoints' time is over for all of them. O(those)."""
        busy = []
        while self._deadlines and self._deadlines[0][0] <= now:
            item = heappop(self._deadlines)
            record = item[-1]
            if record in self.reading:
                busy.append(item)
            elif self.records.get(record.entry.identity) is record:
                self.remove(record)
        for item in busy:
            heappush(self._deadlines, item)

    def order(self, tick: int) -> Iterator[Record]:
        """Yield the records that may go, the first victim first."""
        for entry in self.ranking.victims(tick):
            record = self.records[entry.identity]
            late = self.latest is not None and record.tip.tick >= self.latest
            if not record.pinned and not late and record not in self.reading:
                yield record

    def _shed(self, kept: Kept) -> None:
        """Take a superseded checkpoint out of its record."""
        record = kept.record
        self._unlink(kept)
        record.marks.remove(kept)
        left = all_parts(mark.stored for mark in record.marks)
        gone = [part for part in record.parts if part not in left]
        record.parts = left
        self.drop(gone)

    # -- storing ---------------------------------------------------------------------------

    def plan(self, draft: Draft) -> list[Record]:
        """Complete a draft by checkpoints that lie here already; return what it replaces.

        Replaced is what the draft's sequence continues, and what it parts from inside a
        generated tail that nobody has consumed: of the same conversation one record stays.
        """
        view = memoryview(draft.tokens)
        hops = self.walk(draft.namespace, view, draft.attributes)
        if not hops:
            draft.marks = self._kept(draft.marks)
            return []
        old = [
            kept.record
            for kept in radix.checkpoints_upto(hops, len(view) // 4)
            if kept.record.tip is kept  # type: ignore[attr-defined]
        ] + list(unconsumed(*hops[-1]))
        mine = {mark.stored for mark in draft.marks}
        upto = hops[-1][1]
        carried: dict[Stored, DraftMark] = {}
        for record in old:
            for kept in record.marks:
                stays = kept.kind in NEVER_SUPERSEDED
                if kept.position <= upto and kept.stored not in mine:
                    spare = kept.superseded or not stays
                    carried[kept.stored] = draft_mark_of(kept, spare=spare)
        marks = [*carried.values(), *draft.marks]
        draft.marks = self._kept(sorted(marks, key=lambda mark: mark.position))
        busy = self.reading
        return [each for each in dict.fromkeys(old) if not each.pinned and each not in busy]

    def _kept(self, marks: list[DraftMark]) -> list[DraftMark]:
        return marks if self.keeps_spares else one_each(without_spares(marks))

    def add(self, draft: Draft, *, name: str | None = None, tick: int) -> Record:
        """Offer a whole entry; every part of it lies here."""
        view = memoryview(draft.tokens)
        root = self.roots.get(draft.namespace)
        if root is None:
            root = Node(parent=None, start=0, tokens=bytearray(), attributes=[])
            self.roots[draft.namespace] = root
        record = Record()
        record.name = name
        record.attributes = draft.attributes
        record.marks = [Kept(mark, record) for mark in draft.marks]
        record.parts = draft.parts()
        hops = radix.insert(radix.walk(root, view, draft.attributes), view, draft.attributes)
        rest = record.marks
        for path, upto in hops:
            here = [kept for kept in rest if kept.position <= upto]
            rest = rest[len(here) :]
            if here:
                radix.add_checkpoints(path, here)
        self.on_change()
        self.hold(record.parts)
        for kept, mark in zip(record.marks, draft.marks, strict=True):
            self.owners.setdefault(kept.stored, []).append(record)
            kept.superseded = mark.superseded and kept is not record.tip
            if kept.superseded:
                self.spares[kept] = None
        self._enter(record, draft, tick)
        return record

    def _enter(self, record: Record, draft: Draft, tick: int) -> None:
        self._serial += 1
        tip = record.tip
        entry = Entry(
            identity=self._serial, namespace=draft.namespace, tip=tip, tick=tick, lane=tip.lane
        )
        entry.key = draft.key
        entry.prompt_tokens = draft.prompt_tokens
        entry.created, entry.used = draft.created, draft.used
        entry.hits, entry.gap = draft.hits, draft.gap
        entry.priority, entry.released = draft.priority, draft.released
        alone = [part for part in record.parts if self.users[part] == 1]
        entry.bytes = entry.gain_bytes = max(1, sum(self.medium.size(part) for part in alone))
        begin = min((run.begin for run in alone if isinstance(run, Run)), default=tip.position)
        entry.saved = entry.gain = tip.position - begin
        record.entry = entry
        self.records[entry.identity] = record
        last = max(inf if kept.expires is None else kept.expires for kept in record.marks)
        if last < inf:
            heappush(self._deadlines, (last, entry.identity, record))
        if len(self._deadlines) > 2 * len(self.records) + SLACK:  # most are of what has gone
            self._deadlines = [each for each in self._deadlines if each[1] in self.records]
            heapify(self._deadlines)
        self.keys.setdefault(entry.key, {})[entry.identity] = record
        self.ranking.on_insert(entry, tick)

    def remove(self, record: Record) -> None:
        """Take a record out, and from the medium for good."""
        entry = record.entry
        del self.records[entry.identity]
        named = self.keys[entry.key]
        del named[entry.identity]
        if not named:
            del self.keys[entry.key]
        self.ranking.on_remove(entry)
        if record.name is not None:
            self.medium.remove(record.name)
        for kept in record.marks:
            self._unlink(kept)
        self.drop(record.parts)

    def _unlink(self, kept: Kept) -> None:
        self.on_change()
        self.spares.pop(kept, None)
        owners = self.owners[kept.stored]
        owners.remove(kept.record)
        if not owners:
            del self.owners[kept.stored]
        path = kept.anchor
        radix.remove_checkpoint(kept)
        kept.node = None
        radix.prune(path)
        namespace = kept.record.entry.namespace
        root = self.roots[namespace]
        if not root.tokens and not root.children:
            del self.roots[namespace]

    # -- recency ---------------------------------------------------------------------------

    def consumed(self, kept: Kept, *, tick: int) -> None:
        """A request resumed here."""
        kept.uses += 1
        kept.tick = tick
        self.spares.pop(kept, None)
        kept.superseded = False
        record = kept.record
        if record.tip is kept and record.entry.identity in self.records:
            record.entry.consume(tick)
            self.ranking.on_hit(record.entry, tick)

    def seen(self, stored: Stored, *, tick: int) -> None:
        """The same checkpoint, last used at ``tick``, has just gone from the tier above."""
        record = self.owners[stored][-1]
        if record.tip.tick < tick:
            record.tip.tick = tick
            record.entry.used = max(record.entry.used, tick)
            self.ranking.on_truncate(record.entry, tick)

    def release(self, record: Record, *, tick: int) -> None:
        """Let a record go before others."""
        if not record.entry.released:
            self.ranking.on_remove(record.entry)
            record.entry.released = True
            self.ranking.on_insert(record.entry, tick)

    def sequence(self, record: Record) -> bytes:
        """Return a record's token bytes, int32."""
        return radix.tokens_to(record.tip.anchor, record.tip.position)

    def draft(self, record: Record, *, spares: bool) -> Draft:
        """Return a record as one that another tier may store."""
        marks = record.marks if spares else without_spares(record.marks)
        tokens = self.sequence(record)
        return draft_of_entry(record.entry, marks, tokens=tokens, attributes=record.attributes)

    def check(self) -> None:
        """Recount everything; AssertionError names what is off. O(everything here)."""
        users: dict[Part, int] = {}
        for record in self.records.values():
            assert record.parts == all_parts(kept.stored for kept in record.marks), "parts stale"
            for part in record.parts:
                assert part in self.places, f"{self.name}: a record lacks a part"
                users[part] = users.get(part, 0) + 1
            for kept in record.marks:
                assert record in self.owners[kept.stored], "a checkpoint that nobody owns"
                assert kept in kept.anchor.checkpoints, "a checkpoint that is not indexed"
        assert users == self.users, f"{self.name}: parts miscounted"
        assert set(self.places) == set(users), f"{self.name}: a part that nobody uses"
        assert self.medium.used <= self.medium.budget, f"{self.name}: over its budget (G9)"


def unconsumed(node: Node, upto: int) -> Iterator[Record]:
    """Yield the records whose sequence goes on past ``upto`` on ``node``, unused since made."""
    for kept in node.checkpoints[bisect_left(node.positions, upto + 1) :]:
        record: Record = kept.record  # type: ignore[attr-defined]
        fresh = not any(mark.uses for mark in record.marks if mark.position > upto)
        if record.tip is kept and record.entry.prompt_tokens <= upto and fresh:
            yield record
