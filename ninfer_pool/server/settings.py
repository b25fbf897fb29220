"""The settings of a server, except those of its runner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings that every request is served under.

    Args:
        model_ids: names of the model; the first is the one that is listed.
        api_key: required of clients, except for ``/health``; None: not required.
        default_max_tokens: new tokens of a request that sets no limit.
        max_request_bytes: a larger body is rejected.
        max_queue: requests that may wait for a lane; more are rejected.
        shutdown_seconds: from the signal to stop to the end of the process.
        cors: origins whose pages may call, ``*`` for all.
        read, retain: False: no request resumes, or leaves, an entry.
        single_lane: every request is retained and replaces the last, as in an engine with one
            lane and no pool.
        template: arguments of the chat template where a request sets none.
    """

    model_ids: tuple[str, ...]
    api_key: str | None = None
    default_max_tokens: int = 1024
    max_request_bytes: int = 32 * MIB
    max_queue: int = 256
    shutdown_seconds: float = 30
    cors: tuple[str, ...] = ()
    read: bool = True
    retain: bool = True
    single_lane: bool = False
    template: Mapping[str, Any] = field(default_factory=dict)
