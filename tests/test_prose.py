"""The prose rules hold: the word list finds nothing, and finds what it should."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "check_prose"


def run(*paths: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, paths)], capture_output=True, text=True
    )


def test_no_page_and_no_module_breaks_the_word_list() -> None:
    done = run()
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("name", "text", "line", "word"),
    [
        ("a.md", "Fine.\n\nThe pool knows it.\n", 3, "knows"),
        ("a.py", '"""Return what is retained."""\n', 1, "what is"),
        ("a.py", "x = 1\n# nobody reads this\n", 2, "Nobody"),
        ("a.py", 'raise ValueError(f"the key {1} lies elsewhere")\n', 1, "lies"),
        ("a.py", "def _tell() -> None: ...\n", 1, "_tell"),
        ("a.md", "One " + "very " * 30 + "long sentence.\n", 1, "One very"),
    ],
)
def test_a_breach_is_found_at_its_line(
    tmp_path: Path, name: str, text: str, line: int, word: str
) -> None:
    page = tmp_path / name
    page.write_text(text, encoding="utf-8")
    done = run(page)
    assert done.returncode == 1
    assert f"{page}:{line}: '{word}".lower() in done.stdout.lower()


def test_code_and_quoted_names_are_free(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text("Call `tell(what_is)`.\n\n```\nnobody knows\n```\n", encoding="utf-8")
    assert run(page).returncode == 0
