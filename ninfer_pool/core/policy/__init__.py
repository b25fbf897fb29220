"""Policies: in what order retained entries may go."""

from __future__ import annotations

from collections.abc import Callable

from ninfer_pool.core.policy.base import Policy, Ranked
from ninfer_pool.core.policy.classical import Fifo, Gdsf, Lru
from ninfer_pool.core.policy.default import Default, ReuseInterval
from ninfer_pool.core.policy.marconi import Marconi
from ninfer_pool.core.policy.s3fifo import S3Fifo

POLICIES: dict[str, Callable[[], Policy]] = {
    "default": Default,
    "lru": Lru,
    "fifo": Fifo,
    "gdsf": Gdsf,
    "marconi": Marconi,
    "s3fifo": S3Fifo,
    "return": ReuseInterval,
}
"""Every policy by name; each value makes a new instance."""

__all__ = ["POLICIES", "Policy", "Ranked"]
