"""What the pool's own endpoints answer: sizes, positions and reasons, never text or tokens."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from typing import Any

from ninfer_pool.core.namespace import Namespace
from ninfer_pool.core.results import EntryInfo, TierStats, reuse_of
from ninfer_pool.server.errors import ApiError
from ninfer_pool.server.recent import Past
from ninfer_pool.server.request import Asked, Request, tier_of
from ninfer_pool.server.service import Service

MOST_ENTRIES = 256
"""Entries that are told one by one, the newest first."""


def pool(service: Service, *, salt: str | None) -> dict[str, Any]:
    """Return what ``GET /pool`` answers to a tenant; totals of bytes are everybody's."""
    config, stats = service.runner.pool.config, service.runner.pool.stats()
    size, capacity = config.page_bytes, service.runner.capacity
    tenant = service.recent.of(salt)
    return {
        "model": service.settings.model_ids[0],
        "policy": config.policy if isinstance(config.policy, str) else "custom",
        "affinity": config.affinity,
        "max_entries": config.max_entries,
        "single_lane": service.settings.single_lane,
        "now": time.time(),
        "uptime_seconds": time.time() - service.begun,
        "capacity": {
            "tokens": capacity.tokens,
            "conversations": capacity.conversations,
            "page_bytes": size,
            "image_bytes": capacity.image_bytes,
            "text": str(capacity),
        },
        "lanes": _lanes(service, salt),
        "running": service.engine.running,
        "queued": service.engine.queued,
        "bytes": {
            "total": stats.pages_total * size,
            "free": stats.pages_free * size,
            "retained": stats.retained_bytes,
            "kv": stats.retained_bytes - stats.image_bytes,
            "images": stats.image_bytes,
            "pinned": stats.pinned_bytes,
            "running": (stats.pages_total - stats.pages_free) * size - stats.retained_bytes,
        },
        "pages": {"total": stats.pages_total, "free": stats.pages_free},
        "entries": [_entry(service, info) for info in _visible(service, salt)],
        # They count everybody's requests: an operator's, who asks without a salt.
        "counters": dataclasses.asdict(stats.counters) if salt is None else None,
        "totals": tenant.totals(),
        "history": list(tenant.history),
        "requests": [_request(past) for past in list(tenant.requests)],
        "tiers": [_tier(each, salt) for each in stats.tiers],
    }


def _visible(service: Service, salt: str | None) -> list[EntryInfo]:
    def mine(namespace: Namespace) -> bool:
        return namespace.salt == salt

    return service.runner.pool.entries(where=mine, newest=MOST_ENTRIES)[::-1]


def _entry(service: Service, info: EntryInfo) -> dict[str, Any]:
    # How old an entry is that lies only below the device is not known: it may be another run's.
    below = info.tier != "device"
    age, idle = (None, None) if below else service.metrics.ages(info.entry)
    superseded = set(info.superseded)
    return {
        "key": info.key,
        "tokens": info.tokens,
        "lane": info.lane,
        "bytes": info.bytes,
        "kv_bytes": info.bytes - info.image_bytes,
        "image_bytes": info.image_bytes,
        "hits": info.hits,
        "priority": info.priority,
        "pinned": info.pinned,
        "released": info.released,
        "age_seconds": age,
        "idle_seconds": idle,
        "checkpoints": [
            {"position": position, "kind": kind, "superseded": position in superseded}
            for position, kind in info.checkpoints
        ],
        "tier": info.tier,
    }


def _tier(stats: TierStats, salt: str | None) -> dict[str, Any]:
    """What a tier below the device holds; all but its bytes is an operator's, without a salt."""
    told = dataclasses.asdict(stats)
    everybodys = ("tier", "bytes", "budget_bytes")
    return {
        name: value if salt is None or name in everybodys else None for name, value in told.items()
    }


def _lanes(service: Service, salt: str | None) -> list[dict[str, Any]]:
    lanes = [_lane(lane, "idle") for lane in range(service.runner.pool.config.lanes)]
    for request in list(service.live.values()):
        running = request.handle.running if request.handle is not None else None
        if running is not None and not running.lease.ended:
            mine = request.asked.call.control.salt == salt
            lanes[running.lane] = _busy(request) if mine else _lane(running.lane, "busy")
    return lanes


def _lane(lane: int, state: str) -> dict[str, Any]:
    """A lane of which nothing more is told; ``busy``: another tenant's."""
    nothing = dict.fromkeys(("prompt_tokens", "cached_tokens", "position", "output_tokens"), 0)
    return {"lane": lane, "state": state, "request": None, **nothing, "reuse": None, "tier": None}


def _busy(request: Request) -> dict[str, Any]:
    assert request.handle is not None
    running = request.handle.running
    assert running is not None
    return {
        "lane": running.lane,
        "state": "decode" if running.ready else "prefill",
        "request": request.number,
        "prompt_tokens": len(running.prompt),
        "cached_tokens": running.lease.start,
        "position": running.lease.frontier,
        "output_tokens": len(running.tokens),
        "reuse": running.lease.reuse,
        "tier": tier_of(request.handle),
    }


