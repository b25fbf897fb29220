"""The hooks by which tiers below the device take part. The tiers are in `ninfer_pool.tiers`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ninfer_pool.core.entry import Checkpoint, Entry
from ninfer_pool.core.identity import Namespace
from ninfer_pool.core.lookup import Lookup, LookupFilter, SearchableTier
from ninfer_pool.core.results import EntryInfo, EvictionCost, TierStats
from ninfer_pool.errors import ConfigError

UNREACHABLE = "tiers: none; files need a way to the pages, see ninfer_pool.tiers.open_tiers"


class TierHooks:
    """A pool without tiers: every hook is a no-op. All are called under the pool's lock."""

    searchable: Sequence[SearchableTier] = ()
    """The tiers that a lookup searches, the fastest first."""

    def on_evict(self, entry: Entry | None, checkpoint: Checkpoint) -> None:
        """No-op. A checkpoint is about to be evicted: the tip of ``entry``, or a superseded one."""

    def on_branch(self, source: Checkpoint) -> None:
        """No-op. A sequence that continues from a checkpoint is about to be retained."""

    def on_consume(self, source: Checkpoint, tier: str) -> None:
        """No-op. A commit consumed a checkpoint that was promoted from a tier (G6)."""

    def expire(self, now: float) -> None:
        """No-op. Remove the entries below whose time is over."""

    def promote(
        self, above: Lookup, filter: LookupFilter, *, reserve_tokens: int, cost: EvictionCost
    ) -> str | None:
        """Bring a checkpoint deeper than ``above`` to the device; return its tier, or None."""
        return None

    def remove(self, entry: Entry) -> None:
        """No-op. Delete the copies of an entry that is about to be deleted on the device."""

    def evict(self, key: str) -> bool:
        """Delete the entries of a key; return whether there were any."""
        return False

    def clear(self) -> int:
        """Delete everything; return how many entries were held nowhere else."""
        return 0

    def entries(
        self, where: Callable[[Namespace], bool] | None, newest: int | None
    ) -> list[EntryInfo]:
        """Return the entries, or the newest, that the device does not hold, the oldest first."""
        return []

    def find(self, key: str) -> list[EntryInfo]:
        """Return the entries of a key that the device does not hold."""
        return []

    def set_pin(self, key: str, *, pinned: bool) -> bool:
        """Pin or unpin the entries of a key; return whether anything changed."""
        return False

    def release(self, key: str) -> bool:
        """Make the entries of a key go before others; return whether there were any."""
        return False

    def stats(self) -> tuple[TierStats, ...]:
        """Return sizes and traffic."""
        return ()

    def save(self, key: str, path: Path, *, tokens: bool) -> int:
        """Write an entry to a file; return its bytes."""
        raise ConfigError(UNREACHABLE)

    def load(self, path: Path) -> str:
        """Retain the entry of a file; return its key."""
        raise ConfigError(UNREACHABLE)

    def check(self) -> None:
        """No-op. Recount everything; AssertionError names the first difference."""
