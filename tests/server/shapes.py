"""What the pool's own endpoints answer, written down: each key, and the types of its value."""

from __future__ import annotations

from typing import Any

NUMBER = (int, float)
NONE = type(None)

CHECKPOINT = {"position": int, "kind": str, "superseded": bool}
ENTRY = {
    "key": str,
    "tokens": int,
    "lane": int,
    "bytes": int,
    "kv_bytes": int,
    "image_bytes": int,
    "hits": int,
    "priority": int,
    "pinned": bool,
    "released": bool,
    "age_seconds": NUMBER,
    "idle_seconds": NUMBER,
    "checkpoints": [CHECKPOINT],
    "tier": str,
}
REQUEST = {
    "request": int,
    "endpoint": str,
    "arrived": float,
    "prompt_tokens": int,
    "cached_tokens": int,
    "output_tokens": int,
    "reuse": str,
    "reason": str,
    "exact": bool,
    "finish": str,
    "lane": (int, NONE),
    "key": (str, NONE),
    "ttft_ms": NUMBER,
    "queue_ms": NUMBER,
    "total_ms": NUMBER,
    "parted_at": (int, NONE),
    "parted_in": (str, NONE),
    "tier": (str, NONE),
}
LANE = {
    "lane": int,
    "state": str,
    "request": (int, NONE),
    "prompt_tokens": int,
    "cached_tokens": int,
    "position": int,
    "output_tokens": int,
    "reuse": (str, NONE),
    "tier": (str, NONE),
}
TIER = {
    "tier": str,
    **dict.fromkeys(
        (
            *("entries", "checkpoints", "bytes", "budget_bytes", "stored", "stored_bytes"),
            *("images", "promoted", "promoted_bytes", "dropped", "failed", "damaged"),
        ),
        int,
    ),
}
COUNTERS = dict.fromkeys(
    (
        *("acquired", "committed", "refused", "input_tokens", "reused_tokens", "evictions"),
        *("truncations", "superseded", "superseded_evicted", "evicted_pages", "expired"),
        *("images_saved", "captures_skipped", "skipped_no_room", "skipped_media"),
        *("position_mismatches", "quarantined", "interned_pages"),
        *("peak_retained_pages", "peak_used_pages"),
    ),
    int,
)
POOL = {
    "model": str,
    "policy": str,
    "affinity": str,
    "max_entries": (int, NONE),
    "single_lane": bool,
    "now": float,
    "uptime_seconds": NUMBER,
    "capacity": {
        "tokens": int,
        "conversations": int,
        "page_bytes": int,
        "image_bytes": int,
        "text": str,
    },
    "lanes": [LANE],
    "running": int,
    "queued": int,
    "bytes": dict.fromkeys(("total", "free", "retained", "kv", "images", "pinned", "running"), int),
    "pages": {"total": int, "free": int},
    "entries": [ENTRY],
    "counters": COUNTERS,
    "totals": {
        "requests": int,
        "prompt_tokens": int,
        "cached_tokens": int,
        "output_tokens": int,
        "hit_rate": NUMBER,
    },
    "history": list,
    "requests": [REQUEST],
    "tiers": [TIER],
}
DETAIL = {"entry": ENTRY, "explanation": [str], "requests": [REQUEST]}
EXPLANATION = {
    "reason": str,
    "tokens": int,
    "matched": int,
    "resumable": int,
    "lost": int,
    "kind": (str, NONE),
    "reuse": str,
    "exact": bool,
    "diverged_at": (int, NONE),
    "diverged_in": (str, NONE),
    "helps": [str],
    "boundaries": list,
    "key": str,
    "text": str,
    "tier": (str, NONE),
}


def faults(value: Any, shape: Any, *, at: str = "") -> list[str]:
    """Where a value is not of a shape: a dict has just these keys, a list items of one shape."""
    if isinstance(shape, dict):
        if not isinstance(value, dict) or value.keys() != shape.keys():
            return [f"{at}: {value!r:.80}"]
        return [each for key in shape for each in faults(value[key], shape[key], at=f"{at}.{key}")]
    if isinstance(shape, list):
        if not isinstance(value, list):
            return [f"{at}: {value!r:.80}"]
        return [each for item in value for each in faults(item, shape[0], at=f"{at}[]")]
    types = shape if isinstance(shape, tuple) else (shape,)
    return [] if type(value) in types else [f"{at}: {value!r:.80}"]
