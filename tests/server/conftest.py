"""The server's tests need its extra; one thread: two beside another busy process are far slower."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")
pytest.importorskip("starlette")

import torch

from tests.server.scripted import Voice, serve_scripted
from tests.server.world import Server, serve

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No slow disk makes these servers drop what they would have stored."""
    monkeypatch.setattr("ninfer_pool.tiers.down.LATE_SECONDS", 60.0)


@pytest.fixture(scope="module")
def of_four_lanes() -> Iterator[Server]:
    with serve(lanes=4) as server:
        yield server


@pytest.fixture
def wide(of_four_lanes: Server) -> Iterator[Server]:
    """A server with four lanes and bytes for everything, empty."""
    of_four_lanes.runner.pool.clear()
    yield of_four_lanes
    of_four_lanes.idle()


@pytest.fixture(scope="module")
def scripted() -> Iterator[tuple[Server, Voice]]:
    """A server, and the voice that says what its model is told to say."""
    with serve_scripted(max_entries=8, lanes=2) as both:
        yield both


@pytest.fixture(scope="module")
def voice(scripted: tuple[Server, Voice]) -> Voice:
    return scripted[1]
