"""A store with three entries of two conversations, and ways to damage it."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ninfer_pool.errors import StoreError
from ninfer_pool.tiers.disk import manifest
from ninfer_pool.tiers.disk.files import Files
from ninfer_pool.tiers.disk.folder import Folder
from tests.tiers.entries import Talk, opened, tree_bytes

TALKS = {seed: Talk(seed=seed, tokens=tokens) for seed, tokens in ((1, 19), (2, 26), (3, 22))}


def make_store(path: Path) -> None:
    """Two checkpoints of one conversation, an entry that is a prefix of it, and another one."""
    folder = opened(path)
    one, two, _ = TALKS.values()
    one.commit(folder, 0, 10, 19, used=1)
    one.commit(folder, 0, 10, used=2)
    two.commit(folder, 0, 26, used=3)
    folder.close()


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that no test changes."""
    path = tmp_path_factory.mktemp("made") / "store"
    make_store(path)
    return path


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    """A store to damage."""
    return Path(shutil.copytree(made, tmp_path / "store"))


def files_of(path: Path, folder: str) -> list[Path]:
    """The files of one kind, of every fingerprint."""
    return sorted(path.glob(f"*/{folder}/*"))


def payload_files(path: Path) -> list[Path]:
    """Every file of the store below its fingerprint, sorted."""
    return sorted(each for each in path.glob("*/*/*") if each.is_file())


def ignores_modes() -> bool:
    """Whether this process may write where a folder's mode says no, as root may."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o500)
        return os.access(name, os.W_OK)


def needed(path: Path) -> dict[Path, set[str]]:
    """The ids of the records that need each file, by its path below the store."""
    folder = opened(path)
    found: dict[Path, set[str]] = {}
    for name, record in folder.records.items():
        for file in [("entries", f"{name}.json"), *record.files()]:
            found.setdefault(Path(folder.fingerprint, *file), set()).add(name)
    folder.close()
    return found


def talk_of(folder: Folder, record: manifest.EntryRecord) -> Talk:
    """The conversation that a record is of."""
    tokens = folder.tokens(record)
    return next(t for t in TALKS.values() if t.token_bytes(0, t.tokens).startswith(tokens))


def intact(folder: Folder) -> list[str]:
    """The ids of records that are whole; any other must be seen to be damaged."""
    found = []
    for name, record in folder.records.items():
        try:
            talk_of(folder, record).check(folder, record)
        except StoreError:
            continue
        found.append(name)
    return found


def intact_or_error(folder: Folder) -> list[str]:
    """As `intact`; nothing where not even the token ids can be read."""
    try:
        return intact(folder)
    except StoreError:
        return []


def reopened(path: Path, files: Files | None = None) -> tuple[list[str], int]:
    """Open a store; returns the ids of what is whole and how many manifests were damaged.

    Whatever is in it, its bytes are counted right and the next opening finds nothing to do.
    """
    folder = opened(path, files=files)
    try:
        found, damaged = intact(folder), folder.damaged
        assert folder.bytes == tree_bytes(path)
        offered = folder.records
    finally:
        folder.close()
    folder = opened(path)
    try:
        assert folder.records == offered
        assert (folder.damaged, folder.reclaimed) == (0, 0)
    finally:
        folder.close()
    return found, damaged


def reseal(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Change a manifest and give it the checksum and the name that then fit."""
    fields = json.loads(path.read_bytes())
    del fields["checksum"]
    change(fields)
    raw = manifest.seal(fields)
    path.unlink()
    path = path.with_name(f"{manifest.identity(raw)}.json")
    path.write_bytes(raw)
    return path


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value within JSON."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        yield (*path, key)
        if isinstance(item, dict | list):
            yield from places(item, (*path, key))


def peak(work: Callable[[], object]) -> int:
    """The most bytes that Python and numpy held at once during some work."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
