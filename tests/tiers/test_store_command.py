"""`ninfer-pool store`: what it shows, finds, removes, and how it refuses."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ninfer_pool import cli
from ninfer_pool.errors import UsageError
from ninfer_pool.tiers.disk.folder import Folder
from ninfer_pool.tiers.disk.store_command import parse_duration
from tests.tiers.entries import SMALL, SPACE, Talk, opened, tree_bytes
from tests.tiers.stores import ignores_modes, intact, payload_files, reopened

Capture = pytest.CaptureFixture[str]
DAY = 86_400


def run(capsys: Capture, *words: object) -> tuple[int, str, str]:
    code = cli.main(["store", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


def listed(capsys: Capture, path: Path) -> dict[str, Any]:
    code, out, err = run(capsys, "ls", path, "--json")
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found


def refused(capsys: Capture, *words: object) -> str:
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("ninfer-pool: error: ")
    assert err.count("\n") == 1
    return err


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Entries of two fingerprints, made some days ago; one of them salted."""
    path, now = tmp_path / "store", time.time()
    folder = opened(path)
    Talk(seed=1, tokens=19).commit(folder, 0, 10, 19, used=7, created=now - 3 * DAY)
    Talk(seed=2, tokens=26).commit(folder, 0, 26, used=5, created=now - 2 * DAY)
    secret = Talk(seed=4, tokens=9, namespace=replace(SPACE, salt="tenant-of-secrets"))
    secret.commit(folder, 0, 9, used=9, created=now - 60)
    folder.close()
    space = replace(SPACE, weights="sha256:other")
    folder = Folder(path, geometry=SMALL, namespace=space)
    other = Talk(seed=3, tokens=30, namespace=space)
    other.commit(folder, 0, 30, used=1, created=now - 9 * DAY)
    folder.close()
    return path


def test_ls_lists_entries_of_all_fingerprints(two: Path, capsys: Capture) -> None:
    code, out, err = run(capsys, "ls", two)
    assert (code, err) == (0, "")
    head, *rows, last = out.splitlines()
    assert head.split() == [
        "id", "key", "tokens", "checkpoints", "bytes", "salted", "fingerprint", "age",
    ]  # fmt: skip
    cells = [row.split() for row in rows]
    mine = [row for row in cells if row[-2] == SMALL.fingerprint(SPACE)[:12]]
    assert [(row[2], row[3]) for row in mine] == [("9", "1"), ("19", "2"), ("26", "1")]
    assert sorted(row[-1] for row in cells) == ["2d", "3d", "60s", "9d"]
    assert sorted(row[-3] for row in cells) == ["no", "no", "no", "yes"]
    assert last.startswith("4 entries, ")


def test_ls_tells_no_token_and_no_salt(two: Path, capsys: Capture) -> None:
    out = run(capsys, "ls", two)[1] + run(capsys, "ls", two, "--json")[1]
    assert "tenant-of-secrets" not in out
    ids = Talk(seed=1, tokens=19).ids.tolist()
    assert not [token for token in ids if token > 9999 and str(token) in out]


def test_json_holds_everything_in_full(two: Path, capsys: Capture) -> None:
    found = listed(capsys, two)
    assert found["bytes"] == tree_bytes(two)
    assert [each["weights"] for each in found["fingerprints"]].count(SPACE.weights) == 1
    entry = next(each for each in found["entries"] if each["tokens"] == 19)
    assert [mark["position"] for mark in entry["checkpoints"]] == [10, 19]
    assert len(entry["id"]) == len(entry["key"]) == len(entry["fingerprint"]) == 32
    folder = opened(two)
    record = folder.records[entry["id"]]
    assert entry["key"] == record.key
    assert entry["bytes"] == folder.record_bytes(record) + sum(record.files().values())
    folder.close()


def test_an_empty_store_is_listed_and_verified(tmp_path: Path, capsys: Capture) -> None:
    opened(tmp_path).close()
    assert run(capsys, "ls", tmp_path)[1].startswith("0 entries, ")
    assert listed(capsys, tmp_path)["entries"] == []
    assert run(capsys, "verify", tmp_path)[0] == 0


