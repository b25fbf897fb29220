"""ninfer_pool: a keyed pool of many retained prefixes for hybrid and plain attention models.

The pool decides and returns operations as plain data; an engine carries them out. See
`PrefixPool` for a first session and ``docs/how-to/embed.md`` for an engine's.
"""

from __future__ import annotations

from ninfer_pool.core.config import PoolConfig
from ninfer_pool.core.entry import Entry
from ninfer_pool.core.identity import Namespace
from ninfer_pool.core.lease import Lease, Pending
from ninfer_pool.core.operations import CopyPage, LoadImage, Operation, ResetLane, SaveImage
from ninfer_pool.core.planner import Chunk
from ninfer_pool.core.policy import POLICIES, Policy
from ninfer_pool.core.pool import PrefixPool
from ninfer_pool.core.prompt import KINDS, Boundary, MediaSpan, Prompt
from ninfer_pool.core.results import EntryInfo, Event, Explanation, Match, Refusal, Stats
from ninfer_pool.errors import (
    ConfigError,
    GeometryError,
    LeaseError,
    ModelError,
    NamespaceError,
    PoolError,
    PromptError,
    TraceError,
    UsageError,
)

__version__ = "0.1.0"

__all__ = [
    "KINDS",
    "POLICIES",
    "Boundary",
    "Chunk",
    "ConfigError",
    "CopyPage",
    "Entry",
    "EntryInfo",
    "Event",
    "Explanation",
    "GeometryError",
    "Lease",
    "LeaseError",
    "LoadImage",
    "Match",
    "MediaSpan",
    "ModelError",
    "Namespace",
    "NamespaceError",
    "Operation",
    "Pending",
    "Policy",
    "PoolConfig",
    "PoolError",
    "PrefixPool",
    "Prompt",
    "PromptError",
    "Refusal",
    "ResetLane",
    "SaveImage",
    "Stats",
    "TraceError",
    "UsageError",
    "__version__",
]
