"""A progress line on a terminal, for runs of more than a second."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TextIO

PATIENCE_SECONDS = 1.0
REDRAW_SECONDS = 0.1
BAR_WIDTH = 24


class Progress:
    """Draws `label [####----]  50%` over itself on `stream`; silent where that is no terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._active = stream.isatty()
        self._next = time.monotonic() + PATIENCE_SECONDS
        self._width = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._width:
            self._draw("")

    def show(self, label: str, done: int, total: int) -> None:
        """Show that `done` of `total` steps of `label` are over; cheap enough for every step."""
        if self._active and time.monotonic() >= self._next:
            self._next = time.monotonic() + REDRAW_SECONDS
            share = done / total if total else 1.0
            filled = round(share * BAR_WIDTH)
            bar = "#" * filled + "-" * (BAR_WIDTH - filled)
            self._draw(f"{label} [{bar}] {100 * share:3.0f}%")

    def _draw(self, line: str) -> None:
        # Blanks wipe what a longer line left behind; the cursor goes back to the start.
        self._stream.write("\r" + line.ljust(self._width) + ("" if line else "\r"))
        self._stream.flush()
        self._width = len(line)
