"""The machine and model of a simulation, one run of it, and the pool that the run needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ninfer_pool.core.config import PoolConfig
from ninfer_pool.core.policy import POLICIES, Policy
from ninfer_pool.sim.geometry import Geometry
from ninfer_pool.sim.tiers import TierSize
from ninfer_pool.sim.trace import Trace, TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The machine and model that serve a trace; rates in tokens per second and lane."""

    geometry: Geometry
    model: str
    kv: str = "int8-g64"
    mtp: bool = True
    lanes: int = 1
    affinity: Literal["prefer", "strict"] = "prefer"
    prefill_rate: float = 1140.0
    decode_rate: float = 40.0
    tiers: tuple[TierSize, ...] = ()
    """The tiers below the device, the fastest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """One run: a policy under one bound."""

    policy: str
    entries: int | None = None
    budget_bytes: int | None = None
    make: Callable[[], Policy] | None = None
    """The policy's factory; None: by name."""
    on_request: Callable[[int], None] | None = None
    """Called with a request's id before each of its calls of the pool."""


@dataclass(slots=True)
class RunOutcome:
    """One finished run: an element of the JSON's ``runs``, and its detail lines."""

    run: dict[str, Any]
    detail: list[dict[str, Any]]


def pool_config(trace: Trace, setup: Setup, plan: RunPlan) -> PoolConfig:
    """Return the config of a plan's pool: the slab is the budget plus lanes x longest request.

    Without a budget the slab has room for all pages of the trace.
    """
    sizes = setup.geometry.sizes(kv=setup.kv, mtp=setup.mtp)
    images = -(-sizes.image_bytes // sizes.page_bytes)
    longest = max(_pages(r, images, sizes.page_tokens, r.total) for r in trace.requests)
    everything = all_pages(trace, images, sizes.page_tokens)
    room = everything if plan.budget_bytes is None else plan.budget_bytes // sizes.page_bytes
    room = max(1 + images, min(room, everything))
    return PoolConfig(
        num_pages=room + setup.lanes * longest,
        page_bytes=sizes.page_bytes,
        image_bytes=sizes.image_bytes,
        page_tokens=sizes.page_tokens,
        lanes=setup.lanes,
        retained_bytes=room * sizes.page_bytes,
        max_entries=plan.entries,
        policy=plan.make or POLICIES[plan.policy],
        affinity=setup.affinity,
        events=0,
    )


def all_pages(trace: Trace, images: int, page_tokens: int) -> int:
    """Return an upper bound of the pages that a trace's requests retain together."""
    return sum(_pages(r, images, page_tokens, r.total - r.shared) for r in trace.requests)


def _pages(request: TraceRequest, images: int, page_tokens: int, tokens: int) -> int:
    captures = 5 + len(request.boundaries)
    return -(-tokens // page_tokens) + 2 + captures * images
