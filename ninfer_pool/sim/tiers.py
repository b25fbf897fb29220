"""Tiers below the device in a simulation: made from sizes and rates, and the time of restores."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ninfer_pool.core.pool import PrefixPool
from ninfer_pool.tiers import Rates, Tiers, host_shelf
from ninfer_pool.tiers.counted import CountedMedium
from ninfer_pool.tiers.shelf import Shelf


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSize:
    """One tier to simulate: ``host`` or ``disk``, its bytes, and its restored bytes per second."""

    name: str
    budget_bytes: int
    bytes_s: float


class SimulatedTiers:
    """Tiers below a pool, the fastest first, that count bytes and store none; may be none.

    ``everything``: the most bytes that the trace can fill. Host memory is counted page by page,
    so a larger budget would only take memory of this machine.
    """

    def __init__(
        self, pool: PrefixPool, sizes: Sequence[TierSize], *, prefill_rate: float, everything: int
    ) -> None:
        self._tiers: list[tuple[Shelf, TierSize]] = []
        self._seconds = 0.0
        if sizes:
            rates = Rates(
                prefill_tokens_s=prefill_rate,
                bytes_s={size.name: size.bytes_s for size in sizes},
                fixed=True,
            )
            shelves = [_shelf(pool, size, rates, everything) for size in sizes]
            Tiers(pool, None, shelves=shelves, rates=rates, background=False)
            self._tiers = list(zip(shelves, sizes, strict=True))

    def seconds(self) -> float:
        """Return the time of the restores since the last call: bytes over rates. O(tiers)."""
        before, self._seconds = (
            self._seconds,
            sum(shelf.traffic.promoted_bytes / size.bytes_s for shelf, size in self._tiers),
        )
        return self._seconds - before

    def figures(self) -> Iterator[dict[str, Any]]:
        """Yield each tier's traffic and size, as elements of a run's ``tiers``."""
        for shelf, size in self._tiers:
            traffic = shelf.traffic
            yield tier_fields(
                size.name,
                promoted_bytes=traffic.promoted_bytes,
                stored_bytes=traffic.stored_bytes,
                images=traffic.images,
                restore_seconds=traffic.promoted_bytes / size.bytes_s,
                bytes=shelf.medium.used,
                budget_bytes=size.budget_bytes,
                dropped=traffic.dropped,
            )


def _shelf(pool: PrefixPool, size: TierSize, rates: Rates, everything: int) -> Shelf:
    if size.name == "host":
        budget = min(size.budget_bytes, everything)
        return host_shelf(pool.config, None, budget=budget, rates=rates)
    medium = CountedMedium(pool.config, budget_bytes=size.budget_bytes)
    return Shelf(size.name, medium, config=pool.config, rates=rates, keeps_spares=False)


def tier_fields(tier: str, **figures: Any) -> dict[str, Any]:
    """Return one element of a run's ``tiers``; figures that are not given are 0."""
    return {
        "tier": tier,
        "reused_tokens": 0,
        "hits": 0,
        "promoted_bytes": 0,
        "stored_bytes": 0,
        "images": 0,
        "restore_seconds": 0.0,
        "bytes": 0,
        "budget_bytes": None,
        "dropped": 0,
        **figures,
    }


def head_fields(sizes: Iterable[TierSize]) -> dict[str, Any]:
    """Return budgets and rates of the tiers below as fields of a run; None for an absent tier."""
    by_name = {size.name: size for size in sizes}
    found: dict[str, Any] = {}
    for field, suffix in (("budget_bytes", "budget_bytes"), ("bytes_s", "rate")):
        for name in ("host", "disk"):
            found[f"{name}_{suffix}"] = getattr(by_name.get(name), field, None)
    return found
