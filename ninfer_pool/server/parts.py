"""Messages made of parts, and the places in them that a client wants kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ninfer_pool.server.checks import Fields
from ninfer_pool.server.errors import invalid

MAX_BREAKPOINTS = 4


class CacheControl(Fields):
    """A mark after which a client wants a checkpoint."""

    type: Literal["ephemeral"]
    ttl: str | None = None
    scope: str | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a message's text, and whether a breakpoint is at its end."""

    text: str
    marked: bool = False


@dataclass(slots=True)
class Conversation:
    """Messages as a chat template reads them, and the breakpoints in them."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    breakpoints: set[tuple[int, int]] = field(default_factory=set)
    marks: int = 0
    """Parts that were marked: several may come to lie at one breakpoint."""

    def add(self, role: str, parts: Sequence[Part], **more: Any) -> None:
        """Append a message; its parts become one string unless a breakpoint lies between them."""
        marked = [index for index, part in enumerate(parts) if part.marked]
        self.marks += len(marked)
        content: str | list[dict[str, str]] = "".join(part.text for part in parts)
        if any(index < len(parts) - 1 for index in marked):
            content = [{"type": "text", "text": part.text} for part in parts]
        elif marked:
            marked = [0]
        self.breakpoints |= {(len(self.messages), index) for index in marked}
        self.messages.append({"role": role, "content": content, **more})

    def mark_end(self) -> None:
        """Put a breakpoint at the end of the last message."""
        content = self.messages[-1]["content"]
        last = 0 if isinstance(content, str) else len(content) - 1
        self.breakpoints.add((len(self.messages) - 1, last))
        self.marks += 1

    def mark_tool(self, index: int) -> None:
        """Put a breakpoint after a tool."""
        self.breakpoints.add((-1, index))
        self.marks += 1

    def ordered_breakpoints(self) -> tuple[tuple[int, int], ...]:
        """Return the breakpoints, those of tools first.

        Raises:
            ApiError: 400; there are too many.
        """
        if self.marks > MAX_BREAKPOINTS:
            raise invalid(
                f"A maximum of {MAX_BREAKPOINTS} blocks with cache_control may be provided. "
                f"Found {self.marks}.",
                param="cache_control",
            )
        return tuple(sorted(self.breakpoints))
