"""What tests of the command line share: a stand-in for the simulator and a small trace."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tests.sim.fake_replay import HEADER, LINE, NEXT, POLICIES, FakeReplay


@pytest.fixture
def replay(monkeypatch: pytest.MonkeyPatch) -> FakeReplay:
    fake = FakeReplay()
    module = ModuleType("ninfer_pool.sim.replay")
    vars(module).update(
        Setup=SimpleNamespace, sweep=fake.sweep, explain_request=fake.explain_request
    )
    policy = ModuleType("ninfer_pool.core.policy")
    vars(policy).update(POLICIES=dict.fromkeys(POLICIES))
    monkeypatch.setitem(sys.modules, "ninfer_pool.sim.replay", module)
    monkeypatch.setitem(sys.modules, "ninfer_pool.core.policy", policy)
    return fake


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "small.jsonl"
    path.write_text("\n".join([HEADER, LINE, NEXT]) + "\n")
    return path
