"""What the pool knows of tiers below the device: that they can be searched, and asked.

The tiers themselves are in `ninfer_pool.tiers`; without them nothing here costs anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Protocol

from ninfer_pool.core.config import PoolConfig
from ninfer_pool.core.entry import Checkpoint, Entry
from ninfer_pool.core.keys import Attribute
from ninfer_pool.core.namespace import Namespace
from ninfer_pool.core.prompt import Prompt
from ninfer_pool.core.radix import Hop
from ninfer_pool.core.results import EntryInfo, TierStats
from ninfer_pool.errors import ConfigError

if TYPE_CHECKING:
    from ninfer_pool.core.admission import Request
    from ninfer_pool.core.lookup import Rules


UNREACHABLE = "tiers: none; files need a way to the pages, see ninfer_pool.tiers.open_tiers"


class Searchable(Protocol):
    """Something whose checkpoints a prompt may be found among: the device, or a tier."""

    @property
    def config(self) -> PoolConfig:
        """The pool's."""

    def walk(
        self, namespace: Namespace, view: memoryview, attributes: Sequence[Attribute]
    ) -> list[Hop]:
        """Return how far ``view`` follows what is here under ``namespace``."""


class Tier(Searchable, Protocol):
    """A tier below the device, as a search sees it."""

    @property
    def name(self) -> str:
        """``host`` or ``disk``."""

    def pays(self, position: int, *, above: int) -> bool:
        """Say whether restoring up to ``position`` is quicker than prefilling from ``above``."""


class Below(Protocol):
    """All tiers below the device, as the pool asks them. Called under the pool's lock."""

    def leaving(self, entry: Entry | None, mark: Checkpoint) -> None:
        """A checkpoint is about to go from the device for room."""

    def forked(self, source: Checkpoint) -> None:
        """A sequence that went on from a checkpoint is about to be retained."""

    def consumed(self, source: Checkpoint, tier: str) -> None:
        """A request was committed that resumed what had been brought back from a tier (G6)."""

    def raise_up(self, prompt: Prompt, request: Request, rules: Rules, *, lane: bool) -> Request:
        """Bring what ``request`` resumes best to the device; return the request searched anew."""

    def forget(self, entry: Entry) -> None:
        """Delete what lies below of an entry that is about to be deleted on the device."""

    def evict(self, key: str) -> bool:
        """Delete what lies under ``key``; say whether anything did."""

    def clear(self) -> int:
        """Delete everything; return how many entries that lay nowhere else."""

    def entries(
        self, where: Callable[[Namespace], bool] | None, newest: int | None
    ) -> list[EntryInfo]:
        """Return the entries, or the newest, that do not lie on the device, the oldest first."""

    def find(self, key: str) -> list[EntryInfo]:
        """Return what lies under ``key`` and not on the device."""

    def set_pin(self, key: str, *, pinned: bool) -> bool:
        """Pin or unpin what lies under ``key``; say whether anything changed."""

    def release(self, key: str) -> bool:
        """Let what lies under ``key`` go before others."""

    def stats(self) -> tuple[TierStats, ...]:
        """Return sizes and traffic."""

    def save(self, key: str, path: FilePath, *, tokens: bool) -> int:
        """Write an entry to a file; return its bytes."""

    def load(self, path: FilePath) -> str:
        """Retain what a file holds; return its key."""

    def check(self) -> None:
        """Recount everything; AssertionError names what is off."""


class NoTiers:
    """A pool without tiers: there is nothing below, and no way to the bytes of its pages."""

    def leaving(self, entry: Entry | None, mark: Checkpoint) -> None:
        """What goes is gone."""

    def forked(self, source: Checkpoint) -> None:
        """Nobody asks."""

    def consumed(self, source: Checkpoint, tier: str) -> None:
        """Nobody asks."""

    def raise_up(self, prompt: Prompt, request: Request, rules: Rules, *, lane: bool) -> Request:
        """Return the request as it is."""
        return request

    def forget(self, entry: Entry) -> None:
        """There is nothing to delete."""

    def evict(self, key: str) -> bool:
        """Nothing lies under any key."""
        return False

    def clear(self) -> int:
        """There is nothing to delete."""
        return 0

    def entries(
        self, where: Callable[[Namespace], bool] | None, newest: int | None
    ) -> list[EntryInfo]:
        """There are none."""
        return []

    def find(self, key: str) -> list[EntryInfo]:
        """There are none."""
        return []

    def set_pin(self, key: str, *, pinned: bool) -> bool:
        """Nothing lies under any key."""
        return False

    def release(self, key: str) -> bool:
        """Nothing lies under any key."""
        return False

    def stats(self) -> tuple[TierStats, ...]:
        """There are no tiers."""
        return ()

    def save(self, key: str, path: FilePath, *, tokens: bool) -> int:
        """Say no."""
        raise ConfigError(UNREACHABLE)

    def load(self, path: FilePath) -> str:
        """Say no."""
        raise ConfigError(UNREACHABLE)

    def check(self) -> None:
        """There is nothing to recount."""
