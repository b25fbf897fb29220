"""What each policy should do, straight from its paper, in plain lists."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from ninfer_pool.core.policy.marconi import Marconi


class Reference:
    """What a policy should do, by the number of the prompt; sizes in bytes."""

    def __init__(self) -> None:
        self.kept: list[int] = []
        """Oldest first."""
        self.tokens: dict[int, int] = {}
        self.sizes: dict[int, int] = {}

    def insert(self, x: int, now: int) -> None:
        self.kept.append(x)

    def hit(self, x: int, now: int) -> None:
        pass

    def candidates(self, now: int) -> Iterator[int]:
        """Victims in their order; the first one that nothing protects is then evicted."""
        raise NotImplementedError

    def evict(self, x: int, now: int) -> None:
        self.kept.remove(x)


class FifoReference(Reference):
    def candidates(self, now: int) -> Iterator[int]:
        return iter(self.kept)


class LruReference(FifoReference):
    def hit(self, x: int, now: int) -> None:
        self.kept.remove(x)
        self.kept.append(x)


class GdsfReference(Reference):
    """Cherkasova 1998: priority = clock + frequency x cost / size; clock = that of the victim."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = 0.0
        self.frequency: dict[int, int] = {}
        self.priority: dict[int, float] = {}

    def insert(self, x: int, now: int) -> None:
        super().insert(x, now)
        self.frequency[x] = 0
        self.hit(x, now)

    def hit(self, x: int, now: int) -> None:
        self.frequency[x] += 1
        self.priority[x] = self.clock + self.frequency[x] * self.tokens[x] / self.sizes[x]

    def candidates(self, now: int) -> Iterator[int]:
        return iter(sorted(self.kept, key=lambda x: self.priority[x]))

    def evict(self, x: int, now: int) -> None:
        super().evict(x, now)
        self.clock = max(self.clock, self.priority[x])


class MarconiReference(Reference):
    """Pan et al. 2025, equations 1 and 2, both terms normalised over all that is kept."""

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.alpha = alpha
        self.last_used: dict[int, int] = {}

    def insert(self, x: int, now: int) -> None:
        super().insert(x, now)
        self.last_used[x] = now

    def hit(self, x: int, now: int) -> None:
        self.last_used[x] = now

    def candidates(self, now: int) -> Iterator[int]:
        recency = {x: 1 / (now + 1 - self.last_used[x]) for x in self.kept}
        flops = {x: self.tokens[x] * (1 + self.tokens[x] / 274_000) for x in self.kept}
        efficiency = {x: flops[x] / self.sizes[x] for x in self.kept}
        newest, oldest = max(recency.values()), min(recency.values())
        most, least = max(efficiency.values()), min(efficiency.values())

        def utility(x: int) -> float:
            recent = (recency[x] - oldest) / (newest - oldest)
            return recent + self.alpha * (efficiency[x] - least) / (most - least)

        return iter(sorted(self.kept, key=utility))


class S3FifoReference(Reference):
    """Yang et al. 2023, algorithm 1. Heads are at the end of a list, tails at its beginning.

    A victim that the pool declines goes to the head; G holds when its members left S.
    """

    def __init__(self) -> None:
        super().__init__()
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghost: list[int] = []
        self.left: dict[int, int] = {}
        self.freq: dict[int, int] = {}

    def insert(self, x: int, now: int) -> None:
        super().insert(x, now)
        self.freq[x] = 0
        if x in self.left and self.left[x] in self.ghost:
            self.ghost.remove(self.left[x])
            self.main.append(x)
        else:
            self.small.append(x)

    def hit(self, x: int, now: int) -> None:
        self.freq[x] = min(self.freq[x] + 1, 3)

    def space(self, queue: list[int]) -> int:
        return sum(self.sizes[x] for x in queue)

    def candidates(self, now: int) -> Iterator[int]:
        tried: list[int] = []
        while self.space(self.small) >= 0.1 * self.space(self.kept) and self.small:
            tail = self.small[0]
            if self.freq[tail] > 1:
                self.freq[tail] = 0
                self.main.append(self.small.pop(0))
            elif tail in tried:
                break
            else:
                yield tail
                tried.append(self.small.pop(0))
                self.small.append(tail)
        while not set(self.main) <= set(tried):
            tail = self.main[0]
            if tail not in tried and self.freq[tail] > 0:
                self.freq[tail] -= 1
            elif tail not in tried:
                yield tail
                tried.append(tail)
            self.main.append(self.main.pop(0))
        yield from (x for x in self.small if x not in tried)

    def evict(self, x: int, now: int) -> None:
        self.left[x] = now
        if x in self.small:
            self.ghost = [*self.ghost, now][-int(0.9 * len(self.kept)) :]
            self.small.remove(x)
        else:
            self.main.remove(x)
        super().evict(x, now)


REFERENCES: dict[str, Callable[[], Reference]] = {
    "lru": LruReference,
    "fifo": FifoReference,
    "gdsf": GdsfReference,
    "marconi": partial(MarconiReference, Marconi().alpha),
    "s3fifo": S3FifoReference,
}
