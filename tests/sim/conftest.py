"""What tests of the command line share: a stand-in for the simulator and a small trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from ninfer_pool.sim import command
from tests.sim.fake_replay import HEADER, LINE, NEXT, POLICIES, FakeReplay


@pytest.fixture
def replay(monkeypatch: pytest.MonkeyPatch) -> FakeReplay:
    fake = FakeReplay()
    monkeypatch.setattr(command, "Simulator", fake.simulator)
    monkeypatch.setattr(command, "POLICIES", dict.fromkeys(POLICIES))
    return fake


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "small.jsonl"
    path.write_text("\n".join([HEADER, LINE, NEXT]) + "\n")
    return path
