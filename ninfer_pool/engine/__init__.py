"""The step loop over a runner's lanes: many requests at once, with or without a server."""

from __future__ import annotations

from ninfer_pool.engine.engine import Engine
from ninfer_pool.engine.handle import Handle, Outcome, unserved

__all__ = ["Engine", "Handle", "Outcome", "unserved"]
