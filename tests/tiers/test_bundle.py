"""One entry in one file: written at once or not at all, read back bit for bit or refused."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from ninfer_pool.core import identity
from ninfer_pool.errors import StoreError
from ninfer_pool.tiers.disk.bundle import read_bundle, write_bundle
from ninfer_pool.tiers.disk.bundle_header import METADATA, Bundle, BundleMark, header_for
from ninfer_pool.tiers.disk.files import Files
from ninfer_pool.tiers.disk.geometry import DiskGeometry
from ninfer_pool.tiers.disk.manifest import seal, unseal
from ninfer_pool.tiers.disk.runs import header_of
from tests.tiers.entries import MIB, SMALL, SPACE, WHOLE, Bytes, Talk, assert_rows
from tests.tiers.failing_files import READS, WRITES, FailingFiles, ShortFiles, failing
from tests.tiers.stores import peak

MARKS, TAIL = (7, 8, 50), 7
TALK = Talk(seed=1, tokens=50, namespace=replace(SPACE, salt="tenant", adapter="lora"))


def bundle_of(talk: Talk = TALK) -> Bundle:
    digest = talk.namespace.digest(grid=talk.geometry.grid, min_chunk=talk.geometry.min_chunk)
    attributes = ((3, b"M\x00\xff"), (9, b"T"))
    return Bundle(
        geometry=talk.geometry, namespace=talk.namespace, attributes=attributes,
        key=identity.sequence_key(digest, [talk.ids.data.cast("B")], attributes),
        tokens=talk.tokens, prompt_tokens=10, priority=-2, created=1.5,
        marks=tuple(
            BundleMark(position=at, kind="turn", cuts=(at,), expires=9.5, tail=at == TAIL)
            for at in MARKS
        ),
    )  # fmt: skip


def own_page() -> Bytes:
    """The page of the checkpoint at `TAIL`, computed apart."""
    return np.random.default_rng(9).integers(0, 256, SMALL.page_bytes, dtype=np.uint8)


def save(path: Path, *, talk: Talk = TALK, files: Files | None = None, keep: str = "tokens") -> int:
    return write_bundle(
        path, bundle_of(talk), tokens=talk.ids.tobytes() if keep else None, pages=iter(talk.pages),
        images={at: talk.image(at) for at in MARKS}, tails={TAIL: own_page()}, files=files,
    )  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "entry.safetensors"
    assert save(path) == path.stat().st_size
    return path


def load(path: Path, files: Files | None = None) -> Bundle:
    """Read everything and compare it."""
    with read_bundle(path, geometry=SMALL, namespace=SPACE, files=files) as reader:
        assert reader.tokens() == TALK.ids.tobytes()
        pages = np.full_like(TALK.pages, 7)
        reader.read_pages(pages)
        assert_rows(SMALL, pages, TALK.pages, upto=50)
        for at in MARKS:
            image = np.empty(SMALL.image_bytes, dtype=np.uint8)
            reader.read_image(at, image)
            assert (image == TALK.image(at)).all()
        tail = np.empty(SMALL.page_bytes, dtype=np.uint8)
        reader.read_tail(TAIL, tail)
        assert (SMALL.take(tail, 0, 3) == SMALL.take(own_page(), 0, 3)).all()
        reader.verify()
        return reader.bundle


def test_it_reads_back_bit_for_bit(path: Path) -> None:
    assert load(path) == replace(bundle_of(), salted=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_it_reads_back_however_little_one_call_moves(tmp_path: Path) -> None:
    path = tmp_path / "entry.safetensors"
    save(path, files=ShortFiles())
    load(path, files=ShortFiles())


def test_it_is_a_safetensors_file(path: Path) -> None:
    found = load_file(path)
    assert {name: (array.dtype.name, array.shape) for name, array in found.items()} == {
        "tokens": ("int32", (50,)), "pages": ("uint8", (13, 128)), "tail.7": ("uint8", (128,)),
        **{f"image.{at}": ("uint8", (96,)) for at in MARKS},
    }  # fmt: skip
    assert (found["pages"][:12] == TALK.pages[:12]).all()


def test_rows_of_nobody_are_not_written(path: Path) -> None:
    """A partly covered page holds what was there before: another's, maybe."""
    found = load_file(path)
    for page, count in ((found["pages"][12], 2), (found["tail.7"], 3)):
        assert not SMALL.take(page, count, 4).any()
        padding = page.copy()
        SMALL.put(padding, np.zeros(4 * SMALL.row_bytes, np.uint8), rows=(0, 4), of=(0, 4))
        assert not padding.any()


