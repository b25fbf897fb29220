"""One request, one way: the trip from HTTP to the restored lane stays short enough to read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="a function's qualified name is not in its code before"
)
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "trace_request"


def traced(*options: str) -> dict[str, Any]:
    command = [sys.executable, str(SCRIPT), "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_hit_on_the_device_is_one_short_way() -> None:
    trip = traced()
    assert trip["package"]["files"] <= 25
    assert trip["package"]["moves"] <= 100
    counted = {name: trip[name] for name in ("prompts", "namespaces", "checks", "walks")}
    assert counted == {"prompts": 1, "namespaces": 0, "checks": 1, "walks": 1}


@pytest.mark.slow
def test_a_hit_on_disk_has_one_prompt_too() -> None:
    trip = traced("--tier", "disk")
    assert (trip["prompts"], trip["checks"]) == (1, 1)


@pytest.mark.slow
def test_a_simulated_request_has_one_prompt() -> None:
    assert traced("--simulate")["prompts"] == 1
