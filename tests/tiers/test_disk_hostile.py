"""Manifests and bundles by somebody who means harm: valid checksums, any contents."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ninfer_pool.core import identity
from ninfer_pool.errors import StoreError
from ninfer_pool.tiers.disk import manifest
from ninfer_pool.tiers.disk.geometry import decode_geometry
from tests.tiers.entries import MIB, SMALL, Talk, opened
from tests.tiers.stores import intact, peak, places, reopened, reseal

ODD: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63, 10**400, 1.5, 1e308, "", "x", "../../x", "\x00", [], {},
    [[]], {"a": 1}, "0" * 32, "A" * 32, "/etc/passwd",
]  # fmt: skip


@pytest.fixture
def entry(tmp_path: Path) -> Path:
    """The manifest of the one entry of a store."""
    folder = opened(tmp_path / "store")
    talk = Talk(seed=1, tokens=19)
    record = talk.record(folder, talk.write(folder, 0, 10, 19), 10, 19, attributes=((2, b"M"),))
    name = folder.commit(record)
    folder.close()
    return tmp_path / "store" / folder.fingerprint / "entries" / f"{name}.json"


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def test_any_field_may_hold_anything(entry: Path) -> None:
    folder, read = opened(entry.parents[2]), 0
    raw = entry.read_bytes()
    for way in places(manifest.unseal(raw)):
        for odd in ODD:
            fields = manifest.unseal(raw)
            put(fields, way=way, value=odd)
            try:
                record = manifest.decode(
                    manifest.seal(fields), fingerprint=folder.fingerprint, geometry=SMALL
                )
                tokens = folder.tokens(record)
            except StoreError:
                continue
            read += 1
            assert tokens == Talk(seed=1, tokens=19).token_bytes(0, 19)
    assert 0 < read < 300  # a counter, a time or a kind may be another, little else
    folder.close()


def put(fields: Any, *, way: tuple[Any, ...], value: Any) -> None:
    at(fields, way[:-1])[way[-1]] = value


def test_any_field_may_be_missing_or_new(entry: Path) -> None:
    store, fresh = entry.parents[2], entry.parents[3] / "fresh"
    shutil.copytree(store, fresh)
    for way in places(json.loads(entry.read_bytes())):
        if way == ("checksum",) or isinstance(way[-1], int):
            continue

        def change(fields: Any, way: tuple[Any, ...] = way) -> None:
            inner = at(fields, way[:-1])
            inner["new"] = inner.pop(way[-1])

        shutil.rmtree(store)
        shutil.copytree(fresh, store)
        reseal(entry, change)
        folder = opened(store)
        assert (len(folder.records), folder.damaged) == (0, 1)
        folder.close()


@pytest.mark.parametrize(
    "name",
    [
        "../../../outside",
        "../outside",
        "/outside",
        "./outside",
        "outside/",
        "",
        ".",
        "..",
        "a\x00b",
    ],
)
def test_no_name_leads_outside(entry: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "outside").write_bytes(next(entry.parents[1].glob("runs/*")).read_bytes())

    def change(fields: Any) -> None:
        fields["runs"][0]["file"] = name

    reseal(entry, change)
    assert reopened(entry.parents[2]) == ([], 1)
    assert (tmp_path / "outside").exists()


def test_a_manifest_that_is_the_same_in_another_form_is_not_ours(entry: Path) -> None:
    fields = json.loads(entry.read_bytes())
    del fields["checksum"]
    rest = json.dumps(fields).encode()[1:]
    raw = b'{"checksum":"' + identity.xxh3_128(rest).hex().encode() + b'",' + rest
    entry.unlink()
    entry.with_name(f"{manifest.identity(raw)}.json").write_bytes(raw)
    assert reopened(entry.parents[2]) == ([], 1)


def sealed(rest: bytes) -> bytes:
    return b'{"checksum":"' + identity.xxh3_128(rest).hex().encode() + b'",' + rest


LARGE = 15 * MIB
HOSTILE = {
    "not a manifest": lambda: b"\0" * LARGE,
    "many lists": lambda: sealed(b'"x":[' + b"[]," * (LARGE // 3) + b"[]]}"),
    "deep lists": lambda: sealed(b'"x":' + b"[" * 900_000 + b"]" * 900_000 + b"}"),
    "deep objects": lambda: sealed(b'"x":' + b'{"a":' * 400_000 + b"}" * 400_001),
    "long text": lambda: sealed(b'"x":"' + b"y" * LARGE + b'"}'),
    "wide text": lambda: sealed(b'"x":"' + "\U0001f600".encode() + b"y" * LARGE + b'"}'),
    "long number": lambda: sealed(b'"x":' + b"9" * LARGE + b"}"),
    "many numbers": lambda: sealed(b'"x":[' + b"9.5," * 900_000 + b"1]}"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_large_manifest_takes_little_memory(entry: Path, kind: str) -> None:
    raw = HOSTILE[kind]()
    entry.unlink()
    entry.with_name(f"{manifest.identity(raw)}.json".replace("\0", "0")).write_bytes(raw)
    del raw
    store = entry.parents[2]
    assert peak(lambda: reopened(store)) < 12 * manifest.MAX_MANIFEST_BYTES


def test_files_that_say_they_are_huge_are_not_read(entry: Path) -> None:
    store = entry.parents[2]
    folder = entry.parents[1]
    (run, *_) = folder.glob("runs/*")
    (image, *_) = folder.glob("images/*")
    for path in (entry, run, image, folder / "geometry.json", folder / "runs" / "orphan"):
        path.touch()
        os.truncate(path, 1 << 40)
    assert peak(lambda: reopened(store)) < MIB
    os.truncate(store / "ninfer-pool.json", 1 << 40)
    with pytest.raises(StoreError, match="at most 4096"):
        opened(store)


def test_a_run_of_many_tokens_takes_their_bytes_alone(entry: Path) -> None:
    """A sparse file of the size that a run's positions ask for: its ids are read, no more."""
    store, count = entry.parents[2], 1 << 20
    path = entry.parents[1] / "runs" / ("0" * 32 + ".safetensors")
    folder = opened(store)
    size = folder.run_bytes(0, count)
    folder.close()
    path.touch()
    os.truncate(path, size)

    def change(fields: Any) -> None:
        run = {"begin": 0, "end": count, "bytes": size, "file": path.name, "checksum": "0" * 32}
        fields["runs"] = [{**run, "tokens_checksum": "0" * 32}]
        fields["marks"] = fields["marks"][:1]
        fields["marks"][0] |= {"position": count, "runs": [0]}
        fields["tokens"] = count

    reseal(entry, change)
    assert peak(lambda: reopened(store)) < 4 * count + MIB
    assert not path.exists()


