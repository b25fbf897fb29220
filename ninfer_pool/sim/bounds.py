"""The bounds of a sweep: today's single lane, an endless pool, and one that sees the future."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ninfer_pool.core.policy.classical import Lru
from ninfer_pool.sim.clairvoyant import MODES, Clairvoyant, Mode
from ninfer_pool.sim.replay import OnProgress, Outcome, Plan, Setup, pool_config, run_plan
from ninfer_pool.sim.single_lane import single_lane
from ninfer_pool.sim.tally import Sums
from ninfer_pool.sim.tokens import TokenSource
from ninfer_pool.sim.trace import Trace

NO_POOL: dict[str, Any] = dict.fromkeys(
    (
        "evictions",
        "truncations",
        "superseded",
        "evicted_bytes",
        "largest_admission_evicted_bytes",
        "largest_admission_needed_bytes",
        "largest_victim_bytes",
        "peak_bytes",
        "peak_slab_bytes",
        "images_saved",
        "captures_skipped",
    ),
    0,
)
"""What a run without a pool has to say of one."""


def bounds(
    trace: Trace,
    source: TokenSource,
    setup: Setup,
    online: Sequence[Outcome],
    entries: Sequence[int],
    budgets: Sequence[int],
    on_progress: OnProgress | None = None,
) -> Iterator[Outcome]:
    """Yield the bounds' runs; ``online`` are the sweep's, which `clairvoyant` never falls below.

    Bounds have the device alone. Where the sweep's runs have tiers below it, they are no measure
    for it.
    """
    if setup.tiers:
        setup, online = replace(setup, tiers=()), ()
    yield run_single_lane(trace, setup)
    yield run_plan(trace, source, setup, Plan(policy="endless", make=Lru), on_progress)
    for most in entries:
        yield _clairvoyant(trace, source, setup, online, Plan(policy="", entries=most), on_progress)
    for budget in budgets:
        plan = Plan(policy="", budget_bytes=budget)
        yield _clairvoyant(trace, source, setup, online, plan, on_progress)


def run_single_lane(trace: Trace, setup: Setup) -> Outcome:
    """Return today's behaviour: each lane keeps its last request alone."""
    sums = Sums(trace, setup, Plan(policy="single_lane"))
    served = single_lane(
        trace,
        lanes=setup.lanes,
        prefill_rate=setup.prefill_rate,
        decode_rate=setup.decode_rate,
    )
    for result in sorted(served, key=lambda result: result.id):
        lost = max(0, result.matched - result.reused)
        reason = "no_checkpoint_before" if lost else "hit" if result.reused else "no_entry"
        sums.add(
            trace.requests[result.id],
            reused=result.reused,
            exact=not result.reused,
            reuse=result.reuse,
            reason=reason,
            diverged_at=None,
            lost=lost,
        )
    return Outcome(sums.fields(**NO_POOL, lookup_us=None), sums.detail)


def _clairvoyant(
    trace: Trace,
    source: TokenSource,
    setup: Setup,
    online: Sequence[Outcome],
    plan: Plan,
    on_progress: OnProgress | None,
) -> Outcome:
    """Return the best of the offline plans, and of the online runs under the same bound."""
    best = max(
        (_foreseen(trace, source, setup, plan, mode, on_progress) for mode in MODES),
        key=lambda outcome: outcome.run["reused_tokens"],
    )
    for outcome in online:
        run = outcome.run
        same = (run["entries"], run["budget_bytes"]) == (plan.entries, plan.budget_bytes)
        if same and run["reused_tokens"] > best.run["reused_tokens"]:
            best = Outcome({**run, "policy": "clairvoyant"}, outcome.detail)
    return best


def _foreseen(
    trace: Trace,
    source: TokenSource,
    setup: Setup,
    plan: Plan,
    mode: Mode,
    on_progress: OnProgress | None,
) -> Outcome:
    config = pool_config(trace, setup, Plan(policy="lru", budget_bytes=plan.budget_bytes))
    policy = Clairvoyant(
        trace,
        mode=mode,
        entries=plan.entries,
        pages=config.retained_pages,
        image_pages=config.image_pages,
        page_tokens=config.page_tokens,
    )
    foreseen = Plan(
        policy="clairvoyant",
        entries=plan.entries,
        budget_bytes=plan.budget_bytes,
        make=lambda: policy,
        now=policy.now,
    )
    return run_plan(trace, source, setup, foreseen, on_progress)
