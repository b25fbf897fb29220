"""Each wrong edit of the table is detected by the test that the table names."""

from __future__ import annotations

import pytest

from tests.machinery import edits, mutants
from tests.machinery.edits import EDITS, Edit

FEW = 4
"""Mutants tried in every run; the others with `--long`."""
MUTANTS = mutants.listed()


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> mutants.Copy:
    return mutants.Copy(tmp_path_factory.mktemp("mutants"))


def test_there_are_at_least_forty() -> None:
    assert len(MUTANTS) >= 40
    assert len({edit.name for edit in EDITS}) == len(EDITS)


def test_an_edit_changes_one_line_and_names_a_test_that_exists() -> None:
    for edit in EDITS:
        assert changes_one_line(edit), edit.name
        file, _, name = edit.test.partition("::")
        source = (mutants.ROOT / file).read_text(encoding="utf-8")
        assert f"def {name.partition('[')[0]}(" in source, edit.name


def changes_one_line(edit: Edit) -> bool:
    right, wrong = edit.right.splitlines(), edit.wrong.splitlines()
    same = [line for line in wrong if line in right]
    return len(right) - len(same) <= 1 or len(wrong) == len(right) - 1 or not edit.wrong


@pytest.mark.slow
def test_a_wrong_edit_is_detected(copy: mutants.Copy, *, long_run: bool) -> None:
    for mutant in MUTANTS if long_run else MUTANTS[:: -(-len(MUTANTS) // FEW)]:
        verdict = copy.judge(mutant)
        assert verdict.outcome == "killed", f"{mutant.name}: {verdict.output}"


# -- the command ------------------------------------------------------------------------------


def use(monkeypatch: pytest.MonkeyPatch, *chosen: Edit) -> None:
    monkeypatch.setattr(edits, "EDITS", chosen)


KEYS = "tests/core/test_keys.py::test_a_key_is_the_hash_of_the_documented_encoding"
RIGHT = 'struct.pack("<Q", size), *tokens'
CORE = mutants.ROOT / "ninfer_pool" / "core"
SOURCES = {f"core/{path.name}": path.read_text(encoding="utf-8") for path in CORE.glob("*.py")}
FILE = next(name for name, source in SOURCES.items() if RIGHT in source)
SEEN = Edit(file=FILE, right=RIGHT, wrong="*tokens", name="seen", test=KEYS)
UNSEEN = Edit(
    file="core/radix.py", right="CHUNK = 1 << 18", wrong="CHUNK = 1 << 17", name="unseen", test=KEYS
)
UNPARSED = Edit(file=FILE, right=RIGHT, wrong="(", name="unparsed", test=KEYS)
STALE = Edit(file=FILE, right="no such text", wrong="", name="stale", test=KEYS)
TWICE = Edit(file=FILE, right="return", wrong="yield", name="twice", test=KEYS)
UNNAMED = Edit(file=FILE, right=RIGHT, wrong="*tokens", name="unnamed", test=f"{KEYS}_at_all")


@pytest.mark.slow
def test_a_survivor_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, SEEN, UNSEEN)
    assert mutants.main(["--only", "seen", "--jobs", "2"]) == 1
    printed = capsys.readouterr().out
    assert "survived: unseen" in printed
    assert "1 of 2 killed" in printed
    assert mutants.main(["--only", "no such name"]) == 2


@pytest.mark.slow
def test_an_edit_that_does_not_even_load_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, UNPARSED)
    assert mutants.main([]) == 1
    assert "error: unparsed" in capsys.readouterr().out


@pytest.mark.parametrize(("edit", "count"), [(STALE, 0), (TWICE, SOURCES[FILE].count("return"))])
def test_a_stale_edit_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], edit: Edit, count: int
) -> None:
    use(monkeypatch, SEEN, edit)
    assert mutants.main([]) == 2
    assert f"edit {edit.name!r}: its text occurs {count} times" in capsys.readouterr().err


@pytest.mark.slow
def test_a_named_test_that_does_not_exist_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, UNNAMED)
    assert mutants.main([]) == 2
    assert "the tests fail without any edit" in capsys.readouterr().err


def test_the_list_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert mutants.main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(MUTANTS)