def _request(past: Past) -> dict[str, Any]:
    report = past.report
    return {
        "request": report.number,
        "endpoint": report.endpoint,
        "arrived": report.arrived,
        "prompt_tokens": report.prompt_tokens,
        "cached_tokens": report.cached_tokens,
        "output_tokens": report.output_tokens,
        "reuse": report.reuse,
        "reason": report.reason,
        "exact": report.exact,
        "finish": report.finish,
        "lane": report.lane,
        "key": report.key,
        "ttft_ms": 1000 * report.first_token_seconds,
        "queue_ms": 1000 * report.queued_seconds,
        "total_ms": 1000 * report.seconds,
        "parted_at": past.parted_at,
        "parted_in": past.parted_in,
        "tier": report.tier,
    }


# -- one request, one entry ----------------------------------------------------------------


def explanation(service: Service, asked: Asked) -> dict[str, Any]:
    """Return what ``POST /pool/explain`` answers: what the request would find, and why."""
    found = service.explain(asked)
    parted = found.diverged_at
    return {
        "reason": found.reason,
        "tokens": found.tokens,
        "matched": found.matched,
        "resumable": found.resumable,
        "lost": found.lost,
        "kind": found.kind,
        "reuse": reuse_of(found.kind if found.resumable else None),
        "exact": found.exact,
        "diverged_at": parted,
        "diverged_in": None if parted is None else asked.part_at(parted),
        "helps": list(found.helps),
        "boundaries": [list(boundary) for boundary in asked.ask.boundaries],
        "key": service.runner.pool.key(asked.prompt),
        "text": str(found),
        "tier": found.tier,
    }


def entry(service: Service, key: str, *, salt: str | None) -> dict[str, Any]:
    """Return what ``GET /pool/entries/{key}`` answers: the entry, and what it means."""
    entries = [each for each in service.runner.pool.find(key) if each.namespace.salt == salt]
    if not entries:
        raise ApiError(404, f"no entry has the key {key!r}", param="key")
    told = _entry(service, entries[0])
    past = list(service.recent.of(salt).requests)
    requests = [_request(each) for each in past if each.report.key == key]
    return {"entry": told, "explanation": _sentences(told, requests), "requests": requests}


def _sentences(told: dict[str, Any], requests: list[dict[str, Any]]) -> list[str]:
    """Say in words what an entry spares, what it costs, and when it would go."""
    useful = [each for each in told["checkpoints"] if not each["superseded"]]
    points = ", ".join(f"{each['position']:,} ({each['kind']})" for each in useful)
    lines = [
        f"A prompt that begins with these {told['tokens']:,} tokens resumes at the deepest of its "
        f"checkpoints that the prompt reaches: {points}.",
        f"Only this entry holds {told['bytes']:,} bytes: {told['kv_bytes']:,} of KV, "
        f"{told['image_bytes']:,} of states. That is what evicting it frees.",
        *_place(told),
        _uses(told),
        *_fate(told),
    ]
    if requests:
        last = requests[0]
        lines.append(
            f"Request {last['request']} left it: {last['cached_tokens']:,} of its "
            f"{last['prompt_tokens']:,} prompt tokens were resumed ({last['reuse']}, "
            f"{last['reason']})."
        )
    return lines


def _uses(told: dict[str, Any]) -> str:
    if not told["hits"]:
        return "No request has resumed from it yet."
    times = "once" if told["hits"] == 1 else f"{told['hits']:,} times"
    if told["idle_seconds"] is None:
        return f"It was resumed {times}."
    return f"It was resumed {times}, the last time {told['idle_seconds']:,.0f} seconds ago."


def _place(told: dict[str, Any]) -> Iterable[str]:
    if told["tier"] != "device":
        yield (
            f"It lies in the {told['tier']} tier: a request that resumes from it has that "
            "checkpoint brought back to the device first."
        )


def _fate(told: dict[str, Any]) -> Iterable[str]:
    if told["pinned"]:
        yield "It is pinned: nothing evicts it until it is unpinned."
    elif told["released"]:
        yield "Its conversation is over (released): it goes before others of its priority."
    else:
        yield "It goes when room is needed and the policy ranks it lowest."
    superseded = [each for each in told["checkpoints"] if each["superseded"]]
    if superseded:
        yield f"{len(superseded)} of its checkpoints are superseded: they go before any entry does."


def clear(service: Service, *, salt: str | None) -> dict[str, int]:
    """Remove a tenant's entries, or everybody's where no salt is given; tell how many went.

    What is pinned or being resumed from is kept.
    """
    inner = service.runner.pool
    with inner.lock:
        found = inner.entries(where=None if salt is None else lambda n: n.salt == salt)
        removed = inner.clear() if salt is None else sum(inner.evict(info.key) for info in found)
    return {"removed": removed, "kept": len(found) - removed}
