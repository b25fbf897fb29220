"""Every wrong edit of the core is seen by some test: edits by hand, and as many drawn ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core import mutants

FEW = 6
HAND = mutants.by_hand()
DRAWN = mutants.drawn(3 * FEW)


def some(every: list[mutants.Mutant]) -> list[object]:
    """All of them as parameters; those past the first few are for long runs."""
    return [pytest.param(mutant, at, id=mutant.name) for at, mutant in enumerate(every)]


def skip_unless_long(at: int, *, long_run: bool) -> None:
    if at >= FEW and not long_run:
        pytest.skip("only with --long")


def test_there_are_as_many_drawn_as_by_hand() -> None:
    assert len(DRAWN) >= len(HAND) >= 12


@pytest.mark.slow
@pytest.mark.parametrize(("mutant", "at"), some(HAND))
def test_a_wrong_edit_by_hand_is_seen(
    mutant: mutants.Mutant,
    at: int,
    long_run: bool,  # noqa: FBT001
    tmp_path: Path,
) -> None:
    skip_unless_long(at, long_run=long_run)
    ran = mutants.run(mutant, tmp_path)
    assert ran is None or ran.returncode == 1, ran.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("mutant", "at"), some(DRAWN))
def test_a_drawn_wrong_edit_is_seen(
    mutant: mutants.Mutant,
    at: int,
    long_run: bool,  # noqa: FBT001
    tmp_path: Path,
) -> None:
    skip_unless_long(at, long_run=long_run)
    if mutant.name in mutants.EQUIVALENT:
        pytest.skip(mutants.EQUIVALENT[mutant.name])
    ran = mutants.run(mutant, tmp_path)
    assert ran is None or ran.returncode != 0, ran.stdout


def test_the_unchanged_core_passes_what_the_mutants_run(tmp_path: Path) -> None:
    file = "pages.py"
    source = (mutants.PACKAGE / file).read_text(encoding="utf-8")
    tests = ("test_index.py", "test_lease.py")
    ran = mutants.run(mutants.Mutant(file=file, source=source, name="none", tests=tests), tmp_path)
    assert ran is not None
    assert ran.returncode == 0, ran.stdout