def test_reading_takes_no_more_memory_than_a_batch(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    talk = Talk(seed=1, tokens=200_000)
    (run,) = talk.write(folder, 0, talk.tokens)
    tokens, into = talk.token_bytes(0, talk.tokens), np.empty_like(talk.pages)
    size = len(tokens)
    rows = 2 * peak(lambda: list(into)) + peak(lambda: folder.run_bytes(0, talk.tokens))
    read = peak(lambda: folder.read_run(run, into=into, tokens=tokens))
    skipped = peak(lambda: folder.read_run(run, into=[], tokens=b"", upto=0))
    assert read < size + rows + 24 * MIB  # a view for each of 50,000 tiny pages
    assert skipped < 2 * size + 8 * MIB
    folder.close()


@pytest.mark.parametrize(
    "raw",
    [b"", b"[]", b"null", b"[" * 10_000, b'{"version": 1}', b"\xff", b'{"version": [1]}'],
    ids=repr,
)
def test_a_geometry_by_anybody_is_read_or_refused(raw: bytes) -> None:
    with pytest.raises(StoreError):
        decode_geometry(raw, "0" * 32)


def test_intact_entries_are_offered_beside_hostile_ones(entry: Path) -> None:
    store = entry.parents[2]
    folder = opened(store)
    talk = Talk(seed=2, tokens=26)
    name = talk.commit(folder)
    folder.close()
    reseal(entry, lambda fields: fields.update(tokens=10**9))
    assert reopened(store)[1] == 1
    folder = opened(store)
    assert intact(folder) == [name]
    folder.close()
