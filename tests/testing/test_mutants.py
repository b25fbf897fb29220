"""Every wrong edit of the core is seen by a test: edits by hand, and as many drawn ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from ninfer_pool.testing import __main__ as command
from ninfer_pool.testing import edits, mutants, mutations
from ninfer_pool.testing.edits import EDITS, Edit

FEW = 6
"""Of each list tried in every run; the others in long ones."""
ROOT = mutants.checkout()
HAND = mutants.by_hand(ROOT)
EVERY = mutations.drawn(ROOT / "ninfer_pool", command.DRAWN)
DRAWN = [mutant for mutant in EVERY if mutant.name not in mutations.EQUIVALENT]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> mutants.Copy:
    return mutants.Copy(ROOT, tmp_path_factory.mktemp("mutants"))


def some(every: list[mutants.Mutant]) -> list[object]:
    """All of them as parameters; those past the first few are for long runs."""
    return [pytest.param(mutant, at, id=mutant.name) for at, mutant in enumerate(every)]


def skip_unless_long(at: int, *, long_run: bool) -> None:
    if at >= FEW and not long_run:
        pytest.skip("only with --long")


def test_there_are_forty_by_hand_and_as_many_drawn() -> None:
    assert len(HAND) >= 40
    assert len(DRAWN) >= 40
    assert len({edit.name for edit in EDITS}) == len(EDITS)


@pytest.mark.parametrize("edit", EDITS, ids=[edit.name for edit in EDITS])
def test_an_edit_changes_one_line_and_names_a_test_that_exists(edit: Edit) -> None:
    right, wrong = edit.right.splitlines(), edit.wrong.splitlines()
    same = [line for line in wrong if line in right]
    assert len(right) - len(same) <= 1 or len(wrong) == len(right) - 1 or not edit.wrong
    file, _, name = edit.test.partition("::")
    source = (ROOT / file).read_text(encoding="utf-8")
    assert f"def {name.partition('[')[0]}(" in source


@pytest.mark.slow
@pytest.mark.parametrize(("mutant", "at"), some(HAND))
def test_a_wrong_edit_by_hand_is_seen(
    copy: mutants.Copy,
    mutant: mutants.Mutant,
    at: int,
    long_run: bool,  # noqa: FBT001
) -> None:
    skip_unless_long(at, long_run=long_run)
    verdict = copy.judge(mutant)
    assert verdict.outcome == "killed", verdict.output


@pytest.mark.slow
@pytest.mark.parametrize(("mutant", "at"), some(DRAWN))
def test_a_drawn_wrong_edit_is_seen(
    copy: mutants.Copy,
    mutant: mutants.Mutant,
    at: int,
    long_run: bool,  # noqa: FBT001
) -> None:
    skip_unless_long(at, long_run=long_run)
    verdict = copy.judge(mutant)
    assert verdict.outcome != "survived", verdict.output


# -- the command ------------------------------------------------------------------------------


def use(monkeypatch: pytest.MonkeyPatch, *chosen: Edit) -> None:
    monkeypatch.setattr(edits, "EDITS", chosen)


KEYS = "tests/core/test_keys.py::test_a_key_is_the_hash_of_the_documented_encoding"
RIGHT = 'struct.pack("<Q", size), *tokens'
SEEN = Edit(file="keys.py", right=RIGHT, wrong="*tokens", name="seen", test=KEYS)
UNSEEN = Edit(
    file="core/radix.py", right="CHUNK = 1 << 18", wrong="CHUNK = 1 << 17", name="unseen", test=KEYS
)
UNPARSED = Edit(file="keys.py", right=RIGHT, wrong="(", name="unparsed", test=KEYS)
STALE = Edit(file="keys.py", right="no such text", wrong="", name="stale", test=KEYS)
TWICE = Edit(file="keys.py", right="return", wrong="yield", name="twice", test=KEYS)
UNNAMED = Edit(file="keys.py", right=RIGHT, wrong="*tokens", name="unnamed", test=f"{KEYS}_at_all")


@pytest.mark.slow
def test_a_survivor_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, SEEN, UNSEEN)
    assert command.main(["mutants", "--only", "seen", "--jobs", "2"]) == 1
    told = capsys.readouterr().out
    assert "survived: unseen" in told
    assert "1 of 2 killed" in told
    assert command.main(["mutants", "--only", "no such name"]) == 2


@pytest.mark.slow
def test_an_edit_that_does_not_even_load_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, UNPARSED)
    assert command.main(["mutants"]) == 1
    assert "error: unparsed" in capsys.readouterr().out


@pytest.mark.parametrize(("edit", "count"), [(STALE, 0), (TWICE, 6)])
def test_a_stale_edit_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], edit: Edit, count: int
) -> None:
    use(monkeypatch, SEEN, edit)
    assert command.main(["mutants"]) == 2
    assert f"edit {edit.name!r}: its text occurs {count} times" in capsys.readouterr().err


@pytest.mark.slow
def test_a_named_test_that_does_not_exist_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, UNNAMED)
    assert command.main(["mutants"]) == 2
    assert "the tests fail without any edit" in capsys.readouterr().err


def test_the_list_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["mutants", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(HAND)


def test_without_a_checkout_it_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mutants, "__file__", str(tmp_path / "ninfer_pool" / "testing" / "m.py"))
    assert command.main(["mutants"]) == 2
    assert "needs a checkout" in capsys.readouterr().err


def test_a_known_harmless_edit_is_still_drawn() -> None:
    assert set(mutations.EQUIVALENT) <= {mutant.name for mutant in EVERY}
