"""What the engine knows of each sequence in the library's memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ninfer_pool.core.ledger import Pages
from ninfer_pool.integrations.llama_cpp.layout import HEAD

Bytes = npt.NDArray[np.uint8]
Logits = npt.NDArray[np.float32]

RESTORED = ("nothing", "in_place", "from_lane", "from_pages")
"""How a lane was last brought to where it stands; see `LlamaEngine.ready`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """A state that a lane can go back to: its recurrent part, and the logits that followed."""

    position: int = 0
    state: Bytes | None = None
    logits: Logits | None = None


@dataclass(slots=True)
class Lane:
    """What the library holds of one sequence.

    ``mirror``: the version of the page that each page's worth of its KV is equal to, up to
    ``valid`` positions; ``position``: where it stands; ``pending``: an image that is to replace
    its state, empty bytes for that of an empty sequence; ``since``: tokens after ``anchor``.
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
        """Note that tokens were computed."""
        self.position += len(tokens)
        self.since += tokens
        self.logits = logits

    def anchored(self, position: int, state: Bytes | None) -> None:
        """Note that ``state`` is the lane's at ``position``, where it stands."""
        self.position = position
        self.anchor = Anchor(position=position, state=state, logits=self.logits)
        self.since = []


def standing(image: Bytes | None) -> int:
    """Return the position after the one that an image says it stands at; 0 for none."""
    if image is None or not image.size:
        return 0
    return int(image[HEAD + 4 : HEAD + 8].view("<i4")[0]) + 1


def addressed(image: Bytes, lane: int) -> Bytes:
    """Return an image's state made out to a lane."""
    image = image.copy()
    image[4:HEAD] = np.array([lane], dtype="<u4").view(np.uint8)
    return image