def test_whole_pages_where_nobody_knows_their_rows(tmp_path: Path) -> None:
    talk = Talk(seed=1, tokens=50, geometry=WHOLE)
    save(tmp_path / "entry", talk=talk)
    with read_bundle(tmp_path / "entry", geometry=WHOLE, namespace=SPACE) as reader:
        pages = np.empty_like(talk.pages)
        reader.read_pages(pages)
        assert (pages == talk.pages).all()


def test_plain_attention_has_no_images(tmp_path: Path) -> None:
    talk = Talk(seed=1, tokens=50, geometry=replace(SMALL, image_bytes=0))
    write_bundle(
        tmp_path / "entry", bundle_of(talk), tokens=talk.ids.tobytes(), pages=talk.pages,
        images={}, tails={TAIL: own_page()},
    )  # fmt: skip
    assert set(load_file(tmp_path / "entry")) == {"tokens", "pages", "tail.7"}


def test_without_tokens_it_can_be_looked_at_but_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "entry.safetensors"
    save(path, keep="")
    assert TALK.ids[:8].tobytes() not in path.read_bytes()
    assert b"tenant" not in path.read_bytes()
    with read_bundle(path) as reader:
        reader.verify()
        assert reader.bundle.salted
        assert reader.bundle.key == bundle_of().key
        assert not reader.has_tokens
        with pytest.raises(StoreError, match="can be looked at, not loaded"):
            reader.tokens()


