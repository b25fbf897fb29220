"""Runs as the simulator gives them, with made-up figures, for tests of what is made from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

GIB = 2**30
REACH = {"clairvoyant": 1.2, "default": 1.0, "lru": 0.8}


def made_runs(
    trace: str = "made",
    *,
    policies: Sequence[str] = ("default", "lru"),
    entries: Sequence[int] = (1, 2, 4),
    budgets: Sequence[int] = (8 * GIB, 16 * GIB),
) -> list[dict[str, Any]]:
    """All runs of one trace, in the order of a sweep; hit rates grow with K and bytes."""
    sizes: list[tuple[int | None, int | None]] = [(k, None) for k in entries]
    sizes += [(None, budget) for budget in budgets]
    runs = [made_run(trace, policy, k, budget) for policy in policies for k, budget in sizes]
    runs += [made_run(trace, bound, None, None) for bound in ("single_lane", "endless")]
    return runs + [made_run(trace, "clairvoyant", k, budget) for k, budget in sizes]


def made_run(trace: str, policy: str, entries: int | None, budget: int | None) -> dict[str, Any]:
    """One element of the JSON contract's `runs`."""
    room = entries or (budget or 0) / (4 * GIB)
    rate = {"single_lane": 0.25, "endless": 0.95}.get(policy)
    if rate is None:
        rate = 0.95 * (1 - math.exp(-room * REACH.get(policy, 0.5)))
    total = 2_000_000
    reused = int(total * rate)
    device = made_tier("device", tokens=reused, budget=budget)
    return {
        "trace": trace, "model": "qwen3.8-27b", "kv": "int8-g64", "mtp": True, "lanes": 1,
        "affinity": "prefer", "prefill_rate": 1140.0, "decode_rate": 40.0, "policy": policy,
        "entries": entries, "budget_bytes": budget, "requests": 40, "refused": 0,
        "host_budget_bytes": None, "disk_budget_bytes": None,
        "host_rate": None, "disk_rate": None, "tiers": [device],
        "input_tokens": total, "reused_tokens": reused, "hit_rate": reused / total,
        "prefilled_tokens": total - reused,
        "reuse": {"append_frontier": 25, "restore_turn_checkpoint": 10, "full_reset": 5},
        "reasons": {
            "hit": {"requests": 30, "tokens": 0},
            "evicted": {"requests": 4, "tokens": (total - reused) // 2},
            "no_checkpoint_before": {"requests": 6, "tokens": 1234},
        },
        "evictions": 7, "truncations": 1, "superseded": 3, "evicted_bytes": 7 * GIB,
        "largest_admission_evicted_bytes": GIB, "largest_admission_needed_bytes": GIB,
        "largest_victim_bytes": GIB, "peak_bytes": 12 * GIB, "peak_slab_bytes": 16 * GIB,
        "images_saved": 60, "captures_skipped": 0, "lookup_us": None,
    }  # fmt: skip


def made_tier(
    tier: str, *, tokens: int, budget: int | None, promoted: int = 0, seconds: float = 0.0
) -> dict[str, Any]:
    """One element of a run's `tiers`."""
    return {
        "tier": tier, "reused_tokens": tokens, "hits": 35, "promoted_bytes": promoted,
        "stored_bytes": 2 * promoted, "images": 20, "restore_seconds": seconds,
        "bytes": 4 * GIB, "budget_bytes": budget, "dropped": 1,
    }  # fmt: skip


def with_tiers(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same runs with host memory and disk below the online ones."""
    for run in runs:
        if run["policy"] in ("single_lane", "endless", "clairvoyant"):
            continue
        run |= {"host_budget_bytes": 64 * GIB, "host_rate": 25e9}
        run |= {"disk_budget_bytes": 1024 * GIB, "disk_rate": 1.6e9}
        host = run["reused_tokens"] // 4
        run["tiers"][0]["reused_tokens"] -= 2 * host
        run["tiers"] += [
            made_tier("host", tokens=host, budget=64 * GIB, promoted=10 * GIB, seconds=0.4),
            made_tier("disk", tokens=host, budget=1024 * GIB, promoted=3 * GIB, seconds=2.0),
        ]
    return runs
