"""All that is retained, and how it changes: growth, supersession, shortening, removal.

Internal: `PrefixPool` calls this under its lock. Nothing here knows of requests.
"""

from __future__ import annotations

import itertools
import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ninfer_pool import index, keys
from ninfer_pool.config import PoolConfig
from ninfer_pool.entry import Checkpoint, Entry, Table
from ninfer_pool.ghosts import Ghosts
from ninfer_pool.index import Hop, Path
from ninfer_pool.keys import Attribute
from ninfer_pool.namespace import Namespace
from ninfer_pool.pages import PageLedger, Pages
from ninfer_pool.policy.ranking import Ranking
from ninfer_pool.results import Counters, Event
from ninfer_pool.spares import Spares

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


class Retained:
    """The index, the ledger of pages, the entries and the order in which they may go."""

    def __init__(self, config: PoolConfig) -> None:
        self.config = config
        self.ledger = PageLedger(config.num_pages)
        self.roots: dict[Namespace, Path] = {}
        self.entries: dict[int, Entry] = {}
        self.keys: dict[str, dict[int, Entry]] = {}
        self.ranking = Ranking(config.make_policy)
        self.spares = Spares()
        self.ghosts = Ghosts(config.ghosts)
        self.counters = Counters()
        self.events: deque[Event] = deque(maxlen=config.events)
        self.tick = 0
        """Commits so far: the pool's only clock."""
        self.checkpoints = 0
        self._serials = itertools.count()
        self._numbers = itertools.count()
        self._digests: dict[Namespace, bytes] = {}

    # -- finding ---------------------------------------------------------------------------

    def walk(
        self, namespace: Namespace, view: memoryview, attributes: Sequence[Attribute]
    ) -> list[Hop]:
        """Return how far ``view`` follows what is retained under ``namespace``."""
        root = self.roots.get(namespace)
        return [] if root is None else index.walk(root, view, attributes)

    def key(
        self, namespace: Namespace, tokens: Sequence[keys.Bytes], attributes: Sequence[Attribute]
    ) -> str:
        """Return the key of a sequence, given in parts. One hash pass."""
        digest = self._digests.get(namespace)
        if digest is None:
            config = self.config
            digest = namespace.digest(grid=config.grid, min_chunk=config.min_chunk)
            self._digests[namespace] = digest
        return keys.sequence_key(digest, tokens, attributes)

    def pages_of(self, mark: Checkpoint) -> Pages:
        """Return the ids of all pages of a checkpoint."""
        return mark.pages(self.ledger, self.config.page_tokens)

    # -- protection (G4) -------------------------------------------------------------------

    def guard(self, mark: Checkpoint) -> None:
        """Protect a checkpoint: it is pinned or being resumed from."""
        mark.guards += 1
        if mark.guards == 1:
            self.ledger.keep(self.pages_of(mark))

    def unguard(self, mark: Checkpoint, pages: Pages | None = None) -> None:
        """Take one protection off; ``pages`` are those of the checkpoint, where known."""
        mark.guards -= 1
        if mark.guards == 0:
            self.ledger.unkeep(self.pages_of(mark) if pages is None else pages)

    def unpin(self, entry: Entry) -> None:
        """Take an entry's pin off."""
        for mark in entry.pinned or ():
            self.unguard(mark)
        entry.pinned = None

    def revive(self, mark: Checkpoint) -> None:
        """A superseded tail was consumed: it is an entry again, if nothing goes on from it."""
        self.spares.discard(mark)

    # -- growth ----------------------------------------------------------------------------

    def attach(
        self,
        stretch: Stretch,
        *,
        fresh: list[Checkpoint],
        prompt_tokens: int,
        priority: int,
    ) -> Entry | None:
        """Retain ``fresh`` checkpoints (ascending, the last at the end of ``stretch``, one table).

        Returns the entry whose tip that end is, or None where a longer entry goes on from it.
        The caller makes room afterwards. O(bytes past the origin) at the speed of memcmp, and
        one hash pass.
        """
        hops = self._follow(stretch)
        entry = self._lift_grown(hops, stretch.total)
        fresh, replaced = self._settle_twins(hops, fresh)
        if entry is not None and fresh:
            _share_table(hops, fresh, self.config.page_tokens)
        hops = index.insert(hops, stretch.view, stretch.attributes, origin=stretch.origin)
        self._place(hops, fresh)
        entry = self._set_tip(hops, entry, stretch.namespace, prompt_tokens)
        for mark in replaced:
            self.unlink(mark)
        self._supersede(hops, fresh)
        if entry is not None:
            self._rename(entry, stretch.key)
            self._set_priority(entry, priority)
            self._repin(entry)
            self.emit("stored", entry)
        return entry

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
        self._untip(entry)
        table = Table(tail.marks[-1].table.ids)
        for mark in list(tail.marks):
            mark.table = table
            self._set_spare(mark, gap=0)
        return entry

    def _unconsumed_tail(self, entry: Entry, path: Path, upto: int) -> bool:
        if entry.prompt_tokens > upto or path.goes_on(upto + 1):
            return False
        pinned = set(entry.pinned or ())
        first = bisect_left(path.positions, upto + 1)
        return not any(
            mark.uses or mark.guards > (mark in pinned) for mark in path.marks[first:]
        )

    def _untip(self, entry: Entry) -> None:
        path = entry.tip.path
        path.tip = None
        path.count_entries(-1)

    def _settle_twins(
        self, hops: list[Hop], fresh: list[Checkpoint]
    ) -> tuple[list[Checkpoint], list[Checkpoint]]:
        """Return the fresh checkpoints to add and the old ones that they replace.

        At one position an exact one serves whom another serves; of two that are not exact the
        newer one stays, since what follows shares its pages. Exact ones of the same cuts are the
        same computation: the older one stays and its whole pages are taken over (interning).
        """
        kept, replaced = [], []
        for mark in fresh:
            twins = [twin for twin in _marks_at(hops, mark.position) if self._alike(mark, twin)]
            same = [twin for twin in twins if mark.cuts is not None and twin.cuts == mark.cuts]
            plain = [twin for twin in twins if twin.cuts is None]
            if same:
                self._intern(mark, same[0])
            elif mark.cuts is not None or not any(t.cuts is not None or t.guards for t in twins):
                kept.append(mark)
                replaced += [twin for twin in plain if not twin.guards]
        return kept, replaced

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
            if here:
                index.add_marks(path, here)
        for mark in fresh:
            mark.tick = self.tick
            self.ledger.hold(self.pages_of(mark))
        self.checkpoints += len(fresh)

    def _set_tip(
        self, hops: list[Hop], entry: Entry | None, namespace: Namespace, prompt_tokens: int
    ) -> Entry | None:
        path, total = hops[-1]
        tip = path.marks[bisect_left(path.positions, total + 1) - 1]
        if path.tip is not None or path.goes_on(total):
            if entry is not None:
                self._forget(entry)
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

    def _repin(self, entry: Entry) -> None:
        """A pinned entry that grew is pinned at its new tip; an inherited pin moves on."""
        if entry.pinned is not None and entry.tip not in entry.pinned:
            if entry.inherited is not None:
                entry.pinned.remove(entry.inherited)
                self.unguard(entry.inherited)
            entry.inherited = entry.tip
            entry.pinned.append(entry.tip)
            self.guard(entry.tip)

    def note_peaks(self) -> None:
        """Keep the highest retained pages, as they stand between operations."""
        self.counters.peak_retained_pages = max(
            self.counters.peak_retained_pages, self.ledger.retained
        )

    def clear_spares(self) -> None:
        """Remove every superseded checkpoint that nothing protects."""
        for mark in [mark for mark in self.spares if not mark.guards]:
            self.unlink(mark)
        for namespace in list(self.roots):
            self.sweep(namespace)

    def _supersede(self, hops: list[Hop], fresh: list[Checkpoint]) -> None:
        """Mark what the newest checkpoints made useless on their own way (G8: only a mark)."""
        path, total = hops[-1]
        if path.tip is None:
            return
        base = self.base(path.tip)
        new = {*fresh, path.tip.tip}
        for mark in index.marks_upto(hops, total):
            if mark.position <= base or mark.spare:
                break
            if mark in new:
                continue
            if mark.kind not in NEVER_SUPERSEDED and not mark.guards:
                self._set_spare(mark, gap=self._gap(mark))

    def _set_spare(self, mark: Checkpoint, *, gap: int) -> None:
        if not mark.spare:
            self.spares.add(mark, gap=gap, serial=next(self._serials))
            self.counters.superseded += 1

    def _gap(self, mark: Checkpoint) -> int:
        before = index.previous_mark(mark)
        return mark.position - (before.position if before is not None else 0)

    # -- what policies look at -------------------------------------------------------------

    def base(self, entry: Entry) -> int:
        """Return the position up to which other entries share its path; 0 for none. O(depth)."""
        path: Path | None = entry.tip.path
        upto = entry.tip.position
        below: Path | None = None
        while path is not None:
            shared = [min(start, upto) for start in path.live]
            if below is not None and path.live[upto] == below.entries:
                shared.remove(upto)
            if below is not None and path.tip is not None:
                shared.append(upto)
            if shared:
                return max(shared)
            below, upto, path = path, path.start, path.parent
        return 0

    def private_marks(self, entry: Entry) -> Iterator[Checkpoint]:
        """Yield the checkpoints that only this entry holds, deepest first."""
        base = self.base(entry)
        mark: Checkpoint | None = entry.tip
        while mark is not None and mark.position > base:
            yield mark
            mark = index.previous_mark(mark)

    def _measure(self, entry: Entry) -> None:
        base = self.base(entry)
        size = self.config.page_tokens
        entry.saved = entry.tip.position - base
        pages = -(-entry.tip.position // size) - base // size + self.config.image_pages
        entry.bytes = pages * self.config.page_bytes

    # -- removal ---------------------------------------------------------------------------

    def unlink(self, mark: Checkpoint) -> int:
        """Take a checkpoint that is no tip out; return how many pages are retained no more."""
        path = mark.path
        self.spares.discard(mark)
        after = bisect_left(path.positions, mark.position + 1)
        follower = path.marks[after] if after < len(path.marks) else None
        index.remove_mark(mark)
        mark.path = None
        freed = self.ledger.drop(self.pages_of(mark))
        self.checkpoints -= 1
        if follower is not None and follower.spare:
            self.spares.widen(follower, gap=self._gap(follower))
        index.prune(path)
        return freed

    def shorten(self, entry: Entry, *, cause: str = "evicted") -> int:
        """Take an entry's tip; it ends at its next private checkpoint, or is gone.

        Returns pages that are retained no more. O(pages of the tip), one hash pass.
        """
        tip = entry.tip
        path = tip.path
        base = self.base(entry)
        before = index.previous_mark(tip)
        stays = before is not None and before.position > base
        raw = index.sequence(path, tip.position)
        attributes = index.attributes(path, tip.position)
        self.ghosts.add(entry.namespace, raw, cause=cause, tick=self.tick)
        self._untip(entry)
        floor = before.position if stays and before is not None else base
        freed = self._drop_dead(path, tip, floor)
        freed += self.unlink(tip)
        if not stays or before is None:
            self._forget(entry)
            return freed
        self.spares.discard(before)
        entry.tip = before
        entry.prompt_tokens = min(entry.prompt_tokens, before.position)
        before.path.tip = entry
        before.path.count_entries(1)
        self._measure(entry)
        cut = [item for item in attributes if item[0] < before.position]
        self._rename(entry, self.key(entry.namespace, [raw[: 4 * before.position]], cut))
        self.ranking.shortened(entry, self.tick)
        return freed

    def _drop_dead(self, path: Path, tip: Checkpoint, floor: int) -> int:
        """Remove superseded tails that hang below what is about to go."""
        dead = [mark for mark in path.marks if mark.position > tip.position]
        above: Path | None = path
        while above is not None:
            for child in above.forks_after(floor):
                if not child.entries:
                    dead += [mark for sub in child.subtree() for mark in sub.marks]
            if above.start <= floor:
                break
            above = above.parent
        return sum(self.unlink(mark) for mark in dead if not mark.guards)

    def drop(self, entry: Entry, *, cause: str = "evicted") -> int:
        """Remove an entry whole, with all that only it holds; return pages retained no more."""
        freed = 0
        while entry.identity in self.entries:
            freed += self.shorten(entry, cause=cause)
        return freed

    def remove(self, mark: Checkpoint, *, cause: str) -> None:
        """Remove one checkpoint wherever it stands, guarded or not (quarantine, expiry)."""
        for entry in self.entries.values():
            if entry.pinned and mark in entry.pinned:
                entry.pinned.remove(mark)
                self.unguard(mark)
        holder = mark.path.tip
        if holder is not None and holder.tip is mark:
            self.shorten(holder, cause=cause)
            return
        raw = index.sequence(mark.path, mark.position)
        self.ghosts.add(self._namespace(mark.path), raw, cause=cause, tick=self.tick)
        self.unlink(mark)

    def _namespace(self, path: Path) -> Namespace:
        while path.parent is not None:
            path = path.parent
        return next(space for space, root in self.roots.items() if root is path)

    def _forget(self, entry: Entry) -> None:
        self.unpin(entry)
        self.ranking.removed(entry)
        del self.entries[entry.identity]
        self._rename(entry, "")

    def sweep(self, namespace: Namespace) -> None:
        """Forget a namespace under which nothing is left."""
        root = self.roots.get(namespace)
        if root is not None and not root.label and not root.forks:
            del self.roots[namespace]
            self._digests.pop(namespace, None)

    def _rename(self, entry: Entry, key: str) -> None:
        if entry.key:
            named = self.keys[entry.key]
            del named[entry.identity]
            if not named:
                del self.keys[entry.key]
        entry.key = key
        if key:
            self.keys.setdefault(key, {})[entry.identity] = entry

    # -- events ----------------------------------------------------------------------------

    def emit(self, kind: str, entry: Entry, *, key: str | None = None, freed: int = 0) -> None:
        """Note an event; the oldest is forgotten when the buffer is full (G8)."""
        if self.config.events:
            tip, path = entry.tip, entry.tip.path
            positions = () if path is None else index.positions_to(path, tip.position)
            self.events.append(
                Event(
                    number=next(self._numbers),
                    kind=kind,
                    key=entry.key if key is None else key,
                    positions=positions,
                    bytes=freed * self.config.page_bytes,
                )
            )

    def path_marks(self, entry: Entry) -> Iterator[Checkpoint]:
        """Yield every checkpoint on an entry's path, deepest first; none for a gone entry."""
        mark = entry.tip if entry.identity in self.entries else None
        while mark is not None:
            yield mark
            mark = index.previous_mark(mark)


def _share_table(hops: list[Hop], fresh: list[Checkpoint], page_tokens: int) -> None:
    """Let the growing entry's checkpoints and the fresh ones use one table of pages.

    Only where the fresh ones lie past all others on their way and go on from the same pages;
    then bookkeeping stays linear however many turns a conversation has.
    """
    before = next(index.marks_upto(hops, sys.maxsize), None)
    if before is None or before.position >= fresh[0].position:
        return
    whole = before.position // page_tokens
    ids = fresh[0].table.ids
    if np.array_equal(before.table.ids[:whole], ids[:whole]):
        before.table.ids = ids
        for mark in fresh:
            mark.table = before.table


def _marks_at(hops: list[Hop], position: int) -> list[Checkpoint]:
    for path, upto in hops:
        if position <= upto:
            first = bisect_left(path.positions, position)
            return path.marks[first : bisect_left(path.positions, position + 1)]
    return []
