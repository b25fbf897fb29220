"""The progress line stays on one line of a terminal, goes away, and is nowhere else."""

from __future__ import annotations

import io

import pytest

from ninfer_pool.sim import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_the_share_done_and_is_wiped_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(progress, "REDRAW_SECONDS", 0.0)
    stream = Terminal()
    with progress.Progress(stream) as line:
        line.show("lru, K=4", 1, 4)
        line.show("lru", 4, 4)
    drawn = stream.getvalue().split("\r")
    assert drawn[1] == f"lru, K=4 [{'#' * 6}{'-' * 18}]  25%"
    assert drawn[2].rstrip() == f"lru [{'#' * 24}] 100%"
    assert len(drawn[2]) >= len(drawn[1])
    assert drawn[3].strip() == drawn[4] == ""
    assert "\n" not in stream.getvalue()


def test_a_short_run_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE_SECONDS", 3600.0)
    stream = Terminal()
    with progress.Progress(stream) as line:
        line.show("lru", 1, 2)
    assert stream.getvalue() == ""


def test_a_file_or_pipe_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE_SECONDS", 0.0)
    stream = io.StringIO()
    with progress.Progress(stream) as line:
        line.show("lru", 1, 2)
    assert stream.getvalue() == ""
