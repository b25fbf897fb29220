"""A store that was damaged or changed: right bytes or none, and nothing outside."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path

import pytest

from ninfer_pool.errors import StoreError
from ninfer_pool.tiers.disk.folder import Folder
from tests.tiers.entries import opened, tree_bytes
from tests.tiers.stores import intact, intact_or_error, needed, payload_files, reopened


class Copies:
    """Copies of a store, each damaged in one way; what does not need the damaged file is whole."""

    def __init__(self, made: Path, path: Path) -> None:
        self.made = made
        self.path = path
        self.needed = needed(made)
        self.names = set().union(*self.needed.values())

    def fresh(self) -> Path:
        """A new copy."""
        shutil.rmtree(self.path, ignore_errors=True)
        return Path(shutil.copytree(self.made, self.path))

    def check(self, *damaged: Path) -> None:
        """Just what needs the damaged files is lost."""
        lost = set().union(*(self.needed[file] for file in damaged))
        found, _ = reopened(self.path)
        assert set(found) == self.names - lost, damaged


@pytest.fixture
def copies(made: Path, tmp_path: Path) -> Copies:
    return Copies(made, tmp_path / "copy")


def test_a_bit_flipped_anywhere_is_seen(copies: Copies, request: pytest.FixtureRequest) -> None:
    step = 1 if request.config.getoption("--long") else 61
    for name in copies.needed:
        for offset in range(0, (copies.made / name).stat().st_size, step):
            path = copies.fresh() / name
            raw = bytearray(path.read_bytes())
            raw[offset] ^= 1 << offset % 8
            path.write_bytes(raw)
            copies.check(name)


def test_a_file_cut_short_or_longer_anywhere_is_seen(copies: Copies) -> None:
    for name in copies.needed:
        size = (copies.made / name).stat().st_size
        for length in [*(size * part // 16 for part in range(16)), size - 1, size + 1, size + 4096]:
            path = copies.fresh() / name
            os.truncate(path, length)
            copies.check(name)


def test_swapped_files_are_seen(copies: Copies) -> None:
    for one, other in itertools.combinations(copies.needed, 2):
        path = copies.fresh()
        (path / one).rename(path / "aside")
        (path / other).rename(path / one)
        (path / "aside").rename(path / other)
        copies.check(one, other)


@pytest.mark.parametrize("change", ["missing", "longer", "shorter"])
def test_a_file_that_is_missing_or_of_another_size_is_seen_when_opening(
    copies: Copies, change: str
) -> None:
    for name, lost in copies.needed.items():
        path = copies.fresh() / name
        if change == "missing":
            path.unlink()
        else:
            os.truncate(path, path.stat().st_size + (1 if change == "longer" else -1))
        folder = opened(copies.path)
        assert set(folder.records) == copies.names - lost
        gone = change == "missing" and name.parts[1] == "entries"
        assert folder.damaged == (0 if gone else len(lost))
        folder.close()
        copies.check(name)


def test_a_link_put_there_after_opening_is_not_followed(store: Path, tmp_path: Path) -> None:
    folder = opened(store)
    for number, path in enumerate(payload_files(store)):
        outside = path.rename(tmp_path / str(number))
        path.symlink_to(outside)
    assert intact_or_error(folder) == []
    folder.close()


@pytest.mark.parametrize("kind", ["link", "dangling", "fifo", "folder", "full folder"])
def test_only_plain_files_are_read(copies: Copies, tmp_path: Path, kind: str) -> None:
    for name in copies.needed:
        path = copies.fresh() / name
        outside = tmp_path / "outside"
        raw = path.read_bytes()
        outside.write_bytes(raw)
        path.unlink()
        if kind == "link":
            path.symlink_to(outside)
        elif kind == "dangling":
            path.symlink_to(tmp_path / "nothing")
        elif kind == "fifo":
            os.mkfifo(path)
        else:
            path.mkdir()
            if kind == "full folder":
                (path / "kept").write_text("theirs")
        copies.check(name)
        assert outside.read_bytes() == raw
        assert kind != "full folder" or (path / "kept").read_text() == "theirs"


@pytest.mark.parametrize("name", ["runs", "images", "entries", ""])
def test_a_folder_that_is_a_link_is_refused_and_what_it_points_to_left(
    store: Path, tmp_path: Path, name: str
) -> None:
    folder = next(store.glob("*/")) / name
    outside = tmp_path / "outside"
    folder.rename(outside)
    folder.symlink_to(outside)
    before = {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()}
    with pytest.raises(StoreError, match="directory"):
        opened(store)
    assert before == {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["lock", "ninfer-pool.json"])
@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_a_lock_or_notice_that_is_no_plain_file_is_refused(
    store: Path, tmp_path: Path, name: str, kind: str
) -> None:
    outside = tmp_path / "outside"
    (store / name).rename(outside)
    if kind == "link":
        (store / name).symlink_to(outside)
    elif kind == "fifo":
        os.mkfifo(store / name)
    else:
        (store / name).mkdir()
    before, files = outside.read_bytes(), payload_files(store)
    with pytest.raises(StoreError, match=name):
        opened(store)
    assert outside.read_bytes() == before
    assert payload_files(store) == files


def test_a_damaged_geometry_is_written_again(store: Path) -> None:
    (path,) = store.glob("*/geometry.json")
    right = path.read_bytes()
    for wrong in (b"", b"{}", right[:-1], right + b" ", right.replace(b"128", b"129")):
        path.write_bytes(wrong)
        assert len(reopened(store)[0]) == 3
        assert path.read_bytes() == right
    path.unlink()
    assert len(reopened(store)[0]) == 3


@pytest.mark.parametrize(
    ("notice", "told"),
    [
        (b'{"format": "ninfer-pool-store", "version": 2}', "version 2, of a newer"),
        (b'{"format": "ninfer-pool-store", "version": 0}', "version 0, of an older"),
        (b'{"format": "ninfer-pool-store", "version": "1"}', "version '1'"),
        (b'{"format": "other", "version": 1}', "format 'other'"),
        (b'{"format": "ninfer-pool-store"}', "damaged"),
        (b"", "damaged"),
        (b"[" * 4096, "damaged"),
        (b" " * 5000, "5000 bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_version_or_format_is_refused_and_left_alone(
    store: Path, notice: bytes, told: str
) -> None:
    (store / "ninfer-pool.json").write_bytes(notice)
    (store / ".tmp-theirs").write_text("half")
    before = tree_bytes(store)
    with pytest.raises(StoreError, match=told):
        opened(store)
    assert tree_bytes(store) == before


def test_a_folder_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(StoreError, match="no store; needs a folder that ninfer-pool made"):
        opened(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]
    with pytest.raises(StoreError, match=r"letter\.txt"):
        opened(tmp_path / "letter.txt")


def test_a_foreign_folder_of_another_version_is_never_touched(store: Path) -> None:
    (fingerprint,) = (path for path in store.iterdir() if path.is_dir())
    other = store / ("f" * 32)
    shutil.copytree(fingerprint, other)
    geometry = other / "geometry.json"
    geometry.write_bytes(geometry.read_bytes().replace(b'"version": 1', b'"version": 2'))
    before = {path: path.read_bytes() for path in other.rglob("*") if path.is_file()}
    folder = opened(store)
    assert folder.bytes == tree_bytes(store)
    assert folder.drop_foreign(2**40) == 0
    folder.close()
    assert before == {path: path.read_bytes() for path in other.rglob("*") if path.is_file()}


def test_what_is_half_written_is_removed_and_counted(store: Path) -> None:
    (entries,) = store.glob("*/entries")
    (entries / ".tmp-1").write_text("half")
    (entries.parent / "runs" / ".tmp-2").write_text("half")
    (entries.parent / "runs" / f"{'0' * 32}.safetensors").write_text("orphan")
    (entries.parent / "images" / "what").write_text("?")
    (store / ".tmp-3").write_text("half")
    (entries.parent / ".tmp-4").write_text("half")
    folder = opened(store)
    assert (folder.damaged, folder.reclaimed) == (0, 4)
    assert len(intact(folder)) == 3
    assert not [path for path in store.rglob("*") if path.name.startswith(".tmp")]
    assert len(payload_files(store)) == len(needed_files(folder))
    folder.close()


def needed_files(folder: Folder) -> set[tuple[str, str]]:
    """The files that the records of a folder need, manifests included."""
    found = {("entries", f"{name}.json") for name in folder.records}
    return found.union(*(record.files() for record in folder.records.values()))


def test_kv_that_has_rotted_since_opening_is_not_handed_out(store: Path) -> None:
    folder = opened(store)
    for path in payload_files(store):
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
    assert intact(folder) == []
    folder.close()
