"""The pool's results, as values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from ninfer_pool.core.identity import Namespace

REASONS = (
    "hit",
    "no_entry",
    "diverged",
    "no_checkpoint_before",
    "evicted",
    "identity:<field>",
    "opted_out",
    "below_minimum",
    "no_room",
    "quarantined",
)
"""Every reason that a lookup can have."""


def reuse_of(kind: str | None) -> str:
    """Return the name of the reuse path that a checkpoint of this kind gives; None: of none."""
    if kind is None:
        return "full_reset"
    return "append_frontier" if kind == "frontier" else f"restore_{kind}_checkpoint"


class Match(NamedTuple):
    """A position where a prompt can be resumed."""

    position: int
    kind: str
    exact: bool
    """Resuming here gives the bits that a cold run of this very prompt would give."""
    bytes: int
    """Bytes of its pages, image included."""


class Refusal(NamedTuple):
    """Why `acquire` returned None. Nothing had changed."""

    reason: str
    """``no_room``, ``no_lane``, ``home_lane_busy`` or ``position_mismatch``."""
    bytes_needed: int
    bytes_freeable: int
    """Bytes free now, or free if everything unprotected went."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a prompt hits as deep as it does, and no deeper."""

    reason: str
    tokens: int
    """The prompt's length."""
    matched: int
    """Tokens that agree with something retained, or remembered as evicted."""
    resumable: int
    """Tokens that the best checkpoint spares."""
    lost: int
    """matched - resumable."""
    diverged_at: int | None
    """The first position where the prompt parts from a retained sequence that goes on."""
    kind: str | None = None
    """The kind of the best checkpoint."""
    exact: bool = True
    tier: str | None = None
    """Where the best checkpoint is held: ``device``, ``host`` or ``disk``; None: there is none."""
    evicted_tick: int | None = None
    """For ``evicted``: after how many commits of the pool it was removed."""
    used_tick: int | None = None
    """For ``evicted``: the commit that used it last."""
    helps: tuple[str, ...] = ()
    """Changes that would have made more of it resumable."""

    def __str__(self) -> str:
        text = f"{self.reason}: {self.resumable} of {self.tokens} tokens resumable"
        if self.kind:
            where = f" in the {self.tier} tier" if self.tier not in (None, "device") else ""
            exact = "" if self.exact else "not "
            text += f" (from the {self.kind} checkpoint{where}, {exact}exact)"
        text += f", {self.matched} matched, {self.lost} lost"
        if self.diverged_at is not None:
            text += f", parts at {self.diverged_at}"
        return "\n".join([text, *(f"  would help: {line}" for line in self.helps)])


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryInfo:
    """An entry at one moment: never its tokens."""

    key: str
    entry: int
    """Its number in this pool: stays the same while it grows and its key changes."""
    namespace: Namespace
    tokens: int
    lane: int
    checkpoints: tuple[tuple[int, str], ...]
    """(position, kind), ascending; those shared with other entries too."""
    superseded: tuple[int, ...]
    """Positions of the superseded ones, the first victims."""
    bytes: int
    """Bytes that only this entry holds."""
    image_bytes: int
    """Those of them that are images."""
    hits: int
    priority: int
    pinned: bool
    released: bool
    tier: str = "device"
    """The highest tier that holds it whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A change of the retained entries, for a router that follows the pool.

    ``kind`` is one of:

    * ``stored``: a new entry, or one that grew
    * ``touched``: consumed
    * ``superseded``
    * ``truncated``: shortened to an earlier checkpoint
    * ``evicted``: for room, or because it expired or was quarantined

    ``positions`` are those where ``key``'s sequence can be resumed afterwards.
    """

    number: int
    kind: str
    entry: int
    """The entry's number: the same while it grows and its key changes, never another's. -1: a
    superseded tail that no entry holds."""
    key: str
    positions: tuple[int, ...]
    bytes: int


@dataclass(slots=True, kw_only=True)
class EvictionCost:
    """The pages that one request's admission and commit needed, and those evicted for it."""

    needed: int = 0
    evicted: int = 0
    largest: int = 0
    """The largest single victim."""

    def add(self, pages: int) -> None:
        """Record a victim."""
        self.evicted += pages
        self.largest = max(self.largest, pages)


@dataclass(slots=True, kw_only=True)
class Counters:
    """Events counted since the pool was made: plain sums that never fall, and peaks."""

    acquired: int = 0
    committed: int = 0
    refused: int = 0
    input_tokens: int = 0
    reused_tokens: int = 0
    evictions: int = 0
    """Entries removed whole for room."""
    truncations: int = 0
    """Entries shortened to an earlier checkpoint for room."""
    superseded: int = 0
    """Checkpoints that a newer frontier made useless."""
    superseded_evicted: int = 0
    """Superseded checkpoints removed for room."""
    evicted_pages: int = 0
    expired: int = 0
    images_saved: int = 0
    captures_skipped: int = 0
    """Checkpoints asked for and not taken, whatever the reason."""
    skipped_no_room: int = 0
    skipped_media: int = 0
    position_mismatches: int = 0
    quarantined: int = 0
    interned_pages: int = 0
    peak_retained_pages: int = 0
    peak_used_pages: int = 0

    def copy(self) -> Counters:
        """Return a copy."""
        return replace(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """One tier below the device at one moment, and its traffic so far."""

    tier: str
    """``host`` or ``disk``."""
    entries: int
    checkpoints: int
    bytes: int
    budget_bytes: int
    stored: int
    """Entries written to it, those that grew counted again."""
    stored_bytes: int
    images: int
    """Images written to it."""
    promoted: int
    """Checkpoints brought from it to the device."""
    promoted_bytes: int
    dropped: int
    """Entries that left the tier above and were not stored here: no room, or too much in flight."""
    failed: int
    """Writes that failed, and reads of damaged data."""
    damaged: int = 0
    """Entries that could not be read when the tier was opened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """The pool's state and counters at one moment."""

    entries: int
    checkpoints: int
    superseded: int
    leases: int
    pages_total: int
    pages_free: int
    retained_bytes: int
    image_bytes: int
    """Bytes of retained images."""
    pinned_bytes: int
    """Bytes of checkpoints that are pinned or being resumed from."""
    counters: Counters
    tiers: tuple[TierStats, ...] = ()
    """The tiers below the device that are on."""
