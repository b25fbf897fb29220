"""The operations that an engine executes, as plain data. The pool decides; it moves no bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class CopyPage:
    """Copy all bytes of page ``source`` to page ``target``."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class SaveImage:
    """Write the lane's continuation state to ``pages``, in that order."""

    lane: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadImage:
    """Replace the lane's continuation state by the image in ``pages``, in that order."""

    pages: tuple[int, ...]
    lane: int


@dataclass(frozen=True, slots=True)
class ResetLane:
    """Set the lane's continuation state to that of an empty sequence."""

    lane: int


Operation: TypeAlias = CopyPage | SaveImage | LoadImage | ResetLane
