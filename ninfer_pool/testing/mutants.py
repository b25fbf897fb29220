"""Wrong edits of our own sources, each of which a test must see.

Every edit is tried in a temporary copy of a checkout: the test named beside it must fail there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from ninfer_pool.errors import UsageError

LIMIT_SECONDS = 120
"""After this long a mutant that still runs is taken to loop for ever: killed."""
NOT_COPIED = ("__pycache__", "sim", "bench", "runner", "server", "demo", "engine", "kernels")
FAILED, PASSED = 1, 0
"""How pytest ends where a test failed, and where none did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A module of the core with one wrong edit, and the tests that must see it."""

    file: str
    source: str
    name: str
    tests: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of a mutant: ``killed``, ``survived``, or ``error``: its tests did not run."""

    name: str
    outcome: str
    seconds: float
    output: str


def checkout() -> Path:
    """Return the root of the checkout that this package is imported from.

    Raises:
        UsageError: it was installed without its tests.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / "tests" / "core").is_dir():
        raise UsageError(f"mutants: {root} has no tests/core; needs a checkout of the repository")
    return root


def by_hand(root: Path) -> list[Mutant]:
    """Return the wrong edits made by hand.

    Raises:
        UsageError: one is stale: its right text does not occur just once.
    """
    from ninfer_pool.testing.edits import EDITS

    found = []
    for edit in EDITS:
        source = (root / "ninfer_pool" / edit.file).read_text(encoding="utf-8")
        count = source.count(edit.right)
        if count != 1 or edit.right == edit.wrong:
            raise UsageError(f"edit {edit.name!r}: its text occurs {count} times in {edit.file}")
        changed = source.replace(edit.right, edit.wrong)
        found.append(Mutant(file=edit.file, source=changed, name=edit.name, tests=(edit.test,)))
    return found


def drawn(root: Path, count: int) -> list[Mutant]:
    """Return ``count`` wrong edits that nobody chose, without those known to change nothing."""
    from ninfer_pool.testing import mutations

    every = mutations.drawn(root / "ninfer_pool", count)
    return [mutant for mutant in every if mutant.name not in mutations.EQUIVALENT]


class Copy:
    """A copy of the core, the kit and their tests, to be edited and run."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder = folder
        skip = shutil.ignore_patterns(*NOT_COPIED)
        for part in ("ninfer_pool", "tests/core"):
            shutil.copytree(root / part, folder / part, ignore=skip)
        shutil.copy(root / "tests" / "conftest.py", folder / "tests")
        shutil.copy(root / "pyproject.toml", folder)

    def run(self, tests: Sequence[str]) -> tuple[int | None, str]:
        """Run tests; return how pytest ended, None where it never did, and its output."""
        options = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly")
        command = [sys.executable, "-m", "pytest", *options, *tests]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "COV"))}
        path = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(self.folder)}
        try:
            ran = subprocess.run(
                command,
                cwd=self.folder,
                env=inherited | path,
                capture_output=True,
                text=True,
                timeout=LIMIT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None, f"still running after {LIMIT_SECONDS} s"
        return ran.returncode, ran.stdout + ran.stderr

    @contextmanager
    def edited(self, mutant: Mutant) -> Iterator[None]:
        """Hold the mutant's source in place of the right one."""
        path = self.folder / "ninfer_pool" / mutant.file
        right = path.read_text(encoding="utf-8")
        path.write_text(mutant.source, encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(right, encoding="utf-8")

    def judge(self, mutant: Mutant) -> Verdict:
        """Try one mutant."""
        begun = time.monotonic()
        with self.edited(mutant):
            code, output = self.run(mutant.tests)
        outcome = {None: "killed", FAILED: "killed", PASSED: "survived"}.get(code, "error")
        seconds = time.monotonic() - begun
        return Verdict(name=mutant.name, outcome=outcome, seconds=seconds, output=output)


def judge_all(
    mutants: Sequence[Mutant],
    *,
    root: Path,
    jobs: int = 1,
    told: Callable[[Verdict], None] = lambda verdict: None,
) -> list[Verdict]:
    """Try every mutant, ``jobs`` at a time; ``told`` hears of each as it ends.

    Raises:
        UsageError: the tests fail without any edit, so that they would tell nothing.
    """
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    with tempfile.TemporaryDirectory(prefix="ninfer-pool-mutants-") as folder:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for number in range(jobs):
            copies.put(Copy(root, Path(folder) / str(number)))
        first = copies.get()
        code, output = first.run(tests) if tests else (PASSED, "")
        copies.put(first)
        if code != PASSED:
            raise UsageError(f"mutants: the tests fail without any edit\n{output}")

        def judge(mutant: Mutant) -> Verdict:
            copy = copies.get()
            try:
                verdict = copy.judge(mutant)
            finally:
                copies.put(copy)
            told(verdict)
            return verdict

        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(judge, mutants))