def test_verify_says_what_is_damaged(two: Path, capsys: Capture) -> None:
    code, out, _ = run(capsys, "verify", two)
    assert (code, out) == (0, "4 entries in 10 files read; none damaged\n")
    for path in payload_files(two):
        raw = path.read_bytes()
        path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        code, out, _ = run(capsys, "verify", two)
        assert code == 1
        assert f"damaged: {path.relative_to(two)}: " in out
        assert out.count("\n") == 2
        code, out, _ = run(capsys, "verify", two, "--json")
        assert code == 1
        (damaged,) = json.loads(out)["damaged"]
        assert damaged["file"] == str(path.relative_to(two))
        assert len(damaged["entries"]) == 1
        path.write_bytes(raw)
    (two / SMALL.fingerprint(SPACE) / "geometry.json").write_text("?")
    assert run(capsys, "verify", two)[0] == 1


def test_looking_changes_nothing(two: Path, capsys: Capture) -> None:
    (two / SMALL.fingerprint(SPACE) / "runs" / ".tmp-1").write_text("half")
    payload_files(two)[0].write_text("damaged")
    before = {path: path.read_bytes() for path in two.rglob("*") if path.is_file()}
    run(capsys, "ls", two)
    run(capsys, "verify", two)
    assert before == {path: path.read_bytes() for path in two.rglob("*") if path.is_file()}


def test_another_version_of_a_fingerprint_is_left_out_not_damaged(
    two: Path, capsys: Capture
) -> None:
    path = two / SMALL.fingerprint(SPACE) / "geometry.json"
    path.write_bytes(path.read_bytes().replace(b'"version": 1', b'"version": 3'))
    code, out, _ = run(capsys, "ls", two)
    assert code == 0
    assert "1 entry, " in out
    assert "left out: " in out
    assert "version: 3; this ninfer-pool reads 1" in out
    assert run(capsys, "verify", two)[0] == 0
    before = tree_bytes(two)
    assert run(capsys, "prune", two)[0] == 0
    assert tree_bytes(two) == before


def test_prune_removes_what_no_entry_needs(two: Path, capsys: Capture) -> None:
    folder = two / SMALL.fingerprint(SPACE)
    (folder / "runs" / ".tmp-1").write_bytes(bytes(1000))
    (folder / "images" / f"{'0' * 32}.safetensors").write_bytes(bytes(48))
    code, out, _ = run(capsys, "prune", two)
    assert code == 0
    assert out == "removed 0 entries and 2 files that no entry needed; freed 1.02 KiB\n"
    assert len(listed(capsys, two)["entries"]) == 4


def test_prune_to_a_budget_takes_the_least_recently_used_first(two: Path, capsys: Capture) -> None:
    left = [9, 19, 26, 30]  # in the order in which they go, reversed
    while left:
        budget = tree_bytes(two) - 1
        code, out, _ = run(capsys, "prune", two, "--budget", budget)
        assert code == 0
        assert out.startswith("removed 1 entry and 0 files")
        assert tree_bytes(two) <= budget
        left.pop()
        assert sorted(each["tokens"] for each in listed(capsys, two)["entries"]) == left
    assert reopened(two) == ([], 0)


def test_prune_by_age_and_by_fingerprint(two: Path, capsys: Capture) -> None:
    assert run(capsys, "prune", two, "--older-than", "60h")[1].startswith("removed 2 entries")
    assert [each["tokens"] for each in listed(capsys, two)["entries"]] == [9, 26]
    name = SMALL.fingerprint(SPACE)
    assert run(capsys, "prune", two, "--foreign", name)[1].startswith("removed 2 entries")
    assert not (two / name).exists()
    assert "not in DIR" in refused(capsys, "prune", two, "--foreign", name)


def test_rm_takes_ids_keys_and_their_beginnings(two: Path, capsys: Capture) -> None:
    entries = listed(capsys, two)["entries"]
    words = [entries[0]["id"], entries[1]["key"], entries[2]["id"][:8]]
    code, out, _ = run(capsys, "rm", two, *words, words[0])
    assert code == 0
    assert out.startswith("removed 3 entries; freed ")
    (left,) = listed(capsys, two)["entries"]
    assert left["id"] == entries[3]["id"]


