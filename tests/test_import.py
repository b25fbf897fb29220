"""The package imports where nothing but numpy, xxhash and sortedcontainers is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Refuses every package that is neither the standard library's nor one of the core's three.
PROBE = """
import importlib, sys

ALLOWED = {"ninfer_pool", "numpy", "xxhash", "sortedcontainers"}


class Absent:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        standard = top in sys.stdlib_module_names or top.startswith("_sysconfigdata")
        if not standard and top not in ALLOWED:
            raise ModuleNotFoundError(f"{name} is not installed here", name=name)
        return None


sys.meta_path.insert(0, Absent())
for name in sys.argv[1:]:
    importlib.import_module(name)
print(*sys.modules)
"""


def imported(*modules: str) -> subprocess.CompletedProcess[str]:
    """A fresh Python, with all other packages unimportable, that imports `modules`."""
    command = [sys.executable, "-c", PROBE, *modules]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("module", ["ninfer_pool", "ninfer_pool.sim", "ninfer_pool.cli"])
def test_it_imports_with_the_three_core_packages_alone(module: str) -> None:
    run = imported(module)
    assert run.returncode == 0, run.stderr
    assert module in run.stdout.split()


@pytest.mark.parametrize("absent", ["torch", "triton", "transformers", "matplotlib", "hypothesis"])
def test_the_probe_makes_the_others_unimportable(absent: str) -> None:
    run = imported("ninfer_pool", absent)
    assert run.returncode == 1
    assert f"{absent} is not installed here" in run.stderr


def test_the_runner_says_what_to_install() -> None:
    run = imported("ninfer_pool.runner")
    assert run.returncode == 1
    last = run.stderr.splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: needs ")
    assert last.endswith("; from a checkout, run pip install '.[runner]'")


def test_the_package_root_loads_no_upper_layer() -> None:
    upper = ("ninfer_pool.sim", "ninfer_pool.testing", "ninfer_pool.cli")
    run = imported("ninfer_pool")
    assert run.returncode == 0, run.stderr
    assert not [name for name in run.stdout.split() if name.startswith(upper)]
