"""The JSON of the pool's own endpoints: sizes, positions and reasons, never text or tokens."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

from ninfer_pool.core.results import EntryInfo, TierStats, reuse_of
from ninfer_pool.runner.request import Sequence
from ninfer_pool.server.chat_request import COUNTS, OUTCOME, fields_of
from ninfer_pool.server.errors import ApiError
from ninfer_pool.server.metrics import Past
from ninfer_pool.server.pool_metrics import bytes_by_use
from ninfer_pool.server.request import ServedRequest
from ninfer_pool.server.service import Service

MOST_ENTRIES = 256
"""Entries listed one by one, the newest first."""


def pool(service: Service, *, salt: str | None) -> dict[str, Any]:
    """Return the answer to ``GET /pool`` for a tenant; byte totals count every tenant."""
    config, stats = service.runner.pool.config, service.runner.pool.stats()
    uses = bytes_by_use(stats, page_bytes=config.page_bytes)
    capacity = service.runner.capacity
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
            "page_bytes": config.page_bytes,
            "image_bytes": capacity.image_bytes,
            "text": str(capacity),
        },
        "lanes": _lanes(service, salt),
        "running": service.engine.running,
        "queued": service.engine.queued,
        "bytes": {
            "total": sum(uses.values()),
            "free": uses["free"],
            "retained": stats.retained_bytes,
            "kv": uses["kv"],
            "images": uses["image"],
            "pinned": stats.pinned_bytes,
            "running": uses["running"],
        },
        "pages": {"total": stats.pages_total, "free": stats.pages_free},
        "entries": [_entry(service, info) for info in _visible(service, salt)],
        # They count every tenant's requests: only for an operator, who gives no salt.
        "counters": dataclasses.asdict(stats.counters) if salt is None else None,
        "totals": tenant.totals(),
        "history": list(tenant.history),
        "requests": [_request(past) for past in list(tenant.requests)],
        "tiers": [_tier(each, salt) for each in stats.tiers],
    }


def _visible(service: Service, salt: str | None) -> list[EntryInfo]:
    return service.runner.pool.entries(where=lambda n: n.salt == salt, newest=MOST_ENTRIES)[::-1]


def _entry(service: Service, info: EntryInfo) -> dict[str, Any]:
    # An entry below the device may be from an earlier run: its age is unknown.
    on_device = info.tier == "device"
    age, idle = service.metrics.ages(info.entry) if on_device else (None, None)
    superseded = set(info.superseded)
    return {
        **fields_of(info, "key", "tokens", "lane", "bytes"),
        "kv_bytes": info.bytes - info.image_bytes,
        **fields_of(info, "image_bytes", "hits", "priority", "pinned", "released"),
        "age_seconds": age,
        "idle_seconds": idle,
        "checkpoints": [
            {"position": position, "kind": kind, "superseded": position in superseded}
            for position, kind in info.checkpoints
        ],
        "tier": info.tier,
    }


def _tier(stats: TierStats, salt: str | None) -> dict[str, Any]:
    """Describe a tier below the device; under a salt, its bytes alone."""
    public = ("tier", "bytes", "budget_bytes")
    return {
        name: value if salt is None or name in public else None
        for name, value in dataclasses.asdict(stats).items()
    }


def _lanes(service: Service, salt: str | None) -> list[dict[str, Any]]:
    lanes = [_lane(lane, "idle") for lane in range(service.runner.pool.config.lanes)]
    for request in list(service.live.values()):
        running = request.submitted.sequence if request.submitted is not None else None
        if running is not None and not running.lease.ended:
            mine = request.chat.control.salt == salt
            lanes[running.lane] = _busy(request, running) if mine else _lane(running.lane, "busy")
    return lanes


def _lane(lane: int, state: str) -> dict[str, Any]:
    """Describe an idle lane, or one that is ``busy`` with another tenant's request."""
    nothing = dict.fromkeys(("prompt_tokens", "cached_tokens", "position", "output_tokens"), 0)
    return {"lane": lane, "state": state, "request": None, **nothing, "reuse": None, "tier": None}


def _busy(request: ServedRequest, running: Sequence) -> dict[str, Any]:
    return {
        "lane": running.lane,
        "state": "decode" if running.ready else "prefill",
        "request": request.number,
        "prompt_tokens": len(request.prompt),
        "cached_tokens": running.lease.start,
        "position": running.lease.frontier,
        "output_tokens": len(running.tokens),
        "reuse": running.lease.reuse,
        "tier": running.tier,
    }


