"""A request and the parts of its answer, the same for every dialect of HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ninfer_pool.runner import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """How a request uses the pool.

    ``read`` False resumes nothing, ``retain`` False leaves nothing. ``salt`` isolates a tenant.
    ``hint`` names a conversation or a client: it may choose a lane, and is never identity.
    """

    read: bool = True
    retain: bool = True
    salt: str | None = None
    hint: str | None = None
    priority: int = 0
    ttl_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One parsed request, the same for every dialect.

    Either ``messages`` and ``tools``, plain JSON as a chat template reads it, or ``text``: raw
    text or token ids. ``breakpoints`` are (where, part): the end of part ``part`` of
    ``messages[where]``, or of ``tools[part]`` where it is -1.
    """

    endpoint: str
    """Its path, such as ``/v1/chat/completions``."""
    model: str | None
    messages: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    text: str | Sequence[int] | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template, such as ``enable_thinking``."""
    breakpoints: tuple[tuple[int, int], ...] = ()
    origins: tuple[int, ...] = ()
    """The client's message that each of ``messages`` is from, -1: its system text; empty: the
    same."""
    sampling: Sampling
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    parse_tools: bool = True
    control: Control = Control()


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A stretch of the model's thoughts before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Text:
    """A stretch of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole call of a tool; ``arguments`` is a JSON object's text."""

    id: str
    name: str
    arguments: str


Piece = Reasoning | Text | ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A request has a lane; ``cached_tokens`` of its prompt are resumed."""

    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of one request: the source of usage, log, console line and metrics.

    ``cached_tokens`` are those that the runner skipped. Times in seconds; ``arrived`` since the
    epoch, all others are lengths; ``first_token_seconds`` counts from arrival, queue included.
    ``finish`` is ``stop``, ``length``, ``cancelled`` or ``error``; ``stop_string`` is the one met.
    ``retained_tokens`` is the position of the checkpoint that it left; 0: none. ``tier`` held its
    resumed prefix: ``device``, ``host`` or ``disk``; None: it resumed nothing.
    """

    number: int
    endpoint: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    retained_tokens: int
    reuse: str
    reason: str
    exact: bool
    finish: str
    stop_string: str | None
    key: str | None
    lane: int | None
    drafted: int
    accepted: int
    arrived: float
    queued_seconds: float
    first_token_seconds: float
    prefill_seconds: float
    seconds: float
    stream: bool
    control: Control
    tier: str | None = None

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens that were computed."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def created_tokens(self) -> int:
        """Prompt tokens that were computed and are retained now."""
        return max(0, min(self.retained_tokens, self.prompt_tokens) - self.cached_tokens)


COUNTS = ("prompt_tokens", "cached_tokens", "output_tokens")
OUTCOME = ("reuse", "reason", "exact", "finish")


def fields_of(value: object, *names: str) -> dict[str, Any]:
    """Return some attributes of a value by name, in this order."""
    return {name: getattr(value, name) for name in names}