def test_rm_removes_all_or_nothing(two: Path, capsys: Capture) -> None:
    name = listed(capsys, two)["entries"][0]["id"]
    assert "no entry has this id or key" in refused(capsys, "rm", two, name, "f" * 31)
    assert "6 to 32 hexadecimal digits" in refused(capsys, "rm", two, name, "../x")
    assert "6 to 32 hexadecimal digits" in refused(capsys, "rm", two, name[:5])
    assert len(listed(capsys, two)["entries"]) == 4


def test_a_removed_entry_stays_removed(store: Path, capsys: Capture) -> None:
    entries = listed(capsys, store)["entries"]
    run(capsys, "rm", store, entries[0]["id"])
    folder = opened(store)
    assert len(intact(folder)) == 2
    assert entries[0]["id"] not in folder.records
    folder.close()


@pytest.mark.parametrize("words", [["ls"], ["verify"], ["prune"], ["rm", "0" * 32]], ids=str)
def test_a_running_writers_directory_is_refused(
    store: Path, capsys: Capture, words: list[str]
) -> None:
    folder = opened(store)
    before = tree_bytes(store)
    told = refused(capsys, words[0], store, *words[1:])
    assert "in use by another process; stop it first" in told
    assert tree_bytes(store) == before
    folder.close()


@pytest.mark.parametrize("verb", ["ls", "verify", "prune"])
def test_what_is_no_store_is_refused(tmp_path: Path, capsys: Capture, verb: str) -> None:
    (tmp_path / "file").write_text("x")
    assert "No such file or directory" in refused(capsys, verb, tmp_path / "missing")
    assert "Not a directory" in refused(capsys, verb, tmp_path / "file")
    assert "no store" in refused(capsys, verb, tmp_path)
    (tmp_path / "empty").mkdir()
    assert "no store" in refused(capsys, verb, tmp_path / "empty")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["empty", "file"]


@pytest.mark.parametrize("verb", ["ls", "verify", "prune"])
def test_another_version_is_refused(store: Path, capsys: Capture, verb: str) -> None:
    for version, told in ((2, "of a newer"), (0, "of an older")):
        (store / "ninfer-pool.json").write_text(
            json.dumps({"format": "ninfer-pool-store", "version": version})
        )
        assert told in refused(capsys, verb, store)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--budget", "8G"], "unit 'G' is not known"),
        (["--budget", "-1"], "is not a size"),
        (["--older-than", "7"], "is not a time"),
        (["--older-than", "soon"], "is not a time"),
        (["--older-than", "-1d"], "is not a time"),
        (["--foreign", "abc"], "write its 32 digits"),
        (["--all"], "unrecognized arguments"),
    ],
    ids=str,
)
def test_bad_options_are_refused(store: Path, capsys: Capture, words: list[str], told: str) -> None:
    before = tree_bytes(store)
    assert told in refused(capsys, "prune", store, *words)
    assert tree_bytes(store) == before


def test_durations() -> None:
    units = {"90s": 90, "30m": 1800, "12h": 43_200, "7d": 604_800, "2w": 1_209_600}
    assert {text: parse_duration(text) for text in units} == units
    with pytest.raises(UsageError, match=r"'1\.5d' is not a time"):
        parse_duration("1.5d")


@pytest.mark.skipif(ignores_modes(), reason="root may read everything")
def test_anothers_store_is_refused(store: Path, capsys: Capture) -> None:
    store.chmod(0)
    try:
        assert "Permission denied" in refused(capsys, "ls", store)
    finally:
        store.chmod(0o700)


def test_a_copy_is_a_store(two: Path, tmp_path: Path, capsys: Capture) -> None:
    copy = Path(shutil.copytree(two, tmp_path / "copy"))
    (copy / "lock").unlink()
    assert [each["id"] for each in listed(capsys, copy)["entries"]] == [
        each["id"] for each in listed(capsys, two)["entries"]
    ]
    assert not (copy / "lock").exists()
