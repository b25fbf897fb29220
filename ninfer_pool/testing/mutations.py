"""Wrong edits of the core drawn by a seeded generator over its lines."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

from ninfer_pool.testing.mutants import Mutant


def core_files(package: Path) -> list[Path]:
    """Every module of the core."""
    return sorted(path for path in (package / "core").rglob("*.py") if path.name != "__init__.py")


SEED = 1
ALL = (
    "tests/core/test_index.py",
    "tests/core/test_lease.py",
    "tests/core/test_regressions.py",
    "tests/core/test_corners.py",
    "tests/core/test_guarantees.py",
    "tests/core/test_policies_by_hand.py",
    "tests/core/test_prompt.py",
    "tests/core/test_keys.py",
    "tests/core/test_faults.py",
    "tests/core/test_search.py",
    "tests/core/test_bookkeeping.py",
    "tests/core/test_field_cases.py",
    "tests/core/test_field_cases_later.py",
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


def drawn(package: Path, count: int) -> list[Mutant]:
    """`count` wrong edits, the same ones as long as the functions that they are in stay the same.

    Every possible edit has a rank, the hash of the seed and its own name; the lowest are drawn.
    """
    found: list[tuple[str, Mutant]] = []
    for path in core_files(package):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        file = path.relative_to(package).as_posix()
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
