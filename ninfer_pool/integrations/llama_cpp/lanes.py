"""The engine's record of each sequence in the library's memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ninfer_pool.core.ledger import Pages
from ninfer_pool.integrations.llama_cpp.layout import HEAD

Bytes = npt.NDArray[np.uint8]
Logits = npt.NDArray[np.float32]

RESTORED = ("nothing", "in_place", "from_lane", "from_pages")
"""The source of a lane's last restore; see `LlamaEngine.ready`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """A state that a lane can return to: its recurrent part, and the logits after it."""

    position: int = 0
    state: Bytes | None = None
    logits: Logits | None = None


@dataclass(slots=True)
class Lane:
    """One sequence in the library's memory.

    Attributes:
        position: the number of its positions.
        valid: positions whose KV equals that of pages.
        mirror: the versions of those pages.
        pending: an image to replace its state at the next restore; empty for an empty sequence.
        since: tokens after ``anchor``.
    """

    position: int = 0
    valid: int = 0
    mirror: list[int] = field(default_factory=list)
    table: Pages | None = None
    pending: Bytes | None = None
    logits: Logits | None = None
    restored: str = RESTORED[0]
    anchor: Anchor = field(default_factory=Anchor)
    since: list[int] = field(default_factory=list)

    def moved(self, tokens: list[int], logits: Logits) -> None:
        """Record computed tokens and the logits after the last."""
        self.position += len(tokens)
        self.since += tokens
        self.logits = logits

    def anchored(self, position: int, state: Bytes | None) -> None:
        """Record ``state`` as the lane's at its present ``position``."""
        self.position = position
        self.anchor = Anchor(position=position, state=state, logits=self.logits)
        self.since = []


def standing(image: Bytes | None) -> int:
    """Return the number of positions before an image, from its header; 0 without one."""
    if image is None or not image.size:
        return 0
    return int(image[HEAD + 4 : HEAD + 8].view("<i4")[0]) + 1


def addressed(image: Bytes, lane: int) -> Bytes:
    """Return a copy of an image's state with a lane's number in its header."""
    image = image.copy()
    image[4:HEAD] = np.array([lane], dtype="<u4").view(np.uint8)
    return image
