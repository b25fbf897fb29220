"""What a request asked of the pool, and what admission settled for it."""

from __future__ import annotations

from dataclasses import dataclass

from ninfer_pool.core.entry import Checkpoint
from ninfer_pool.core.eviction import Bill
from ninfer_pool.core.ledger import Pages, Units
from ninfer_pool.core.operations import CopyPage
from ninfer_pool.core.results import Explanation


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What a request asked for."""

    retain: bool
    pin: bool
    priority: int
    ttl_seconds: float | None
    claim: bool
    exact: bool


@dataclass(slots=True, kw_only=True)
class Grant:
    """What admission settled for a lease."""

    lane: int
    source: Checkpoint | None
    """The checkpoint resumed from; guarded until the lease ends."""
    start: int
    reserve_tokens: int
    exact: bool
    planned: bool
    """Every capture lies on a canonical cut."""
    table: Pages
    """The lane's row of the page table: shared pages first, then its own."""
    own: Units
    """What was taken for this lease: pages, and images in reserve or taken since."""
    spare: list[int]
    """Images in reserve."""
    borrowed: Units
    """What the source holds, counted on until the lease ends."""
    cuts: tuple[int, ...]
    captures: list[tuple[int, str]]
    copies: list[CopyPage]
    claimed: bool
    explanation: Explanation
    bill: Bill
