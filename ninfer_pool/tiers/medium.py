"""Where a tier's payload lies, as its shelf asks it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ninfer_pool.tiers.parts import Draft, Part
from ninfer_pool.tiers.payload import Row, Source


class Medium(Protocol):
    """Where a shelf's payload lies."""

    @property
    def budget(self) -> int:
        """Bytes that may be taken."""

    @property
    def used(self) -> int:
        """Bytes taken."""

    def size(self, part: Part) -> int:
        """Return the bytes that a part will take."""

    def overhead(self, draft: Draft) -> int:
        """Return the bytes that an entry takes beside its parts, at most."""

    def reclaim(self, size: int) -> None:
        """Let go of what is of no use here, where less than ``size`` is free."""

    def write(self, part: Part, source: Source) -> Any:
        """Store a part; return where it lies."""

    def views(self, place: Any) -> Sequence[Row] | None:
        """Return a part's pages where they lie in memory."""

    def read(
        self, part: Part, place: Any, into: Sequence[Row], *, tokens: bytes, upto: int
    ) -> None:
        """Fill ``into`` with a part's pages, of a run only the rows below ``upto``.

        Raises:
            StoreError: what is there is not what was stored.
        """

    def free(self, place: Any) -> None:
        """Give back what no entry uses any more."""

    def commit(self, draft: Draft, places: dict[Part, Any]) -> str | None:
        """Make an entry last; return what the medium calls it."""

    def confirm(self, name: str) -> None:
        """An entry that was made to last is offered: only `remove` takes it out now."""

    def withdraw(self) -> None:
        """Forget what was made to last, is not offered yet, and was cancelled meanwhile."""

    def remove(self, name: str) -> None:
        """Forget an entry that was made to last; its parts stay until they are freed."""


SMALL_BYTES = 1 << 20
"""What an entry costs to store however small it is, as bytes."""


@dataclass(slots=True, kw_only=True)
class Traffic:
    """What has gone into and out of one tier. Plain sums."""

    stored: int = 0
    """Entries written, those that grew counted again."""
    stored_bytes: int = 0
    images: int = 0
    """Images written."""
    promoted: int = 0
    """Checkpoints brought to the device."""
    promoted_bytes: int = 0
    dropped: int = 0
    """Entries that left the tier above and were not stored: no room, or too much in flight."""
    failed: int = 0
    """Writes that failed, and reads of what was damaged."""
    write_rate: float | None = None
    """Bytes a second that were stored last; None: nothing was yet."""

    def note_write(self, size: int, seconds: float) -> None:
        """Tell how long an entry of so many bytes took to be stored."""
        if seconds > 0:
            rate = (size + SMALL_BYTES) / seconds
            self.write_rate = rate if self.write_rate is None else (self.write_rate + rate) / 2

    def write_seconds(self, size: int) -> float:
        """Return how long storing an entry of so many bytes is going to take; 0: not known."""
        return (size + SMALL_BYTES) / self.write_rate if self.write_rate else 0.0