def _request(past: Past) -> dict[str, Any]:
    report = past.report
    return {
        "request": report.number,
        **fields_of(report, "endpoint", "arrived", *COUNTS, *OUTCOME, "lane", "key"),
        "ttft_ms": 1000 * report.first_token_seconds,
        "queue_ms": 1000 * report.queued_seconds,
        "total_ms": 1000 * report.seconds,
        **fields_of(past, "parted_at", "parted_in"),
        "tier": report.tier,
    }


# -- one request, one entry ----------------------------------------------------------------


def explanation(service: Service, request: ServedRequest) -> dict[str, Any]:
    """Return the answer to ``POST /pool/explain``: how deep the request would hit, and why."""
    read = request.chat.control.read and service.settings.read
    found = service.runner.pool.explain(request.prompt, read=read)
    parted = found.diverged_at
    return {
        **fields_of(found, "reason", "tokens", "matched", "resumable", "lost", "kind"),
        "reuse": reuse_of(found.kind if found.resumable else None),
        "exact": found.exact,
        "diverged_at": parted,
        "diverged_in": None if parted is None else request.part_at(parted),
        "helps": list(found.helps),
        "boundaries": [list(boundary) for boundary in request.rendered.boundaries],
        "key": service.runner.pool.key(request.prompt),
        "text": str(found),
        "tier": found.tier,
    }


def entry(service: Service, key: str, *, salt: str | None) -> dict[str, Any]:
    """Return the answer to ``GET /pool/entries/{key}``: the entry, in figures and in words."""
    entries = [each for each in service.runner.pool.find(key) if each.namespace.salt == salt]
    if not entries:
        raise ApiError(404, f"no entry has the key {key!r}", param="key")
    info = _entry(service, entries[0])
    requests = [
        _request(past) for past in list(service.recent.of(salt).requests) if past.report.key == key
    ]
    return {"entry": info, "explanation": list(_sentences(info, requests)), "requests": requests}


def _sentences(info: dict[str, Any], requests: list[dict[str, Any]]) -> Iterator[str]:
    """Describe what an entry makes resumable, what it costs, and when it would be evicted."""
    points = [point for point in info["checkpoints"] if not point["superseded"]]
    listed = ", ".join(f"{point['position']:,} ({point['kind']})" for point in points)
    yield (
        f"A prompt that begins with these {info['tokens']:,} tokens resumes at the deepest of its "
        f"checkpoints that the prompt reaches: {listed}."
    )
    yield (
        f"Only this entry holds {info['bytes']:,} bytes: {info['kv_bytes']:,} of KV, "
        f"{info['image_bytes']:,} of states. Evicting it frees them."
    )
    if info["tier"] != "device":
        yield (
            f"It is stored in the {info['tier']} tier: a request that resumes from it has that "
            "checkpoint promoted to the device first."
        )
    yield _hits(info["hits"], info["idle_seconds"])
    yield _fate(info)
    superseded = len(info["checkpoints"]) - len(points)
    if superseded:
        yield f"{superseded} of its checkpoints are superseded: evicted before any entry is."
    if requests:
        last = requests[0]
        yield (
            f"Request {last['request']} left it: {last['cached_tokens']:,} of its "
            f"{last['prompt_tokens']:,} prompt tokens were resumed ({last['reuse']}, "
            f"{last['reason']})."
        )


def _hits(hits: int, idle_seconds: float | None) -> str:
    if not hits:
        return "No request has resumed from it yet."
    times = "once" if hits == 1 else f"{hits:,} times"
    last = "" if idle_seconds is None else f", the last time {idle_seconds:,.0f} seconds ago"
    return f"It was resumed {times}{last}."


def _fate(info: dict[str, Any]) -> str:
    if info["pinned"]:
        return "It is pinned: never evicted until it is unpinned."
    if info["released"]:
        return "Its conversation is over (released): evicted before others of its priority."
    return "It is evicted when room is needed and the policy ranks it lowest."


def clear(service: Service, *, salt: str | None) -> dict[str, int]:
    """Evict the entries of one tenant, or all entries where no salt is given; count them.

    Entries that are pinned or being resumed are kept.
    """
    inner = service.runner.pool
    with inner.lock:
        found = inner.entries(where=None if salt is None else lambda n: n.salt == salt)
        removed = inner.clear() if salt is None else sum(inner.evict(info.key) for info in found)
    return {"removed": removed, "kept": len(found) - removed}
