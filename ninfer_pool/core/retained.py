"""How what is retained grows: new sequences, longer ones, and what they make useless.

Internal: `PrefixPool` calls this under its lock. Nothing here knows of requests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ninfer_pool.core import radix as index
from ninfer_pool.core.entry import Checkpoint, Entry, Table
from ninfer_pool.core.holdings import Holdings
from ninfer_pool.core.keys import Attribute
from ninfer_pool.core.namespace import Namespace
from ninfer_pool.core.radix import Hop, Path

GRID_WORTH = 4
"""A point shortly before a prompt's end that spares fewer tokens than this many images hold is
the first to go, like superseded ones: few prompts part just there."""
NEVER_SUPERSEDED = ("system", "junction")


@dataclass(slots=True, kw_only=True)
class Stretch:
    """A sequence to retain: what is known to be held up to ``origin``, and ``view`` beyond."""

    namespace: Namespace
    view: memoryview
    """Token bytes from ``origin`` on."""
    origin: int
    source: Checkpoint | None
    """A checkpoint on the way, at ``origin`` or past it; None: nothing is known."""
    attributes: Sequence[Attribute]
    key: str

    @property
    def total(self) -> int:
        """The position after its last token."""
        return self.origin + len(self.view) // 4


class Retained(Holdings):
    """Everything retained: `Holdings` that grow."""

    def attach(
        self,
        stretch: Stretch,
        *,
        fresh: list[Checkpoint],
        prompt_tokens: int,
        priority: int,
    ) -> tuple[Entry | None, list[Checkpoint]]:
        """Retain ``fresh`` checkpoints (ascending, the last at the end of ``stretch``, one table).

        Returns the entry whose tip that end is, or None where a longer entry goes on from it;
        and the checkpoints that stand for ``fresh`` now, older ones of the same computation
        among them. The caller makes room afterwards. O(bytes past the origin) at the speed of
        memcmp, and one hash pass.
        """
        self.version += 1
        hops = self._follow(stretch)
        entry = self._lift_grown(hops, stretch.total)
        fresh, replaced, older = self._settle_twins(hops, fresh)
        if entry is not None and fresh:
            source = stretch.source
            whole = source if source and source.position == stretch.origin else None
            _share_table(hops, fresh, self.config.page_tokens, source=whole)
        hops = index.insert(hops, stretch.view, stretch.attributes, origin=stretch.origin)
        self._place(hops, fresh)
        entry = self._set_tip(hops, entry, stretch.namespace, prompt_tokens)
        for mark in replaced:
            self.unlink(mark)
        useless = self._supersede(hops, fresh, grown=entry)
        if entry is not None:
            self._rename(entry, stretch.key)
            self._set_priority(entry, priority)
            self.repin(entry)
            self.emit("stored", entry)
            if useless:
                self.emit("superseded", entry)
        return entry, fresh + older

    def _follow(self, stretch: Stretch) -> list[Hop]:
        root = self.roots.get(stretch.namespace)
        if root is None:
            root = Path(parent=None, start=0, label=bytearray(), attributes=[])
            self.roots[stretch.namespace] = root
        known: list[Hop] = []
        if stretch.source is not None and stretch.source.path is not None:
            known, root = index.hops_to(stretch.source.path, stretch.origin)
        view, attributes = stretch.view, stretch.attributes
        return index.walk(root, view, attributes, origin=stretch.origin, known=known)

    def _lift_grown(self, hops: list[Hop], total: int) -> Entry | None:
        """Return the entry that the sequence of ``hops`` continues, taken off its tip.

        Either its tip lies on the way, or the way parts inside its generated tail that nobody
        has consumed; that tail then becomes superseded.
        """
        for path, upto in hops:
            entry = path.tip
            if entry is not None and entry.tip.position <= upto:
                self._untip(entry)
                return entry
        path, upto = hops[-1]
        entry = path.tip
        if entry is None or upto == total or not self._unconsumed_tail(entry, path, upto):
            return None
        tail = index.split_tail(path, upto)
        self.emit("superseded", entry)
        self._untip(entry)
        tables: dict[Table, Table] = {}
        for mark in list(tail.marks):  # of one computation or of several: see `_share_table`
            mark.table = tables.setdefault(mark.table, mark.table.again())
            self.set_spare(mark, gap=0)
        return entry

    def _unconsumed_tail(self, entry: Entry, path: Path, upto: int) -> bool:
        if entry.prompt_tokens > upto or path.goes_on(upto + 1):
            return False
        pinned = set(entry.pinned or ())
        first = bisect_left(path.positions, upto + 1)
        return not any(mark.uses or mark.guards > (mark in pinned) for mark in path.marks[first:])

    def _settle_twins(
        self, hops: list[Hop], fresh: list[Checkpoint]
    ) -> tuple[list[Checkpoint], list[Checkpoint], list[Checkpoint]]:
        """Return the fresh checkpoints to add, the old ones that they replace, and the old ones
        that stay instead of fresh ones.

        At one position an exact one serves whom another serves; of two that are not exact the
        newer one stays, since what follows shares its pages. Exact ones of the same cuts are the
        same computation: the older one stays and its whole pages are taken over (interning).
        """
        kept, replaced, older = [], [], []
        for mark in fresh:
            twins = [twin for twin in _marks_at(hops, mark.position) if self._alike(mark, twin)]
            same = [twin for twin in twins if mark.cuts is not None and twin.cuts == mark.cuts]
            plain = [twin for twin in twins if twin.cuts is None]
            if same:
                self._intern(mark, same[0])
                older.append(same[0])
                same[0].tick = self.tick
            elif mark.cuts is not None or not any(t.cuts is not None or t.guards for t in twins):
                kept.append(mark)
                replaced += [twin for twin in plain if not twin.guards]
            else:
                older.append(twins[-1])
        for mark in kept:  # one below an interned page is partly filled with its rows
            if mark.tail >= 0:
                mark.tail = int(mark.table.ids[mark.position // self.config.page_tokens])
        return kept, replaced, older

    def _alike(self, mark: Checkpoint, twin: Checkpoint) -> bool:
        return self.config.affinity == "prefer" or mark.lane == twin.lane

    def _intern(self, mark: Checkpoint, twin: Checkpoint) -> None:
        whole = mark.position // self.config.page_tokens
        mine, theirs = mark.table.ids[:whole], twin.table.ids[:whole]
        self.counters.interned_pages += int(np.count_nonzero(mine != theirs))
        mine[:] = theirs

    def _place(self, hops: list[Hop], fresh: list[Checkpoint]) -> None:
        rest = fresh
        for path, upto in hops:
            here = [mark for mark in rest if mark.position <= upto]
            rest = rest[len(here) :]
            if here and rest:  # a table is of one path: see `_share_table`
                table = here[0].table.again()
                for mark in here:
                    mark.table = table
            if here:
                index.add_marks(path, here)
        worth = GRID_WORTH * self.config.image_pages * self.config.page_tokens
        for mark in fresh:
            mark.tick = self.tick
            self.ledger.hold(self.units_of(mark))
            if mark.kind == "grid" and mark is not fresh[-1] and self.gap(mark) < worth:
                self.spares.add(mark, gap=self.gap(mark), serial=next(self._serials))
        self.checkpoints += len(fresh)

    def _set_tip(
        self, hops: list[Hop], entry: Entry | None, namespace: Namespace, prompt_tokens: int
    ) -> Entry | None:
        path, total = hops[-1]
        tip = path.marks[bisect_left(path.positions, total + 1) - 1]
        if path.tip is not None or path.goes_on(total):
            assert entry is None, "an entry that was a prefix of another"
            return None
        self.spares.discard(tip)
        grown = entry is not None
        if entry is None:
            identity = next(self._serials)
            entry = Entry(
                identity=identity, namespace=namespace, tip=tip, tick=self.tick, lane=tip.lane
            )
            self.entries[identity] = entry
        entry.tip = tip
        entry.lane = tip.lane
        entry.prompt_tokens = min(prompt_tokens, total)
        path.tip = entry
        path.count_entries(1)
        self._measure(entry)
        if grown:
            entry.consume(self.tick)
            self.ranking.used(entry, self.tick)
        else:
            self.ranking.added(entry, self.tick)
        return entry

    def _set_priority(self, entry: Entry, priority: int) -> None:
        """The latest request's priority counts; a request tells that it is not over."""
        if entry.priority != priority or entry.released:
            self.ranking.removed(entry)
            entry.priority, entry.released = priority, False
            self.ranking.added(entry, self.tick)

    def _supersede(self, hops: list[Hop], fresh: list[Checkpoint], *, grown: Entry | None) -> bool:
        """Mark what the newest checkpoints made useless on their own way; say if anything."""
        path, total = hops[-1]
        before = self.counters.superseded
        if path.tip is None:
            return False
        tip = path.tip
        base = tip.tip.position - tip.saved if tip is grown else self.base(tip)
        new = {*fresh, path.tip.tip}
        for mark in index.marks_upto(hops, total):
            if mark in new:
                continue
            if mark.position <= base or mark.spare:
                break
            if mark.kind not in NEVER_SUPERSEDED and not mark.guards:
                self.set_spare(mark, gap=self.gap(mark))
        return self.counters.superseded > before

    def revive(self, mark: Checkpoint, namespace: Namespace, key: str) -> Entry | None:
        """A superseded checkpoint was consumed: where no entry goes on from it, it is one again.

        Returns that entry; the caller makes room for it.
        """
        self.version += 1
        self.spares.discard(mark)
        above, path = index.hops_to(mark.where, mark.position)
        if path.goes_on(mark.position) or (path.tip and path.tip.tip.position >= mark.position):
            return None
        hops = [*above, (path, mark.position)]
        entry = self._lift_grown(hops, mark.position)
        entry = self._set_tip(hops, entry, namespace, mark.position)
        assert entry is not None
        self._rename(entry, key)
        self.repin(entry)
        self.emit("stored", entry)
        return entry


def _share_table(
    hops: list[Hop], fresh: list[Checkpoint], page_tokens: int, *, source: Checkpoint | None
) -> None:
    """Let the growing entry's checkpoints and the fresh ones use one table of pages.

    Only where the fresh ones lie past all others on their way and go on from the same pages, as
    those resumed at the last of them, ``source``, do; then bookkeeping stays linear however many
    turns a conversation has.
    """
    path, upto = hops[-1]
    before = path.marks[-1] if path.marks else None
    if upto < path.end or before is None or before.position >= fresh[0].position:
        return  # what lies past the parting may use the table, too
    whole = before.position // page_tokens
    ids = fresh[0].table.ids
    if before is source or np.array_equal(before.table.ids[:whole], ids[:whole]):
        before.table.grow(fresh[0].table, at=whole * page_tokens)
        for mark in fresh:
            mark.table = before.table


def _marks_at(hops: list[Hop], position: int) -> list[Checkpoint]:
    for path, upto in hops:
        if position <= upto:
            first = bisect_left(path.positions, position)
            return path.marks[first : bisect_left(path.positions, position + 1)]
    return []
