"""Timing of one operation beside the floor, and the row of the report that it makes."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
Action = Callable[[], object]
"""What is timed; less the nanoseconds of its attribute ``excluded``, if it has one."""
SECONDS_A_ROW = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Microseconds:
    """The middle of the repeats and what nine of ten stay under."""

    median: float
    p90: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is asked, of how much: the fields of a row that name it."""

    op: str
    probe: str
    shape: str
    tokens: int
    entries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(Case):
    """One measured operation; `ratio` is its median over `floor_us`, measured in between.

    `peer` is empty for the pool itself, else the name and version of the peer.
    """

    us: Microseconds
    floor_us: float
    ratio: float
    peer: str = ""

    def to_json(self) -> dict[str, object]:
        """The row as the report's JSON holds it; `peer` only where there is one."""
        record = asdict(self)
        if not self.peer:
            del record["peer"]
        return record


class Floor:
    """The least that finding and confirming a prefix by a hash could cost.

    One xxh3-128 pass over the prompt's bytes and one comparison with the `stored` bytes, those
    that match. `bytes.startswith` is the fastest comparison that Python has: one memcmp. It
    reads its own copies of both, so neither it nor the operation warms the other's memory.
    """

    def __init__(self, prompt: Tokens, *, stored: bytes) -> None:
        self._prompt = prompt.tobytes()
        self._stored = stored

    def __call__(self) -> object:
        return xxhash.xxh3_128_digest(self._prompt), self._prompt.startswith(self._stored)


def measure(case: Case, pairs: Iterable[tuple[Action, Floor]], *, peer: str = "") -> Row:
    """Time each action, and its floor after it; making the next pair is not timed.

    A slow one stops early, after `SECONDS_A_ROW`, but never before its first call.
    """
    taken: list[int] = []
    floors: list[int] = []
    with no_collector():
        for action, floor in pairs:
            taken.append(_nanoseconds(action))
            floors.append(_nanoseconds(floor))
            if sum(taken) > SECONDS_A_ROW * 1e9:
                break
    return _row(case, taken, floors, peer=peer)


def _row(case: Case, taken: list[int], floors: list[int], *, peer: str) -> Row:
    middle, floor = statistics.median(taken) / 1000, statistics.median(floors) / 1000
    return Row(
        **asdict(case),
        us=Microseconds(median=round(middle, 3), p90=round(p90(taken) / 1000, 3)),
        floor_us=round(floor, 3),
        ratio=round(middle / floor, 3),
        peer=peer,
    )


def p90(taken: list[int]) -> int:
    """Return what nine of ten stay under."""
    return sorted(taken)[(len(taken) * 9) // 10]


def _nanoseconds(action: Callable[[], object]) -> int:
    begin = time.perf_counter_ns()
    action()
    taken = time.perf_counter_ns() - begin
    return max(1, taken - getattr(action, "excluded", 0))


@contextmanager
def no_collector() -> Iterator[None]:
    """As timeit does: a collection in the middle of a call would be charged to that call."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
