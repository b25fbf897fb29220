"""The house: no import circle, class names that stand once, files and functions fit a screen.

Which room may import which is a contract in pyproject.toml, checked by import-linter.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 70
CORE_PACKAGES = {"numpy", "sortedcontainers", "xxhash"}
FOR_TYPES_ALONE = {"typing_extensions"}
# A path that only one person's machine has: a home or a working folder, from the root.
MACHINE_PATH = re.compile(r"(?<![\w./~-])/(?:home|Users|root|work|mnt|workspace)/\w|[A-Z]:\\Users")

PACKAGE = sorted(ROOT.glob("ninfer_pool/**/*.py"))
PYTHON = [*PACKAGE, *sorted(ROOT.glob("tests/**/*.py")), *sorted(ROOT.glob("benchmarks/**/*.py"))]
TEXTS = [
    *PYTHON,
    *(path for path in sorted(ROOT.glob("scripts/*")) if path.is_file()),
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
    *(ROOT / name for name in (".ci/run", "pyproject.toml", "constraints.txt")),
]
Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef
Graph = dict[str, set[str]]


def where(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def trees(paths: list[Path]) -> dict[str, ast.Module]:
    return {where(path): parsed(path) for path in paths}


# -- imports ---------------------------------------------------------------------------------


def imported(tree: ast.Module, package: str) -> Iterator[str]:
    """Yield the dotted names that a module imports anywhere, for types or to run."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: 1 - node.level or None] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def imports_of(paths: list[Path]) -> Graph:
    """Return which modules of the package each module imports; packages' own files left out."""
    modules = {module_of(path): path for path in paths if path.name != "__init__.py"}
    graph: Graph = {}
    for module, path in modules.items():
        names = imported(parsed(path), module.rpartition(".")[0])
        found = {name if name in modules else name.rpartition(".")[0] for name in names}
        graph[module] = found & set(modules) - {module}
    return graph


def in_a_circle(graph: Graph) -> set[str]:
    """Return the modules that import themselves in the end: what is left without any leaf."""
    left = {module: set(targets) for module, targets in graph.items()}
    for _ in range(2):  # first from below, then from above
        while leaves := {module for module, targets in left.items() if not targets}:
            left = {m: targets - leaves for m, targets in left.items() if m not in leaves}
        left = {m: {n for n in left if m in left[n]} for m in left}
    return set(left)


def test_no_module_imports_itself_in_a_circle() -> None:
    assert not in_a_circle(imports_of(PACKAGE))


def test_a_circle_is_seen() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"a"}}
    assert in_a_circle(graph) == {"b", "c"}


def test_the_core_imports_three_packages_alone() -> None:
    found = {
        name.partition(".")[0]
        for path in ROOT.glob("ninfer_pool/core/**/*.py")
        for name in imported(parsed(path), "ninfer_pool.core")
    }
    assert found - sys.stdlib_module_names - FOR_TYPES_ALONE == {"ninfer_pool", *CORE_PACKAGES}


def test_the_package_root_holds_rooms_and_nothing_else() -> None:
    files = {path.name for path in ROOT.glob("ninfer_pool/*.py")}
    assert files == {"__init__.py", "__main__.py", "cli.py", "errors.py"}


# -- names and sizes -------------------------------------------------------------------------


def test_a_public_class_name_stands_once() -> None:
    classes = Counter(
        node.name
        for tree in trees(PACKAGE).values()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not [name for name, count in classes.items() if count > 1]


def test_a_file_can_be_read_in_one_sitting() -> None:
    sizes = {where(path): path.read_text(encoding="utf-8").count("\n") for path in PYTHON}
    assert not {name: lines for name, lines in sizes.items() if lines > MAX_FILE_LINES}


def long_functions(name: str, tree: ast.Module) -> list[str]:
    """Return the functions that are longer than a screen, decorators left out."""
    functions = [node for node in ast.walk(tree) if isinstance(node, Function)]
    lines = {node: (node.end_lineno or node.lineno) - node.lineno + 1 for node in functions}
    return [
        f"{name}:{node.lineno}: {node.name} has {count} lines"
        for node, count in lines.items()
        if count > MAX_FUNCTION_LINES
    ]


def test_a_function_fits_a_screen() -> None:
    assert not [line for name, tree in trees(PYTHON).items() for line in long_functions(name, tree)]


def test_a_long_function_is_seen() -> None:
    source = "def f():\n" + "    pass\n" * MAX_FUNCTION_LINES
    found = long_functions("m.py", ast.parse(source))
    assert found == [f"m.py:1: f has {MAX_FUNCTION_LINES + 1} lines"]


def test_no_file_names_a_path_of_one_machine() -> None:
    lines = (
        (where(path), number, line)
        for path in TEXTS
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    )
    assert not [(name, number) for name, number, line in lines if MACHINE_PATH.search(line)]


def test_a_path_of_one_machine_is_seen() -> None:
    assert MACHINE_PATH.search("read " + "/" + "home/me/x")
    assert not MACHINE_PATH.search("see docs/home/index or https://a.example/work/x")


# -- docstrings ------------------------------------------------------------------------------


def public(body: list[ast.stmt], *, prefix: str = "") -> Iterator[tuple[str, Definition]]:
    """Yield each public definition of a module and of its public classes, with a dotted name."""
    for node in body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from public(node.body, prefix=f"{node.name}.")


def parents(classes: list[ast.ClassDef]) -> dict[str, set[str]]:
    """Return for each class its bases, and the protocols whose every method it has."""
    bases = {
        node.name: {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}
        for node in classes
    }
    methods = {node.name: {name for name, _ in public(node.body)} for node in classes}
    protocols = [name for name, above in bases.items() if "Protocol" in above and methods[name]]
    for name in bases:
        bases[name] |= {p for p in protocols if methods[p] <= methods[name]}
        bases[name].discard(name)
    return bases


def undocumented(sources: dict[str, ast.Module]) -> list[str]:
    """Return the public modules, classes and functions without a docstring.

    A method may have its docstring in a base, or in a protocol that its class fulfils.
    """
    bodies = [node for tree in sources.values() for node in tree.body]
    bases = parents([node for node in bodies if isinstance(node, ast.ClassDef)])
    found = [f"{name}: the module" for name, tree in sources.items() if not ast.get_docstring(tree)]
    rows = [(name, *row) for name, tree in sources.items() for row in public(tree.body)]
    documented = {dotted for _, dotted, node in rows if ast.get_docstring(node)}
    for name, dotted, node in rows:
        owner, _, method = dotted.rpartition(".")
        if not documented & {dotted, *(f"{base}.{method}" for base in bases.get(owner, ()))}:
            found.append(f"{name}:{node.lineno}: {dotted}")
    return found


def test_public_definitions_have_docstrings() -> None:
    assert not undocumented(trees(PACKAGE))


@pytest.mark.parametrize(
    "head", ["class Child(Base):", "class Child(m.Base[int]):", "class Child:"]
)
def test_a_missing_docstring_is_seen(head: str) -> None:
    base = '"""M."""\nclass Base(Protocol):\n    """B."""\n    def run(self):\n        """Run."""\n'
    child = [head, *(f"    def {name}(self): ..." for name in ("run", "new", "_own"))]
    source = ast.parse(base + "\n".join(child))
    assert undocumented({"m.py": source}) == ["m.py:6: Child", "m.py:8: Child.new"]
