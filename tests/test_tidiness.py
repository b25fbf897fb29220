"""Files and functions stay small enough to read, and what is public says what it is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_COLUMNS = 400, 70, 100

PACKAGE = sorted(ROOT.glob("ninfer_pool/**/*.py"))
PYTHON = [*PACKAGE, *sorted(ROOT.glob("tests/**/*.py")), *sorted(ROOT.glob("benchmarks/**/*.py"))]
SCRIPTS = [path for path in sorted(ROOT.glob("scripts/*")) if path.is_file()]
PROSE = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
PLAIN = [ROOT / ".ci/run", ROOT / "pyproject.toml", ROOT / "constraints.txt"]
# A path that only one person's machine has: a home or a working folder, from the root.
MACHINE_PATH = re.compile(r"(?<![\w./~-])/(?:home|Users|root|work|mnt|workspace)/\w|[A-Z]:\\Users")

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def where(path: Path) -> str:
    return str(path.relative_to(ROOT))


def long_functions(source: str) -> list[str]:
    """The functions of `source` that are longer than a screen, decorators left out."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                found.append(f"line {node.lineno}: {node.name} has {lines} lines")
    return found


def public(body: list[ast.stmt], *, prefix: str = "") -> Iterator[tuple[str, Definition]]:
    """Each public definition of a module and of its public classes, with its dotted name."""
    for node in body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from public(node.body, prefix=f"{node.name}.")


def methods(node: ast.ClassDef) -> set[str]:
    """The names of a class's public methods."""
    return {name for name, _ in public(node.body)}


def parents(classes: list[ast.ClassDef]) -> dict[str, set[str]]:
    """For each class the names of its bases, and of the protocols whose every method it has."""
    bases = {
        node.name: {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}
        for node in classes
    }
    protocols = [node for node in classes if "Protocol" in bases[node.name]]
    for node in classes:
        bases[node.name] |= {
            p.name for p in protocols if methods(p) and methods(p) <= methods(node)
        }
        bases[node.name].discard(node.name)
    return bases


def undocumented(sources: dict[str, str]) -> list[str]:
    """The public modules, classes and functions of `sources` without a docstring.

    A method is documented, too, where a base or a protocol that its class fulfils says it.
    """
    trees = {name: ast.parse(source) for name, source in sources.items()}
    bases = parents([n for t in trees.values() for n in t.body if isinstance(n, ast.ClassDef)])
    found = [f"{name}: the module" for name, tree in trees.items() if not ast.get_docstring(tree)]
    rows = [(name, *row) for name, tree in trees.items() for row in public(tree.body)]
    documented = {dotted for _, dotted, node in rows if ast.get_docstring(node)}
    for name, dotted, node in rows:
        owner, _, method = dotted.rpartition(".")
        said = {dotted, *(f"{base}.{method}" for base in bases.get(owner, ()))}
        if not said & documented:
            found.append(f"{name}:{node.lineno}: {dotted}")
    return found


@pytest.mark.parametrize("path", PYTHON, ids=where)
def test_a_file_can_be_read_in_one_sitting(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_FILE_LINES


@pytest.mark.parametrize("path", PYTHON, ids=where)
def test_a_function_fits_a_screen(path: Path) -> None:
    assert not long_functions(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", [*PYTHON, *SCRIPTS], ids=where)
def test_lines_fit_the_columns(path: Path) -> None:
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    assert not [number for number, line in lines if len(line) > MAX_COLUMNS]


def test_what_is_public_has_a_docstring() -> None:
    assert not undocumented({where(path): path.read_text(encoding="utf-8") for path in PACKAGE})


@pytest.mark.parametrize("path", [*PYTHON, *SCRIPTS, *PROSE, *PLAIN], ids=where)
def test_no_file_names_a_path_of_one_machine(path: Path) -> None:
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    assert not [number for number, line in lines if MACHINE_PATH.search(line)]


def test_a_long_function_is_seen() -> None:
    source = "def f():\n" + "    pass\n" * MAX_FUNCTION_LINES
    assert long_functions(source) == [f"line 1: f has {MAX_FUNCTION_LINES + 1} lines"]


BASE = '''"""M."""
class Base(Protocol):
    """B."""
    def said(self):
        """Said."""
'''


@pytest.mark.parametrize(
    "head", ["class Child(Base):", "class Child(m.Base[int]):", "class Child:"]
)
def test_a_missing_docstring_is_seen(head: str) -> None:
    child = [head, *(f"    def {name}(self): ..." for name in ("said", "new", "_own"))]
    source = BASE + "\n".join(child)
    assert undocumented({"m.py": source}) == ["m.py:6: Child", "m.py:8: Child.new"]


def test_a_module_without_a_docstring_is_seen() -> None:
    assert undocumented({"m.py": "x = 1"}) == ["m.py: the module"]


def test_a_path_of_one_machine_is_seen() -> None:
    assert MACHINE_PATH.search("read " + "/" + "home/me/x")
    assert not MACHINE_PATH.search("see docs/home/index or https://a.example/work/x")
