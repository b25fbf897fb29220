"""Ratios of times from the same run, and their report.

Compared operations run in turn, again and again, so that a busy minute of the machine delays all
of them alike. The report has the ratio of two medians.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from benchmarks.common.report import BenchmarkReport, aligned, number
from benchmarks.common.timing import Microseconds, no_collector

Timed = Callable[[int], int]
"""Does one repeat, given its number, and returns the nanoseconds of the part that counts."""

CAVEAT = (
    "One machine, one process, the garbage collector off, answers checked before they are timed. "
    "Compared operations run in turn in the same process; the ratio of the two medians carries "
    "over to another machine."
)
TIMES = ("median µs", "p90 µs", "floor µs")
HEAD = ("op", "shape", "compared with", *TIMES, "ratio", "figure", "note")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """One operation and its floor: ``ratio`` is its median over the floor's, in microseconds.

    ``beside`` names the floor, ``at_most`` is the limit of the ratio (None: no limit), ``note``
    holds other counts.
    """

    op: str
    shape: str
    us: Microseconds
    floor: float
    ratio: float
    beside: str
    at_most: float | None = None
    note: str = ""

    @property
    def met(self) -> bool:
        """Whether the ratio is within its limit, or has none."""
        return self.at_most is None or self.ratio <= self.at_most

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of the tables."""
        figure = "" if self.at_most is None else f"≤ {self.at_most:g}"
        numbers = (number(self.us.median), number(self.us.p90), number(self.floor))
        ratio = f"{self.ratio:.4f}" if self.ratio < 0.1 else f"{self.ratio:.2f}"
        missed = "" if self.met else " (missed)"
        return (self.op, self.shape, self.beside, *numbers, ratio, figure + missed, self.note)


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioReport(BenchmarkReport):
    """All rows of one run, its device and model, and the rows left out: (name, reason)."""

    device: str
    model: str
    results: Sequence[Ratio]
    missing: Sequence[tuple[str, str]] = ()

    def to_json(self) -> dict[str, object]:
        """Return the contract of ``--json``, version 1."""
        return {
            "version": 1,
            "device": self.device,
            "model": self.model,
            "results": [asdict(row) for row in self.results],
        }

    def text(self) -> str:
        """Return the table and the list of rows that were not measured."""
        rows = aligned([HEAD, *(row.cells for row in self.results)])
        absent = [f"Not measured: {name} ({why})." for name, why in self.missing]
        place = f"Device: {self.device}. Model: {self.model}."
        return "\n".join([CAVEAT, place, "", *rows, *absent])


def interleaved(actions: Mapping[str, Timed], *, repeats: int) -> dict[str, list[int]]:
    """Run every action once untimed, then all of them in turn; return nanoseconds per repeat.

    The order alternates, so that no action always follows the same other.
    """
    for action in actions.values():
        action(0)
    taken: dict[str, list[int]] = {name: [] for name in actions}
    with no_collector():
        for number in range(repeats):
            for name in list(actions)[:: 1 if number % 2 else -1]:
                taken[name].append(max(1, actions[name](number)))
    return taken


def ratio(
    op: str,
    shape: str,
    taken: Sequence[int],
    floor: Sequence[int],
    *,
    beside: str,
    at_most: float | None = None,
    note: str = "",
) -> Ratio:
    """Return the row of nanoseconds ``taken`` and of those of a floor."""
    least = statistics.median(floor)
    return Ratio(
        op=op,
        shape=shape,
        us=Microseconds.of(taken),
        floor=round(least / 1000, 3),
        ratio=round(statistics.median(taken) / least, 6),
        beside=beside,
        at_most=at_most,
        note=note,
    )
