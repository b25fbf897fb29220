"""Every Python snippet of README and docs runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
# One page shares one namespace; a block with `>>>` is a doctest, any other is executed.
SNIPPETS = Sybil(parsers=[PythonCodeBlockParser(), SkipParser()], path=str(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_snippets_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a snippet that writes leaves nothing behind
    for example in SNIPPETS.parse(page).examples():
        example.evaluate()


def test_the_reference_equals_the_docstrings() -> None:
    script = [sys.executable, str(ROOT / "scripts" / "make_reference"), "--check"]
    assert subprocess.run(script, check=False).returncode == 0, "run scripts/make_reference"


def test_the_diagrams_are_those_of_the_script() -> None:
    script = [sys.executable, str(ROOT / "scripts" / "make_diagrams"), "--check"]
    assert subprocess.run(script, check=False).returncode == 0, "run scripts/make_diagrams"


def anchors(page: Path) -> set[str]:
    """Return what GitHub makes of a page's headings."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", head).lower().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_and_picture_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_line_begins_with_a_figure(page: Path) -> None:
    # A comment at the beginning of a line ends the paragraph in HTML.
    found = re.findall(r"(?m)^ {0,3}<!-- (?!table)[^>]*-->.*<!-- end -->", page.read_text("utf-8"))
    assert not found


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", ["README.md", "docs/how-to/embed.md", "docs/how-to/write-a-policy.md"]
)
def test_examples_pass_strict_types(page: str, tmp_path: Path) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"<!-- skip: next -->\s+```python.*?```", "", text, flags=re.S)
    blocks = re.findall(r"```python\n((?!>>>).*?)```", text, re.S)
    file = tmp_path / "example.py"
    file.write_text("\n".join(blocks if page != "docs/how-to/embed.md" else blocks[:2]), "utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(file)],
        env={**os.environ, "MYPYPATH": str(ROOT)},
        cwd=ROOT, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def test_files_and_classes_of_the_glossary_exist() -> None:
    page = (ROOT / "docs/explanation/implementation.md").read_text(encoding="utf-8")
    for name in re.findall(r"`([a-z_]+/[a-z_/]*(?:\.py)?)`", page):
        assert (ROOT / "ninfer_pool" / name).exists() or (ROOT / name).exists(), name
    for row in re.findall(r"^\|.*`[A-Z]\w+`.*\| (?:`\w+/.*\.py`,? ?)+ \|$", page, re.M):
        code = "".join(
            (ROOT / "ninfer_pool" / name).read_text(encoding="utf-8")
            for name in re.findall(r"`(\w+/\w+\.py)`", row)
        )
        for name in re.findall(r"`([A-Z]\w+)`", row):
            assert f"class {name}" in code, name
    core = page[page.index("## The core") : page.index("## Tiers")]
    for name in re.findall(r"`([a-z_]+\.py)`", core):
        assert (ROOT / "ninfer_pool" / "core" / name).exists(), name


def test_each_guarantee_names_tests_that_exist() -> None:
    page = (ROOT / "docs/explanation/entries-and-images.md").read_text(encoding="utf-8")
    tests = (ROOT / "tests/core/test_guarantees.py").read_text(encoding="utf-8")
    for number, names in re.findall(r"^\| G(\d+) \|.*\| (.*) \|$", page, re.M):
        for name in re.findall(r"`(\w+)`", names):
            assert f"def test_g{number}_{name}(" in tests, name


def test_there_are_at_most_twelve_pages() -> None:
    assert len(list(ROOT.glob("docs/**/*.md"))) <= 12


def test_the_readme_shows_code() -> None:
    assert list(SNIPPETS.parse(ROOT / "README.md").examples())
