"""What the pool decides is what it decided before: the check that a refactoring is one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "record_decisions"


@pytest.mark.slow
def test_decisions_equal_the_record_bit_for_bit(*, long_run: bool) -> None:
    command = [sys.executable, str(SCRIPT), *(["--all"] if long_run else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
