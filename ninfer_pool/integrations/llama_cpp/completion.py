"""The result of a request, and the conditions that end it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ninfer_pool.core.lease import Lease


@dataclass(slots=True, kw_only=True)
class Completion:
    """One request's tokens, and the part of its prompt that was restored."""

    prompt_tokens: int
    reused: int
    """Tokens of the prompt whose state was restored."""
    reuse: str
    """``full_reset``, ``append_frontier`` or ``restore_<kind>_checkpoint``."""
    exact: bool
    """True where the bits are those of a cold run by the same cuts."""
    reason: str
    explanation: str
    lane: int
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    """Tokens of the prompt that were computed: ``reused + computed == prompt_tokens``."""
    restored: str = "nothing"
    """The source of the lane's KV: ``in_place``, ``from_lane``, ``from_pages``, ``nothing``."""
    finish: str = "cancelled"
    """``stop``, ``length``, or ``cancelled``, also while it runs."""
    key: str | None = None
    """The key of the retained sequence; None: it is not retained."""

    @classmethod
    def begun(cls, lease: Lease) -> Completion:
        """Return the completion of a request that was just admitted."""
        return cls(
            prompt_tokens=len(lease.prompt),
            reused=lease.start,
            reuse=lease.reuse,
            exact=lease.exact,
            reason=lease.reason,
            explanation=str(lease.explanation),
            lane=lease.lane,
        )

    def report(self) -> dict[str, Any]:
        """Return the fields about reuse, as plain values."""
        names = ("reused", "computed", "reuse", "exact", "reason", "lane", "restored", "key")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class EndConditions:
    """The ends of a request: ``most`` tokens, a token that ``ends``, or a text of ``stops``."""

    most: int
    ends: Callable[[int], bool]
    stops: tuple[str, ...] = ()
    text: Callable[[list[int]], str] = str

    def has_stop(self, tokens: list[int]) -> bool:
        """Return whether the newest tokens complete a stop text."""
        if not self.stops:
            return False
        # A token is at least one byte, and the text before a stop may begin inside one.
        newest = tokens[-max(len(stop.encode()) for stop in self.stops) - 1 :]
        return any(stop in self.text(newest) for stop in self.stops)
