"""Each kernel compiles for every kind of card that is promised, without one being there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
KERNELS = {
    "_append",
    "_attend_piece",
    "_attention",
    "_convolve",
    "_copy",
    "_first_difference",
    "_join_pieces",
    "_prepare",
    "_scan",
    "_step",
}
# What one program may have, in KiB: Volta, Turing; then the least of each architecture that runs
# code of 8.0 (8.6, 8.9), 9.0 and 12.0. The launchers know only older than 8.0 or not.
SHARED_KIB = {70: 64, 75: 64, 80: 99, 90: 99, 120: 99}


def compile_for(capability: int, cache: Path) -> list[dict[str, Any]]:
    """Run the compiler in a process of its own: Triton is interpreted in this one."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-m", "tests.kernels.compile_kernels", str(capability)]
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_every_kernel_compiles_and_fits_the_card(capability: int, tmp_path: Path) -> None:
    built = compile_for(capability, tmp_path)
    assert {kernel["kernel"] for kernel in built} == KERNELS
    assert all(kernel["ptx_bytes"] and kernel["cubin_bytes"] for kernel in built)
    limit = 1024 * SHARED_KIB[capability]
    assert not [kernel for kernel in built if kernel["shared_bytes"] > limit]


def test_the_list_names_every_kernel() -> None:
    launched = set()
    for path in (ROOT / "ninfer_pool/kernels/cuda").glob("*.py"):
        source = path.read_text(encoding="utf-8")
        launched |= {name for name in source.split() if name.startswith("_") and "[(" in name}
        launched |= {name for name in source.split() if name.startswith("_") and "[grid]" in name}
    assert {name.partition("[")[0] for name in launched} == KERNELS
