"""Adds up one run: the JSON's fields and the detail lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from ninfer_pool.core.lease import Lease
from ninfer_pool.core.pool import PrefixPool
from ninfer_pool.sim.below import Restores, head_fields, tier_fields
from ninfer_pool.sim.trace import Request, Trace

if TYPE_CHECKING:
    from ninfer_pool.sim.replay import Plan, Setup


class Sums:
    """What every run adds up, whatever served it."""

    def __init__(self, trace: Trace, setup: Setup, plan: Plan) -> None:
        self.detail: list[dict[str, Any]] = []
        self.refused = 0
        self.input_tokens = 0
        self.reused_tokens = 0
        self._reuse: Counter[str] = Counter()
        self._requests: Counter[str] = Counter()
        self._lost: Counter[str] = Counter()
        self._by_tier: Counter[str] = Counter()
        self._hits: Counter[str] = Counter()
        self._head = {
            "trace": trace.name,
            "model": setup.model,
            "kv": setup.kv,
            "mtp": setup.mtp,
            "lanes": setup.lanes,
            "affinity": setup.affinity,
            "prefill_rate": setup.prefill_rate,
            "decode_rate": setup.decode_rate,
            "policy": plan.policy,
            "entries": plan.entries,
            "budget_bytes": plan.budget_bytes,
            **head_fields(setup.tiers),
            "requests": len(trace.requests),
        }

    def add(
        self,
        request: Request,
        *,
        reused: int,
        exact: bool,
        reuse: str,
        reason: str,
        diverged_at: int | None,
        lost: int,
        tier: str = "device",
        evicted_bytes: int = 0,
        needed_bytes: int = 0,
        victim_max_bytes: int = 0,
    ) -> None:
        """Add one served request; ``tier`` is where what it reused lay."""
        self.input_tokens += request.input
        self.reused_tokens += reused
        self._reuse[reuse] += 1
        self._requests[reason] += 1
        self._lost[reason] += lost
        if reused:
            self._by_tier[tier] += reused
            self._hits[tier] += 1
        self._line(
            request,
            reused=reused,
            exact=exact,
            tier=tier if reused else None,
            reuse=reuse,
            reason=reason,
            diverged_at=diverged_at,
            lost=lost,
            evicted_bytes=evicted_bytes,
            needed_bytes=needed_bytes,
            victim_max_bytes=victim_max_bytes,
        )

    def refuse(self, request: Request) -> None:
        """Add a request that can never fit: neither served nor counted in tokens."""
        self.refused += 1
        self._line(
            request,
            reused=0,
            exact=True,
            tier=None,
            reuse="refused",
            reason="no_room",
            diverged_at=None,
            lost=0,
            evicted_bytes=0,
            needed_bytes=0,
            victim_max_bytes=0,
        )

    def _line(self, request: Request, **fields: Any) -> None:
        self.detail.append(
            {
                "id": request.id,
                "session": request.session,
                "kind": request.kind,
                "input": request.input,
                **fields,
            }
        )

    def fields(
        self, *, held_bytes: int = 0, below: Iterable[dict[str, Any]] = (), **pool: Any
    ) -> dict[str, Any]:
        """Return the run's JSON object; ``pool`` are the fields that a pool alone can tell.

        ``held_bytes`` are retained on the device at the end, ``below`` the tiers under it.
        """
        tokens = self.input_tokens
        device = tier_fields("device", bytes=held_bytes, budget_bytes=self._head["budget_bytes"])
        tiers = [device, *below]
        for told in tiers:
            told["reused_tokens"] = self._by_tier[told["tier"]]
            told["hits"] = self._hits[told["tier"]]
        return {
            **self._head,
            "refused": self.refused,
            "input_tokens": tokens,
            "reused_tokens": self.reused_tokens,
            "hit_rate": self.reused_tokens / tokens if tokens else 0.0,
            "prefilled_tokens": tokens - self.reused_tokens,
            "reuse": dict(sorted(self._reuse.items())),
            "reasons": {
                reason: {"requests": self._requests[reason], "tokens": self._lost[reason]}
                for reason in sorted(self._requests)
            },
            "tiers": tiers,
            **pool,
        }


class Tally(Sums):
    """One run of a pool."""

    def __init__(
        self, trace: Trace, setup: Setup, plan: Plan, pool: PrefixPool, restores: Restores
    ) -> None:
        super().__init__(trace, setup, plan)
        self.lookup_seconds: list[float] = []
        self._pool = pool
        self._restores = restores

    def serve(self, request: Request, lease: Lease) -> None:
        """Add a request whose lease has ended."""
        told = lease.explanation
        self.add(
            request,
            reused=lease.start,
            exact=lease.exact,
            reuse=lease.reuse,
            reason=told.reason,
            diverged_at=told.diverged_at,
            lost=told.lost,
            tier=told.tier or "device",
            evicted_bytes=lease.evicted_bytes,
            needed_bytes=lease.needed_bytes,
            victim_max_bytes=lease.victim_max_bytes,
        )

    def run(self) -> dict[str, Any]:
        """Return the run's JSON object."""
        stats = self._pool.stats()
        counters = stats.counters
        size = self._pool.config.page_bytes
        heaviest = max(self.detail, key=lambda line: line["evicted_bytes"])
        return self.fields(
            held_bytes=stats.retained_bytes,
            below=self._restores.told(),
            evictions=counters.evictions,
            truncations=counters.truncations,
            superseded=counters.superseded,
            evicted_bytes=counters.evicted_pages * size,
            largest_admission_evicted_bytes=heaviest["evicted_bytes"],
            largest_admission_needed_bytes=heaviest["needed_bytes"],
            largest_victim_bytes=max(line["victim_max_bytes"] for line in self.detail),
            peak_bytes=counters.peak_retained_pages * size,
            peak_slab_bytes=counters.peak_used_pages * size,
            images_saved=counters.images_saved,
            captures_skipped=counters.captures_skipped,
            lookup_us=self._lookup_us(),
        )

    def _lookup_us(self) -> dict[str, float] | None:
        if not self.lookup_seconds:
            return None
        p50, p99 = np.percentile(np.array(self.lookup_seconds) * 1e6, [50, 99]).tolist()
        return {"p50": round(p50, 2), "p99": round(p99, 2)}