@pytest.mark.parametrize(
    ("geometry", "namespace", "field"),
    [
        (replace(SMALL, page_bytes=256), SPACE, "page_bytes: 128; this pool's is 256"),
        (replace(SMALL, layout="x"), SPACE, "layout"),
        (WHOLE, SPACE, "rows"),
        (SMALL, replace(SPACE, weights="w2"), "weights: 'sha256:made'; this pool's is 'w2'"),
        (SMALL, replace(SPACE, kv_dtype="fp8"), "kv_dtype"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_models_is_refused_and_told_why(
    path: Path, geometry: DiskGeometry, namespace: Any, field: str
) -> None:
    with (
        pytest.raises(StoreError, match=field),
        read_bundle(path, geometry=geometry, namespace=namespace),
    ):
        pass


def test_a_bit_flipped_anywhere_is_seen(path: Path) -> None:
    raw = path.read_bytes()
    for offset in range(0, len(raw), 11):
        wrong = bytearray(raw)
        wrong[offset] ^= 1 << offset % 8
        path.write_bytes(wrong)
        with pytest.raises(StoreError, match=path.name):
            load(path)


def test_a_file_cut_short_or_longer_is_seen(path: Path) -> None:
    raw = path.read_bytes()
    for length in [*(len(raw) * part // 16 for part in range(16)), len(raw) - 1]:
        path.write_bytes(raw[:length])
        with pytest.raises(StoreError, match=path.name):
            load(path)
    path.write_bytes(raw + b"\0")
    with pytest.raises(StoreError, match=f"{len(raw) + 1} bytes; needs {len(raw)}"):
        load(path)


def calls(path: Path, kinds: tuple[str, ...], *, reading: str = "") -> Iterator[FailingFiles]:
    """A failing file layer for each call that saving, or loading, makes."""
    files = FailingFiles(failing(), at=-1, calls=kinds)
    if reading:
        load(path, files=files)
    else:
        save(path, files=files)
    for at in range(files.count):
        yield FailingFiles(failing(errno.EIO if reading else errno.ENOSPC), at=at, calls=kinds)


def test_a_disk_full_at_any_write_leaves_the_file_that_was_there(path: Path) -> None:
    for files in calls(path, WRITES):
        path.write_text("before")
        with pytest.raises(StoreError, match=f"{path.name}: No space left"):
            save(path, files=files)
        left = [each.name for each in path.parent.iterdir()]
        assert left == [path.name]
        assert path.read_bytes() == b"before" or load(path)  # only the folder's sync came too late


def test_a_read_that_fails_is_an_error(path: Path) -> None:
    for files in calls(path, READS, reading="yes"):
        with pytest.raises(StoreError, match="Input/output error"):
            load(path, files=files)


@pytest.mark.parametrize("kind", ["link", "fifo", "folder", "missing"])
def test_only_a_plain_file_is_read(path: Path, kind: str) -> None:
    path.rename(path.with_name("outside"))
    if kind == "link":
        path.symlink_to(path.with_name("outside"))
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(StoreError, match=path.name):
        load(path)


def test_a_link_is_replaced_not_followed(tmp_path: Path) -> None:
    path, outside = tmp_path / "entry.safetensors", tmp_path / "outside"
    outside.write_text("theirs")
    path.symlink_to(outside)
    save(path)
    assert outside.read_text() == "theirs"
    load(path)


def test_what_does_not_fit_together_is_refused(tmp_path: Path) -> None:
    right: dict[str, Any] = {
        "tokens": TALK.ids.tobytes(), "pages": TALK.pages, "tails": {TAIL: own_page()},
        "images": {at: TALK.image(at) for at in MARKS},
    }  # fmt: skip
    for name, wrong in [
        ("tokens", TALK.ids[1:].tobytes()), ("tokens", bytes(200)), ("pages", TALK.pages[1:]),
        ("pages", [*TALK.pages, TALK.pages[0]]), ("pages", TALK.pages[:, :64]), ("tails", {}),
        ("images", {7: TALK.image(7)}), ("tails", {TAIL: own_page(), 8: own_page()}),
        ("images", {at: TALK.image(at)[1:] for at in MARKS}),
    ]:  # fmt: skip
        with pytest.raises(StoreError):
            write_bundle(tmp_path / "entry", bundle_of(), **{**right, name: wrong})
    marks = bundle_of().marks
    for fields in [
        {"marks": marks[:2]}, {"marks": marks[::-1]}, {"marks": ()}, {"tokens": 49},
        {"marks": (*marks[:2], replace(marks[2], kind="other"))}, {"key": "x"},
        {"marks": (marks[0], replace(marks[1], tail=True), marks[2])}, {"priority": 0.5},
    ]:  # fmt: skip
        bundle = replace(bundle_of(), **fields)  # type: ignore[arg-type]
        with pytest.raises(StoreError):
            write_bundle(tmp_path / "entry", bundle, **right)
    assert list(tmp_path.iterdir()) == []


def test_a_hostile_header_is_refused(path: Path) -> None:
    raw = path.read_bytes()
    size = 8 + int.from_bytes(raw[:8], "little")
    sums = dict.fromkeys(["tokens", "pages", *(f"image.{at}" for at in MARKS), "tail.7"], "0" * 32)
    assert len(header_for(replace(bundle_of(), salted=True), sums)) == size
    text = unseal(header_text(raw[8:size]))
    changes: tuple[dict[str, Any], ...] = (
        {"version": 2}, {"tokens": 2**62}, {"tokens": -1}, {"marks": []}, {"tensors": {}},
        {"tensors": {"pages": "../x"}}, {"geometry": None}, {"geometry": {"page_bytes": 1}},
        {"namespace": {"weights": "w"}}, {"namespace": []}, {"attributes": [[1]]},
        {"attributes": "x"}, {"marks": [[]]}, {"marks": [{"position": 50}]}, {"new": 1},
        {"salted": 1}, {"created": 1e400}, {"key": None},
    )  # fmt: skip
    for change in changes:
        wrong = seal_any({**text, **change})
        header = header_of([("pages", "U8", (1,), 1)], metadata={METADATA: wrong})
        path.write_bytes(header + raw[size:])
        with pytest.raises(StoreError, match=path.name), read_bundle(path):
            pass
    for header in (b"{}", b"[" * 10_000, b'{"__metadata__":{"ninfer-pool-bundle":{}}}', b""):
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(StoreError, match="header"), read_bundle(path):
            pass
    path.write_bytes((1 << 62).to_bytes(8, "little"))
    with pytest.raises(StoreError, match="at most"), read_bundle(path):
        pass


def header_text(header: bytes) -> bytes:
    """The manifest within a header."""
    return bytes(json.loads(header)["__metadata__"][METADATA].encode("ascii"))


def seal_any(fields: dict[str, Any]) -> str:
    """Seal fields; a number that JSON cannot have becomes a text."""
    fields = {key: "inf" if value == float("inf") else value for key, value in fields.items()}
    return seal({key: value for key, value in fields.items() if key != "checksum"}).decode()


def test_a_large_entry_takes_one_batch_of_memory(tmp_path: Path) -> None:
    geometry = replace(SMALL, page_bytes=MIB, image_bytes=0, rows=((0, 1, MIB // 4),))
    talk = Talk(seed=1, tokens=4, geometry=geometry, namespace=SPACE)
    talk.ids = np.arange(400, dtype=np.int32)
    talk.tokens = 400
    mark = BundleMark(position=400, kind="turn", cuts=None, expires=None, tail=False)
    bundle = replace(bundle_of(talk), marks=(mark,))
    path = tmp_path / "large.safetensors"

    def write() -> None:
        pages = (talk.pages[0] for _ in range(100))
        write_bundle(
            path, bundle, tokens=talk.ids.tobytes(), pages=pages, images={}, tails={}
        )  # fmt: skip

    def read() -> None:
        with read_bundle(path, geometry=geometry, namespace=SPACE) as reader:
            reader.verify()
            reader.read_pages([page] * 100)

    page = np.empty(MIB, dtype=np.uint8)
    assert peak(write) < 3 * MIB
    assert peak(read) < 3 * MIB
    assert (page == talk.pages[0]).all()
