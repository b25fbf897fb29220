"""The detail lines of one run, and the run's fields summed up from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from ninfer_pool.core.lease import Lease
from ninfer_pool.sim.setup import RunPlan, Setup
from ninfer_pool.sim.tiers import head_fields, tier_fields
from ninfer_pool.sim.trace import Trace, TraceRequest

REFUSED: dict[str, Any] = {
    "reused": 0,
    "exact": True,
    "tier": None,
    "reuse": "refused",
    "reason": "no_room",
    "diverged_at": None,
    "lost": 0,
    "evicted_bytes": 0,
    "needed_bytes": 0,
    "victim_max_bytes": 0,
}
"""A detail line after the request's own fields, in order; here of a request that cannot fit."""
NO_POOL: dict[str, Any] = {
    "evictions": 0,
    "truncations": 0,
    "superseded": 0,
    "evicted_bytes": 0,
    "largest_admission_evicted_bytes": 0,
    "largest_admission_needed_bytes": 0,
    "largest_victim_bytes": 0,
    "peak_bytes": 0,
    "peak_slab_bytes": 0,
    "images_saved": 0,
    "captures_skipped": 0,
    "lookup_us": None,
}
"""The fields of a run that only a pool fills, in order."""


class Tally:
    """The sums of one run."""

    def __init__(self, trace: Trace, setup: Setup, plan: RunPlan) -> None:
        self.detail: list[dict[str, Any]] = []
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

    def add(self, request: TraceRequest, **fields: Any) -> None:
        """Add a request's detail line; without fields it is one that can never fit."""
        self.detail.append(
            {
                "id": request.id,
                "session": request.session,
                "kind": request.kind,
                "input": request.input,
                **REFUSED,
                **fields,
            }
        )

    def serve(self, request: TraceRequest, lease: Lease) -> None:
        """Add a request whose lease has ended."""
        explanation = lease.explanation
        self.add(
            request,
            reused=lease.start,
            exact=lease.exact,
            tier=(explanation.tier or "device") if lease.start else None,
            reuse=lease.reuse,
            reason=explanation.reason,
            diverged_at=explanation.diverged_at,
            lost=explanation.lost,
            evicted_bytes=lease.evicted_bytes,
            needed_bytes=lease.needed_bytes,
            victim_max_bytes=lease.victim_max_bytes,
        )

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens that needed no prefill."""
        return sum(line["reused"] for line in self.detail)

    def run(
        self, *, held_bytes: int = 0, below: Iterable[dict[str, Any]] = (), **pool: Any
    ) -> dict[str, Any]:
        """Return the run's JSON object; ``pool`` are fields of `NO_POOL`.

        ``held_bytes`` are retained on the device at the end, ``below`` the tiers under it.
        """
        served = [line for line in self.detail if line["reuse"] != "refused"]
        tokens, reused = sum(line["input"] for line in served), self.reused_tokens
        heaviest = max(self.detail, key=lambda line: line["evicted_bytes"])
        return {
            **self._head,
            "refused": len(self.detail) - len(served),
            "input_tokens": tokens,
            "reused_tokens": reused,
            "hit_rate": reused / tokens if tokens else 0.0,
            "prefilled_tokens": tokens - reused,
            "reuse": dict(sorted(Counter(line["reuse"] for line in served).items())),
            "reasons": _reasons(served),
            "tiers": self._tiers(held_bytes, below),
            **NO_POOL,
            "largest_admission_evicted_bytes": heaviest["evicted_bytes"],
            "largest_admission_needed_bytes": heaviest["needed_bytes"],
            "largest_victim_bytes": max(line["victim_max_bytes"] for line in self.detail),
            **pool,
        }

    def _tiers(self, held_bytes: int, below: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        budget = self._head["budget_bytes"]
        tiers = [tier_fields("device", bytes=held_bytes, budget_bytes=budget), *below]
        for fields in tiers:
            lines = [line for line in self.detail if line["tier"] == fields["tier"]]
            fields["reused_tokens"] = sum(line["reused"] for line in lines)
            fields["hits"] = len(lines)
        return tiers


def _reasons(served: Iterable[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Return per reason the requests and the tokens that matched but were prefilled again."""
    requests: Counter[str] = Counter()
    lost: Counter[str] = Counter()
    for line in served:
        requests[line["reason"]] += 1
        lost[line["reason"]] += line["lost"]
    return {
        reason: {"requests": requests[reason], "tokens": lost[reason]}
        for reason in sorted(requests)
    }
