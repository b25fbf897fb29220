"""What is retained, and how it goes: protection, shortening, removal, and what is told of it.

Internal: `PrefixPool` calls this under its lock. Nothing here knows of requests.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from ninfer_pool.core import keys, ways
from ninfer_pool.core import radix as index
from ninfer_pool.core.config import PoolConfig
from ninfer_pool.core.entry import Checkpoint, Entry
from ninfer_pool.core.events import Journal
from ninfer_pool.core.ghosts import TAIL, Digest, Ghost, Ghosts
from ninfer_pool.core.hooks import Below, Tier
from ninfer_pool.core.keys import Attribute
from ninfer_pool.core.ledger import PageLedger, Units
from ninfer_pool.core.namespace import Namespace
from ninfer_pool.core.policy.ranking import Ranking
from ninfer_pool.core.radix import Hop, Path
from ninfer_pool.core.results import Counters
from ninfer_pool.core.spares import Spares


class Holdings:
    """The index, the ledger of pages, the entries and the order in which they may go."""

    def __init__(self, config: PoolConfig) -> None:
        self.config = config
        self.ledger = PageLedger(config.num_pages, image_pages=config.image_pages)
        self.roots: dict[Namespace, Path] = {}
        self.entries: dict[int, Entry] = {}
        self.keys: dict[str, dict[int, Entry]] = {}
        self.ranking = Ranking(config.make_policy)
        self.spares = Spares()
        self.ghosts = Ghosts(config.ghosts)
        self.counters = Counters()
        self.journal = Journal(config.events)
        self.version = 0
        """Changes of the index so far: what was found before may not be found now."""
        self.tick = 0
        """Commits so far: the pool's only clock."""
        self.checkpoints = 0
        self.keeper: Below | None = None
        """Told of what is about to go for room, where there are tiers below."""
        self.tiers: tuple[Tier, ...] = ()
        self._serials = itertools.count()
        self._digests: dict[Namespace, bytes] = {}

    def leaving(self, entry: Entry | None, mark: Checkpoint) -> None:
        """A checkpoint is about to go for room: the tip of ``entry``, or a superseded one."""
        if self.keeper is not None:
            self.keeper.leaving(entry, mark)

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
            if namespace in self.roots:
                self._digests[namespace] = digest
        return keys.sequence_key(digest, tokens, attributes)

    def units_of(self, mark: Checkpoint) -> Units:
        """Return what a checkpoint holds: its KV pages and its image."""
        return mark.units(self.config.page_tokens)

    # -- protection (G4) -------------------------------------------------------------------

    def guard(self, mark: Checkpoint) -> None:
        """Protect a checkpoint: it is pinned, or has just been committed."""
        mark.guards += 1
        if mark.guards == 1:
            self.ledger.keep(self.units_of(mark))

    def borrow(self, mark: Checkpoint, units: Units) -> None:
        """Protect a checkpoint for a lease that reads its ``units``."""
        mark.guards += 1
        if mark.guards == 1:
            self.ledger.borrow(units)
        else:
            self.ledger.lease(units)

    def unguard(self, mark: Checkpoint, units: Units | None = None) -> None:
        """Take one protection off; ``units`` are those of the checkpoint, where known."""
        mark.guards -= 1
        if mark.guards == 0:
            self.ledger.unkeep(self.units_of(mark) if units is None else units)

    def unpin(self, entry: Entry) -> None:
        """Take an entry's pin off."""
        for mark in entry.pinned or ():
            self.unguard(mark)
        entry.pinned = None
        entry.inherited = None

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

    def set_spare(self, mark: Checkpoint, *, gap: int) -> None:
        """Let a checkpoint be superseded: the first to go."""
        if not mark.spare:
            self.spares.add(mark, gap=gap, serial=next(self._serials))
            self.counters.superseded += 1

    def gap(self, mark: Checkpoint) -> int:
        """Return the tokens between a checkpoint and the one before it on its way."""
        before = ways.previous_mark(mark)
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

    def private_marks(self, entry: Entry, *, base: int | None = None) -> Iterator[Checkpoint]:
        """Yield the checkpoints that only this entry holds, past its `base`, deepest first."""
        base = self.base(entry) if base is None else base
        mark: Checkpoint | None = entry.tip
        while mark is not None and mark.position > base:
            yield mark
            mark = ways.previous_mark(mark)

    def _measure(self, entry: Entry) -> None:
        base = self.base(entry)
        size = self.config.page_tokens
        entry.saved = entry.tip.position - base
        pages = -(-entry.tip.position // size) - base // size + self.config.image_pages
        entry.bytes = pages * self.config.page_bytes
        before = ways.previous_mark(entry.tip)
        kept = before.position if before is not None else 0
        entry.gain = entry.tip.position - kept
        pages = -(-entry.tip.position // size) - kept // size + self.config.image_pages
        entry.gain_bytes = pages * self.config.page_bytes

    # -- removal ---------------------------------------------------------------------------

    def unlink(self, mark: Checkpoint) -> int:
        """Take a checkpoint that is no tip out; return how many pages are retained no more."""
        path = mark.where
        self.version += 1
        self.spares.discard(mark)
        after = bisect_left(path.positions, mark.position + 1)
        follower = path.marks[after] if after < len(path.marks) else None
        index.remove_mark(mark)
        mark.path = None
        freed = self.ledger.drop(self.units_of(mark))
        self.checkpoints -= 1
        if follower is not None and follower.spare:
            self.spares.widen(follower, gap=self.gap(follower))
        index.prune(path)
        return freed

    def shorten(self, entry: Entry, *, cause: str = "evicted") -> int:
        """Take an entry's tip; it ends at its next private checkpoint, or is gone.

        Returns pages that are retained no more. O(pages of the tip), one hash pass.
        """
        tip = entry.tip
        path = tip.where
        base = self.base(entry)
        before = ways.previous_mark(tip)
        stays = before is not None and before.position > base
        self._remember(entry.namespace, tip, [tip.position], cause, entry.used)
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
        before.where.tip = entry
        before.where.count_entries(1)
        self._measure(entry)
        self._rename(entry, self.key_of(entry.namespace, before))
        self.ranking.shortened(entry, self.tick)
        return freed

    def _drop_dead(self, path: Path, tip: Checkpoint, floor: int) -> int:
        """Remove superseded tails that hang below what is about to go.

        No entry hangs past ``floor``, which lies at what the entry shares with others or deeper.
        """
        dead = [mark for mark in path.marks if mark.position > tip.position]
        above: Path | None = path
        while above is not None:
            for child in above.forks_after(floor):
                dead += [mark for sub in child.subtree() for mark in sub.marks]
            above = above.parent if above.start > floor else None
        gone = [mark for mark in dict.fromkeys(dead) if mark is not tip and not mark.guards]
        return sum(self.unlink(mark) for mark in gone)

    def drop(self, entry: Entry, *, cause: str = "evicted") -> int:
        """Remove an entry whole, with all that only it holds; return pages retained no more.

        What others protect of it stays, superseded. O(pages), one hash pass.
        """
        base, tip, path = self.base(entry), entry.tip, entry.tip.where
        self.unpin(entry)
        marks = list(self.private_marks(entry, base=base))
        gone = [mark for mark in marks if not mark.guards]
        self._remember(entry.namespace, tip, [m.position for m in gone], cause, entry.used)
        self._untip(entry)
        for mark in marks:
            if mark.guards:
                self.set_spare(mark, gap=0)
        freed = self._drop_dead(path, tip, base)
        if tip.path is path and not path.forks and set(path.marks) <= set(gone):
            freed += self._unlink_all(path)
        freed += sum(self.unlink(mark) for mark in gone if mark.path is not None)
        self._forget(entry)
        return freed

    def _unlink_all(self, path: Path) -> int:
        """Take every checkpoint of a path that nothing hangs off out at once; see `unlink`."""
        self.version += 1
        freed = 0
        for mark in path.marks:
            self.spares.discard(mark)
            mark.path = None
            freed += self.ledger.drop(self.units_of(mark))
        self.checkpoints -= len(path.marks)
        path.marks, path.positions = [], []
        index.prune(path)
        return freed

    def repin(self, entry: Entry) -> None:
        """A pinned entry whose tip is another is pinned there; an inherited pin moves on."""
        if entry.pinned is not None and entry.tip not in entry.pinned:
            if entry.inherited is not None:
                entry.pinned.remove(entry.inherited)
                self.unguard(entry.inherited)
            entry.inherited = entry.tip
            entry.pinned.append(entry.tip)
            self.guard(entry.tip)

    def remove(self, mark: Checkpoint, *, cause: str) -> None:
        """Remove one checkpoint wherever it stands, guarded or not (quarantine, expiry)."""
        for entry in self.entries.values():
            if entry.pinned and mark in entry.pinned:
                entry.pinned.remove(mark)
                self.unguard(mark)
            if entry.inherited is mark:
                entry.inherited = None
        holder, space = mark.where.tip, self.namespace_of(mark.where)
        key = holder.key if holder is not None else ""
        if holder is not None and holder.tip is mark:
            freed = self.shorten(holder, cause=cause)
            if holder.identity in self.entries:
                self.repin(holder)
        else:
            self._remember(space, mark, [mark.position], cause, mark.tick)
            freed = self.unlink(mark)
        if holder is not None:
            kind = "truncated" if holder.identity in self.entries else "evicted"
            self.emit(kind, holder, key=key, freed=freed)
        self.sweep(space)

    def _remember(
        self, namespace: Namespace, tip: Checkpoint, positions: list[int], cause: str, used: int
    ) -> None:
        """Leave a ghost of each position on the way to ``tip``. One hash pass."""
        if self.config.ghosts:
            path = tip.where
            carried = ways.attributes(path, tip.position)
            state, done = Digest(), 0
            for position in reversed(positions):
                state.update(ways.pieces(path, done, position))
                tail = b"".join(ways.pieces(path, max(0, position - TAIL), position))
                ghost = Ghost(position, cause, self.tick, used, state.digest(carried, position))
                self.ghosts.add(namespace, tail, ghost)
                done = position

    def key_of(self, namespace: Namespace, mark: Checkpoint) -> str:
        """Return the key of the sequence up to a checkpoint. One hash pass."""
        parts = ways.pieces(mark.where, 0, mark.position)
        return self.key(namespace, parts, ways.attributes(mark.where, mark.position))

    def namespace_of(self, path: Path) -> Namespace:
        """Return the namespace under which a path lies. O(depth)."""
        while path.parent is not None:
            path = path.parent
        return next(space for space, root in self.roots.items() if root is path)

    def _untip(self, entry: Entry) -> None:
        path = entry.tip.where
        path.tip = None
        path.count_entries(-1)

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
        if self.journal:
            tip, path = entry.tip, entry.tip.path
            positions = () if path is None else ways.positions_to(path, tip.position)
            freed *= self.config.page_bytes
            key = entry.key if key is None else key
            self.journal.add(kind, key, positions, entry=entry.identity, freed=freed)

    def unlink_spare(self, mark: Checkpoint) -> int:
        """Take a superseded checkpoint out for room and say so; see `unlink`."""
        path = mark.where
        entry, key = path.tip, ""
        space = None if entry is not None else self.namespace_of(path)
        if self.journal and space is not None:
            key = self.key_of(space, mark)
        freed = self.unlink(mark)
        if space is not None:
            self.sweep(space)
        if entry is not None:
            self.emit("truncated", entry, freed=freed)
        elif key:
            freed_bytes = freed * self.config.page_bytes
            self.journal.add("evicted", key, (), entry=-1, freed=freed_bytes)
        return freed

    def path_marks(self, entry: Entry) -> Iterator[Checkpoint]:
        """Yield every checkpoint on an entry's path, deepest first; none for a gone entry."""
        mark = entry.tip if entry.identity in self.entries else None
        while mark is not None:
            yield mark
            mark = ways.previous_mark(mark)
