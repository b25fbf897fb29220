"""Wrong edits of the core: some made by hand, others drawn by a seeded generator over its lines."""

from __future__ import annotations

import ast
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ninfer_pool"
UNTESTED = {"__init__.py", "__main__.py", "cli.py"}
LIMIT = 90
"""Seconds after which a mutant that still runs is taken to loop for ever: killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A module of the core with one wrong edit, and the tests to run on it."""

    file: str
    source: str
    name: str
    tests: tuple[str, ...]


def core_files() -> list[Path]:
    """Every module of the core."""
    files = [*PACKAGE.glob("*.py"), *(PACKAGE / "policy").glob("*.py")]
    return sorted(path for path in files if path.name not in UNTESTED)


def run(mutant: Mutant, folder: Path) -> subprocess.CompletedProcess[str] | None:
    """Run the mutant's tests in a copy of the project below `folder`; None: they never ended."""
    skip = shutil.ignore_patterns("__pycache__", "sim", "test_mutants.py")
    shutil.copytree(PACKAGE, folder / "ninfer_pool", ignore=skip)
    shutil.copytree(ROOT / "tests" / "core", folder / "tests" / "core", ignore=skip)
    shutil.copy(ROOT / "tests" / "conftest.py", folder / "tests")
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / "ninfer_pool" / mutant.file).write_text(mutant.source, encoding="utf-8")
    tests = [f"tests/core/{test}" for test in mutant.tests]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "COV"))}
    environment = inherited | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(folder)}
    try:
        return subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None


# -- by hand ---------------------------------------------------------------------------------

# file, the right text (it occurs once), the wrong one, the tests that see it
BY_HAND = [
    ("pages.py", "self.held.take(last) == 0", "self.held.take(last) >= 0", "test_guarantees.py"),
    ("pages.py", "self.leased[units] = 1", "self.leased[units] += 0", "test_lease.py"),
    ("index.py", "if upto == path.end:", "if upto >= path.start:", "test_index.py"),
    ("search.py", "(exact or not rules.exact)", "True", "test_index.py test_search.py"),
    ("search.py", "len(prompt) - 1", "len(prompt)", "test_corners.py"),
    ("planner.py", "// grid + 1) * grid", "// grid + 2) * grid", "test_search.py"),
    ("prompt.py", "return any(span.begin <", "return not any(span.begin <", "test_faults.py"),
    ("ghosts.py", "above < position <= limit", "above < position < limit", "test_guarantees.py"),
    ("room.py", "if not mark.guards:", "if mark.guards:", "test_guarantees.py test_corners.py"),
    ("room.py", "ledger.retained <= limit", "True", "test_guarantees.py"),
    ("room.py", "mark.position != prompt_end", "mark.position == prompt_end", "test_corners.py"),
    ("entry.py", "if self.used != tick:", "if True:", "test_corners.py"),
    ("keys.py", 'struct.pack("<Q", size), *tokens', "*tokens", "test_keys.py"),
    ("holdings.py", "entry.pinned = None", "pass", "test_index.py test_guarantees.py"),
    ("lifecycle.py", "position != lease.frontier", "False", "test_guarantees.py"),
]


def by_hand() -> list[Mutant]:
    """The wrong edits above."""
    found = []
    for file, right, wrong, tests in BY_HAND:
        source = (PACKAGE / file).read_text(encoding="utf-8")
        assert source.count(right) == 1, f"{file}: {right!r} occurs {source.count(right)} times"
        name = f"{file}: {right} -> {wrong}"
        changed = source.replace(right, wrong)
        found.append(Mutant(file=file, source=changed, name=name, tests=tuple(tests.split())))
    return found


# -- drawn -----------------------------------------------------------------------------------

SEED = 1
ALL = (
    "test_index.py",
    "test_lease.py",
    "test_regressions.py",
    "test_corners.py",
    "test_guarantees.py",
    "test_policies_by_hand.py",
    "test_prompt.py",
    "test_keys.py",
    "test_faults.py",
    "test_search.py",
    "test_bookkeeping.py",
    "test_field_cases.py",
    "test_field_cases_later.py",
)
SWAPS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


def wrong(node: ast.AST) -> Iterator[ast.AST]:
    """Every wrong node to put in the place of a right one."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield ast.Compare(node.left, [SWAPS[type(node.ops[0])]()], node.comparators)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield from (ast.Constant(node.value + step) for step in (1, -1))
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.Continue):
        yield ast.Break()
    elif isinstance(node, ast.Break):
        yield ast.Continue()


Put = Callable[[ast.AST], None]


def places(node: ast.AST, where: str) -> Iterator[tuple[str, ast.AST, Put]]:
    """Every node below `node` with its function's name and what puts another in its place.

    Assertions are no behaviour, nor are what objects look like and annotations.
    """
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        for at, child in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(child, ast.AST) or isinstance(child, ast.Assert):
                continue
            named = isinstance(child, (ast.FunctionDef, ast.ClassDef))
            inside = f"{where}.{child.name}" if named else where  # type: ignore[attr-defined]
            if inside.endswith("__repr__"):
                continue

            def put(other: ast.AST, field: str = field, at: int = at, many: object = value) -> None:
                if isinstance(many, list):
                    many[at] = other
                else:
                    setattr(node, field, other)

            yield inside, child, put
            yield from places(child, inside)


def drawn(count: int) -> list[Mutant]:
    """`count` wrong edits, the same ones as long as the functions that they are in stay the same.

    Every possible edit has a rank, the hash of the seed and its own name; the lowest are drawn.
    """
    found: list[tuple[str, Mutant]] = []
    for path in core_files():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        file = path.relative_to(PACKAGE).as_posix()
        seen: dict[str, int] = {}
        for where, node, put in places(tree, file):
            for other in wrong(node):
                name = f"{where}: {ast.unparse(node)} -> {ast.unparse(other)}"
                seen[name] = seen.get(name, 0) + 1
                name += f" #{seen[name]}" if seen[name] > 1 else ""
                rank = hashlib.sha256(f"{SEED} {name}".encode()).hexdigest()
                put(other)
                source = ast.unparse(tree)
                put(node)
                found.append((rank, Mutant(file=file, source=source, name=name, tests=ALL)))
    found.sort(key=lambda item: item[0])
    return [mutant for _, mutant in found[:count]]


EQUIVALENT: dict[str, str] = {
    "lease.py.Lease._follow_cuts: 1 -> 2": "the cuts ascend, so the least of two is the first",
    "lease.py.Lease.advance: 0 -> -1": "with 0 tokens inside the prompt nothing is compared, and "
    "the frontier stands at the prompt's end, which is a cut",
}
"""Drawn edits that change nothing that anyone could see, and why."""
