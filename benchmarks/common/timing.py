"""Timing of one operation and its floor, as a row of the report."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
Action = Callable[[], object]
"""A timed call; the nanoseconds of its attribute ``excluded``, if any, are subtracted."""
SECONDS_A_ROW = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Microseconds:
    """The median of the repeats, and the time that nine of ten do not exceed."""

    median: float
    p90: float

    @classmethod
    def of(cls, nanoseconds: Sequence[int]) -> Microseconds:
        """Return both of some repeats."""
        ninth = sorted(nanoseconds)[len(nanoseconds) * 9 // 10]
        return cls(
            median=round(statistics.median(nanoseconds) / 1000, 3), p90=round(ninth / 1000, 3)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The name of a row: operation, probe and sizes."""

    op: str
    probe: str
    shape: str
    tokens: int
    entries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(Case):
    """One measured operation; `ratio` is its median over `floor_us`, measured between the calls.

    `peer` is empty for the pool itself, else the name and version of the peer.
    """

    us: Microseconds
    floor_us: float
    ratio: float
    peer: str = ""

    def to_json(self) -> dict[str, object]:
        """Return the row of the report's JSON; `peer` only where there is one."""
        record = asdict(self)
        if not self.peer:
            del record["peer"]
        return record


class Floor:
    """The least cost of finding and confirming a prefix by a hash.

    One xxh3-128 pass over the prompt's bytes and one comparison with the matching `stored`
    bytes. `bytes.startswith` is the fastest comparison in Python: one memcmp. It reads its own
    copies of both, so neither it nor the operation warms the other's memory.
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
    least = statistics.median(floors)
    return Row(
        **asdict(case),
        us=Microseconds.of(taken),
        floor_us=round(least / 1000, 3),
        ratio=round(statistics.median(taken) / least, 3),
        peer=peer,
    )


def _nanoseconds(action: Callable[[], object]) -> int:
    begin = time.perf_counter_ns()
    action()
    taken = time.perf_counter_ns() - begin
    return max(1, taken - getattr(action, "excluded", 0))


@contextmanager
def no_collector() -> Iterator[None]:
    """Disable the garbage collector, as timeit does: a collection would count for one call."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
