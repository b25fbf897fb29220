"""The last requests of each tenant, for the page."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any

from ninfer_pool.server.chat_request import COUNTS, Report, fields_of

REQUESTS, HISTORY, TENANTS = 64, 512, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """A request that ended, and where its prompt diverged from the retained ones."""

    report: Report
    parted_at: int | None
    parted_in: str | None


@dataclass(slots=True, kw_only=True)
class Tenant:
    """The last requests of one tenant, the newest first, and sums over all its requests."""

    requests: deque[Past] = field(default_factory=lambda: deque(maxlen=REQUESTS))
    history: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=HISTORY))
    """(end since the epoch, prompt tokens, cached tokens), the newest last."""
    sums: Counter[str] = field(default_factory=Counter)

    def totals(self) -> dict[str, Any]:
        """Return the sums as JSON."""
        sums = {name: self.sums[name] for name in ("requests", *COUNTS)}
        prompt, cached = sums["prompt_tokens"], sums["cached_tokens"]
        return {**sums, "hit_rate": cached / prompt if prompt else 0.0}


class Recent:
    """Keeps a bounded number of tenants; the least recently active is dropped first."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str | None, Tenant] = OrderedDict()

    def note(self, past: Past) -> None:
        """Add a request that ended."""
        report = past.report
        salt = report.control.salt
        tenant = self._tenants.setdefault(salt, Tenant())
        self._tenants.move_to_end(salt)
        tenant.requests.appendleft(past)
        tenant.history.append((time.time(), report.prompt_tokens, report.cached_tokens))
        tenant.sums.update(requests=1, **fields_of(report, *COUNTS))
        if len(self._tenants) > TENANTS:
            self._tenants.popitem(last=False)

    def of(self, salt: str | None) -> Tenant:
        """Return one tenant's requests; empty for an unknown tenant."""
        return self._tenants.get(salt) or Tenant()
