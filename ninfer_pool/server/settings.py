"""How a server is set up, beyond the runner that it serves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What every request is served under.

    Args:
        model_ids: names that the model answers to, the one it is listed under first.
        api_key: what clients must show, but for ``/health``; None: nothing.
        default_max_tokens: new tokens of a request that does not say how many.
        max_request_bytes: a larger body is refused.
        max_queue: requests that may wait for a lane; more are refused.
        shutdown_seconds: from being told to stop to the end.
        cors: origins whose pages may call, ``*`` for all.
        read, retain: False: no request resumes, or leaves, anything.
        single_lane: every request is retained and takes the place of the last, as in an engine
            with one lane and no pool.
        template: arguments of the chat template where a request says nothing.
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
