"""S3-FIFO: three static queues, first in first out (Yang et al., SOSP 2023)."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from ninfer_pool.core.entry import Entry
from ninfer_pool.core.policy.base import Policy

MOST_USES = 3
"""Two bits of use counter, as in the paper."""


@dataclass(slots=True, kw_only=True)
class _Item:
    entry: Entry
    bytes: int
    tick: int
    """The commit that added it or used it last: one commit is one use."""
    uses: int = 0


class _Queue:
    """First in, first out; the tail is the oldest. O(1) each."""

    __slots__ = ("bytes", "items")

    def __init__(self) -> None:
        self.items: OrderedDict[int, _Item] = OrderedDict()
        self.bytes = 0

    def push(self, item: _Item) -> None:
        self.items[item.entry.identity] = item
        self.bytes += item.bytes

    def pop(self, identity: int) -> _Item:
        item = self.items.pop(identity)
        self.bytes -= item.bytes
        return item

    def tail(self) -> _Item:
        return next(iter(self.items.values()))

    def reinsert(self, item: _Item) -> None:
        self.items.move_to_end(item.entry.identity)


class S3Fifo(Policy):
    """Newcomers pass a small queue; entries used there twice enter the main one.

    Algorithm 1 of the paper. While the small queue holds a tenth of the space or more, its tail is
    evicted. It moves to the main queue instead if it was used more than once. Else the tail of
    the main queue is evicted, or reinserted with one use less. An entry evicted from the small
    queue leaves a ghost; if it is requested again, it enters the main queue at once.

    Choices that the paper leaves open, or that a pool of prefixes makes otherwise:

    * Space is bytes (`Entry.bytes`), and the whole is the two queues' when room is needed. A policy
      does not receive the budget, but room is only needed when it is used up. An entry just
      committed counts already.
    * A conversation is longer when it is requested again, so a ghost is no key. It is the commit
      at which an entry left the small queue, which `on_ghost_hit` names. There are at most nine
      ghosts per ten entries.
    * An entry that the pool declines because it is protected is in use: it is reinserted. One that
      was only truncated keeps its place.
    * One commit is one use, even where it both consumes an entry and makes it grow.

    O(1) per notice; a victim O(1) amortised, plus the protected entries met before it.
    """

    def __init__(self) -> None:
        self._small = _Queue()
        self._main = _Queue()
        self._ghosts: deque[int] = deque()
        self._back = False
        """The request would have hit a ghost; what it adds next enters the main queue."""
        self._offered: tuple[int, int] | None = None
        """(identity, tick) of the small queue's entry that the pool is looking at."""

    def on_insert(self, entry: Entry, tick: int) -> None:
        """Enter the small queue, or the main one where a ghost came back."""
        queue = self._main if self._back else self._small
        queue.push(_Item(entry=entry, bytes=entry.bytes, tick=tick))
        self._back = False

    def on_hit(self, entry: Entry, tick: int) -> None:
        """Count a use; the place in the queue stays."""
        self._back = False  # the request grows an entry, or nothing was added for it
        item = self._resized(entry)
        if item.tick != tick:
            item.uses = min(item.uses + 1, MOST_USES)
            item.tick = tick

    def on_truncate(self, entry: Entry, tick: int) -> None:
        """Note the new size; the place in the queue stays."""
        self._resized(entry)
        self._offered = None

    def on_remove(self, entry: Entry) -> None:
        """Leave the queue; leave a ghost if it was the small queue's victim."""
        if self._offered is not None and self._offered[0] == entry.identity:
            self._remember(self._offered[1])
        self._offered = None
        self._queue_of(entry).pop(entry.identity)

    def on_ghost_hit(self, age: int, gap: int, tick: int) -> None:
        """Look for the ghost of the requested entry."""
        gone = tick - age
        self._back = gone in self._ghosts
        if self._back:
            self._ghosts.remove(gone)

    def on_cold_miss(self, tick: int) -> None:
        """No ghost was requested."""
        self._back = False

    def victims(self, tick: int) -> Iterator[Entry]:
        """Yield victims; promotions and second chances happen on the way, each counted once."""
        declined: set[int] = set()
        yield from self._offer_small(tick, declined)
        yield from self._offer_main(declined)
        # All of the main queue is protected: the small one gives below its tenth.
        for item in list(self._small.items.values()):
            if item.entry.identity not in declined:
                self._offered = (item.entry.identity, tick)
                yield item.entry
        self._offered = None

    def _offer_small(self, tick: int, declined: set[int]) -> Iterator[Entry]:
        small = self._small
        while len(declined) < len(small.items) and self._small_is_full():
            item = small.tail()
            identity = item.entry.identity
            if item.uses > 1:
                item.uses = 0
                self._main.push(small.pop(identity))
                continue
            self._offered = (identity, tick)
            yield item.entry
            self._offered = None
            declined.add(identity)
            small.reinsert(item)

    def _offer_main(self, declined: set[int]) -> Iterator[Entry]:
        main = self._main
        left = len(main.items)
        while left:
            item = main.tail()
            if item.entry.identity not in declined:
                if item.uses:
                    item.uses -= 1
                else:
                    yield item.entry
                    declined.add(item.entry.identity)
                    left -= 1
            main.reinsert(item)

    def _small_is_full(self) -> bool:
        return 10 * self._small.bytes >= self._small.bytes + self._main.bytes

    def _remember(self, tick: int) -> None:
        self._ghosts.append(tick)
        room = 9 * (len(self._small.items) + len(self._main.items)) // 10
        while len(self._ghosts) > room:
            self._ghosts.popleft()

    def _queue_of(self, entry: Entry) -> _Queue:
        return self._small if entry.identity in self._small.items else self._main

    def _resized(self, entry: Entry) -> _Item:
        queue = self._queue_of(entry)
        item = queue.items[entry.identity]
        queue.bytes += entry.bytes - item.bytes
        item.bytes = entry.bytes
        return item
