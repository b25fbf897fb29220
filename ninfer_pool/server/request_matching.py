"""The earlier request that shares the longest prefix with a prompt, in bounded memory."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from typing import Final, NamedTuple

from ninfer_pool.sim.convert.radix import RadixTree

CELL_BYTES: Final = 4
MOST_TAGS: Final = 65_536
MOST_KNOWN: Final = 65_536
"""Requests per generation, however few tokens they have."""


class Known(NamedTuple):
    """A request's facts that are kept with its tokens."""

    input: int
    session: str
    tenant: str | None


@dataclass(slots=True)
class _Generation:
    tree: RadixTree = field(default_factory=lambda: RadixTree(unit=CELL_BYTES))
    known: dict[int, Known] = field(default_factory=dict)


class RequestMatcher:
    """Sequences of int32 tokens, as bytes, in two generations of half the bound each.

    When the younger one is full, the older one is dropped; sequences in use were added to the
    younger since. So at most ``most_tokens`` tokens are held, and a sequence is found until at
    least half as many new tokens were added. O(tokens) per call at the speed of memcmp.
    """

    def __init__(self, *, most_tokens: int) -> None:
        self._half = max(1, most_tokens // 2)
        self._young = _Generation()
        self._old = _Generation()
        self.dropped = 0
        """Tokens dropped so far: a prompt that shares a prefix with those alone seems new."""

    def match(self, data: bytes) -> tuple[int, int | None]:
        """Return the longest common prefix in tokens, and the latest sequence that has it."""
        young, old = self._young.tree.match(data), self._old.tree.match(data)
        return old if old[0] > young[0] else young

    def known(self, sequence: int) -> Known:
        """Return the facts of a sequence that `match` returned."""
        return self._young.known.get(sequence) or self._old.known[sequence]

    def add(self, data: bytes, sequence: int, known: Known, *, begin: int = 0) -> None:
        """Add a sequence, whose first ``begin`` tokens were added before.

        Of the rest, a part that an earlier sequence has stays that one's: in a trace an output is
        always new, so a repetition of it is shared through the first.
        """
        keep = self.match(data)[0] if begin else 0
        data, rest = data[: CELL_BYTES * self._half], data[CELL_BYTES * self._half :]
        tree = self._young.tree
        units = tree.units + len(data) // CELL_BYTES - tree.match(data)[0]
        if units > self._half or len(self._young.known) >= MOST_KNOWN:
            self.dropped += self._old.tree.units
            self._old, self._young = self._young, _Generation()
        self.dropped += len(rest) // CELL_BYTES
        self._young.tree.add(data, sequence, keep=keep if keep > begin else 0)
        self._young.known[sequence] = known


class Tags:
    """Numbered names for secrets; the same name for the same secret while it is kept.

    >>> tags = Tags("s")
    >>> tags.of("a secret"), tags.of("another"), tags.of("a secret"), tags.new()
    ('s1', 's2', 's1', 's3')
    """

    def __init__(self, letter: str, *, most: int = MOST_TAGS) -> None:
        self._letter = letter
        self._numbers = count(1)
        self._of_digest = lru_cache(maxsize=most)(lambda digest: self.new())

    def new(self) -> str:
        """Return the next name."""
        return f"{self._letter}{next(self._numbers)}"

    def of(self, secret: str) -> str:
        """Return the name of ``secret``; the least recently used name is dropped."""
        data = secret.encode("utf-8", "surrogatepass")
        return self._of_digest(hashlib.blake2b(data, digest_size=16).digest())
