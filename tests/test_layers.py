"""Imports go down only: cli > sim, testing > core; the core needs three packages alone."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ninfer_pool"
FILES = sorted(PACKAGE.rglob("*.py"))

# Which rooms each room may import from; `errors` and the package's public names are everybody's.
BELOW = {
    "errors": set[str](),
    "root": {"core"},
    "core": {"core"},
    "sim": {"sim", "tiers", "core"},
    "testing": {"testing", "tiers", "core"},
    "integrations": {"integrations", "core"},
    "tiers": {"tiers", "core"},
    "kernels": {"kernels", "core"},
    "runner": {"runner", "tiers", "kernels", "core"},
    "server": {"server", "tiers", "runner", "kernels", "sim", "core"},
    "demo": {"demo", "tiers", "runner", "kernels", "sim", "core"},
    "cli": {"cli", "sim", "testing", "server", "demo", "runner", "tiers", "core"},
}
EVERYBODYS = {"root", "errors"}
CORE_PACKAGES = {"numpy", "xxhash", "sortedcontainers"}
TENSORS = {"torch", "triton", "transformers"}
WITH_TENSORS = {"kernels", "runner", "demo", "integrations"}


def module_name(path: Path) -> str:
    """The dotted name that `path`, a file below the repository's root, is imported by."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> str:
    """The layer of a module of ours; a folder that is no known layer names itself."""
    parts = module.split(".")[1:]
    if (
        not parts
        or not PACKAGE.joinpath(*parts).with_suffix(".py").exists() | (PACKAGE / parts[0]).is_dir()
    ):
        return "root"
    return "cli" if parts[0] in {"cli", "__main__"} else parts[0]


def absolute(node: ast.ImportFrom, *, package: str) -> str:
    """The module that `node` imports from, with a relative import's dots resolved."""
    if node.level == 0:
        return node.module or ""
    base = package.split(".")
    base = base[: len(base) - (node.level - 1)]
    return ".".join([*base, *([node.module] if node.module else [])])


def imports(source: str, *, package: str) -> Iterator[str]:
    """Every module that `source` imports, at its top or inside a function, for types or to run."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = absolute(node, package=package)
            # `from ninfer_pool import sim` imports a module below, which the name alone tells.
            whole = module == "ninfer_pool"
            yield from (f"{module}.{alias.name}" if whole else module for alias in node.names)


def faults(source: str, *, module: str, package: str) -> list[str]:
    """The imports of `source`, which is `module` within `package`, that break the layers."""
    layer = layer_of(module)
    found = []
    for name in imports(source, package=package):
        top = name.partition(".")[0]
        if top == "ninfer_pool":
            bad = layer_of(name) not in BELOW[layer] | EVERYBODYS
        elif layer == "core":
            bad = top not in CORE_PACKAGES and top not in sys.stdlib_module_names
        else:
            allowed = layer in WITH_TENSORS
            bad = top in TENSORS and not allowed
        if bad:
            found.append(f"{module} ({layer}) imports {name}")
    return found


def package_of(path: Path) -> str:
    """What one leading dot means in `path`."""
    return module_name(path.parent / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_go_down_only(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert not faults(source, module=module_name(path), package=package_of(path))


def test_every_folder_is_a_known_layer() -> None:
    unknown = {layer_of(module_name(path)) for path in FILES} - set(BELOW)
    assert not unknown, f"say in BELOW what these may import: {sorted(unknown)}"


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ninfer_pool.core.lease", "import torch"),
        ("ninfer_pool.core.lease", "import matplotlib.pyplot as plt"),
        ("ninfer_pool.core.lease", "import ninfer_pool.sim.trace"),
        ("ninfer_pool.core.lease", "from ninfer_pool import sim"),
        ("ninfer_pool.core.lease", "from ninfer_pool.cli import main"),
        ("ninfer_pool.core.lease", "from .. import sim"),
        ("ninfer_pool.core.lease", "from ..testing import oracle"),
        ("ninfer_pool.core.lease", "def later():\n    from ninfer_pool.sim import replay"),
        ("ninfer_pool.core.policy.lru", "from ...sim.trace import read"),
        ("ninfer_pool.core.policy.lru", "import hypothesis"),
        ("ninfer_pool.sim.replay", "from ninfer_pool import cli"),
        ("ninfer_pool.sim.replay", "from ..testing import oracle"),
        ("ninfer_pool.sim.replay", "import torch.nn"),
        ("ninfer_pool.cli", "import torch"),
        ("ninfer_pool.kernels.reference", "from ninfer_pool.runner.slab import Slab"),
        ("ninfer_pool.runner.slab", "from ninfer_pool.server import app"),
    ],
)
def test_an_import_upward_is_seen(module: str, source: str) -> None:
    assert len(faults(source, module=module, package=module.rpartition(".")[0])) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "ninfer_pool.core.lease",
            "import numpy as np, xxhash\nfrom sortedcontainers import SortedDict",
        ),
        ("ninfer_pool.core.lease", "import collections.abc\nfrom __future__ import annotations"),
        (
            "ninfer_pool.core.lease",
            "from .policy import lru\nfrom ninfer_pool.errors import PoolError",
        ),
        ("ninfer_pool.core.policy.lru", "from ..entry import Entry"),
        ("ninfer_pool.sim.plot", "from ninfer_pool import PrefixPool\nimport matplotlib"),
        ("ninfer_pool.cli", "from .sim import replay\nfrom ninfer_pool.testing import conformance"),
        ("ninfer_pool.runner.runner", "import torch\nfrom ninfer_pool.runner.slab import Slab"),
    ],
)
def test_an_import_downward_is_allowed(module: str, source: str) -> None:
    assert not faults(source, module=module, package=module.rpartition(".")[0])
