"""Mutants: the core with one wrong edit each, which the test named in `edits` must detect.

Each edit is tried in a temporary copy of the checkout. `scripts/mutants` runs `main`.
"""

from __future__ import annotations

import argparse
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
from tests.machinery import edits

ROOT = Path(__file__).resolve().parents[2]
DRAWN = (
    "For mutants beyond this table, configure a mutation tester such as mutmut with the sources "
    "ninfer_pool/core and the tests tests/core."
)
LIMIT_SECONDS = 120
"""After this long a mutant that still runs is taken to loop for ever: killed."""
NOT_COPIED = ("__pycache__", "sim", "runner", "server", "demo", "engine", "kernels")
FAILED, PASSED = 1, 0
"""How pytest ends where a test failed, and where none did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A module of the core with one wrong edit, and the test that must detect it."""

    file: str
    source: str
    name: str
    test: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of a mutant: ``killed``, ``survived``, or ``error``: its tests did not run."""

    name: str
    outcome: str
    seconds: float
    output: str


def listed() -> list[Mutant]:
    """Return a mutant per edit of the table.

    Raises:
        UsageError: one is stale: its right text does not occur just once.
    """
    found = []
    for edit in edits.EDITS:
        source = (ROOT / "ninfer_pool" / edit.file).read_text(encoding="utf-8")
        count = source.count(edit.right)
        if count != 1 or edit.right == edit.wrong:
            raise UsageError(f"edit {edit.name!r}: its text occurs {count} times in {edit.file}")
        changed = source.replace(edit.right, edit.wrong)
        found.append(Mutant(file=edit.file, source=changed, name=edit.name, test=edit.test))
    return found


class Copy:
    """A copy of the core, the kit and the core's tests, to be edited and run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        skip = shutil.ignore_patterns(*NOT_COPIED)
        for part in ("ninfer_pool", "tests/core", "tests/machinery"):
            shutil.copytree(ROOT / part, folder / part, ignore=skip)
        for module in ("conftest.py", "pairwise.py"):
            shutil.copy(ROOT / "tests" / module, folder / "tests")
        shutil.copy(ROOT / "pyproject.toml", folder)

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
            code, output = self.run([mutant.test])
        outcome = {None: "killed", FAILED: "killed", PASSED: "survived"}.get(code, "error")
        seconds = time.monotonic() - begun
        return Verdict(name=mutant.name, outcome=outcome, seconds=seconds, output=output)


def judge_all(
    mutants: Sequence[Mutant], *, jobs: int = 1, on_verdict: Callable[[Verdict], None]
) -> list[Verdict]:
    """Try every mutant, ``jobs`` at a time; ``on_verdict`` is called with each verdict.

    Raises:
        UsageError: the tests fail without any edit, so that they would prove nothing.
    """
    tests = sorted({mutant.test for mutant in mutants})
    with tempfile.TemporaryDirectory(prefix="ninfer-pool-mutants-") as folder:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for number in range(jobs):
            copies.put(Copy(Path(folder) / str(number)))
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
            on_verdict(verdict)
            return verdict

        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(judge, mutants))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line of `scripts/mutants`; return its exit code."""
    args = _parser().parse_args(argv)
    try:
        chosen = [mutant for mutant in listed() if args.only in mutant.name]
        if not chosen:
            raise UsageError(f"--only: no mutant's name contains {args.only!r}")
        if args.list:
            print(*(f"{mutant.name}: {mutant.test}" for mutant in chosen), sep="\n")
            return 0
        verdicts = judge_all(chosen, jobs=args.jobs, on_verdict=_print)
    except UsageError as error:
        print(f"mutants: error: {error}", file=sys.stderr)
        return 2
    bad = [verdict for verdict in verdicts if verdict.outcome != "killed"]
    for verdict in bad:
        print(f"\n{verdict.outcome}: {verdict.name}\n{verdict.output}")
    print(f"{len(verdicts) - len(bad)} of {len(verdicts)} killed")
    return int(bool(bad))


def _print(verdict: Verdict) -> None:
    print(f"{verdict.outcome:8} {verdict.seconds:5.1f} s  {verdict.name}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/mutants", description=__doc__, allow_abbrev=False, epilog=DRAWN
    )
    parser.add_argument("--only", metavar="NAME", default="", help="those whose name contains NAME")
    parser.add_argument("--jobs", type=int, default=1, help="how many at once (default 1)")
    parser.add_argument("--list", action="store_true", help="only print the table")
    return parser
