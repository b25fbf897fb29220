"""What is written is what is read, bit for bit, in the format that is documented."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save

from ninfer_pool import Namespace
from ninfer_pool.core import identity
from ninfer_pool.errors import GeometryError, StoreError
from ninfer_pool.tiers.disk import runs
from ninfer_pool.tiers.disk.files import Files
from ninfer_pool.tiers.disk.geometry import DiskGeometry, decode_geometry, encode_geometry
from ninfer_pool.tiers.disk.manifest import Blob, decode, encode
from ninfer_pool.tiers.disk.stream import Reader
from tests.tiers.entries import SMALL, SPACE, WHOLE, Talk, assert_rows, opened, tree_bytes
from tests.tiers.failing_files import ShortFiles
from tests.tiers.stores import files_of

EDGES = [(0, 50), (0, 3, 4, 5, 11, 12, 50), (0, 1, 50), (0, 16, 32, 48, 50), (0, 47, 50)]


@pytest.mark.parametrize("geometry", [SMALL, WHOLE], ids=["rows", "whole pages"])
@pytest.mark.parametrize("edges", EDGES, ids=str)
def test_an_entry_comes_back_bit_for_bit_after_reopening(
    tmp_path: Path, geometry: DiskGeometry, edges: tuple[int, ...]
) -> None:
    talk = Talk(seed=1, tokens=50, geometry=geometry)
    new = opened(tmp_path, geometry=geometry, files=Files())
    name = talk.commit(new, *edges)
    before = new.records
    talk.check(new, before[name])
    assert new.bytes == tree_bytes(tmp_path)
    new.close()
    again = opened(tmp_path, geometry=geometry, files=Files())
    assert again.records == before
    assert (again.damaged, again.reclaimed) == (0, 0)
    assert again.bytes == tree_bytes(tmp_path)
    talk.check(again, again.records[name])
    again.close()


def test_it_comes_back_however_little_one_call_moves(tmp_path: Path) -> None:
    talk = Talk(seed=1, tokens=50)
    folder = opened(tmp_path, files=ShortFiles())
    name = talk.commit(folder, 0, 10, 50)
    folder.close()
    folder = opened(tmp_path, files=ShortFiles())
    talk.check(folder, folder.records[name])
    folder.close()


@pytest.mark.parametrize("upto", [None, 60, 41, 40, 39, 13, 12, 11])
def test_only_rows_that_are_asked_for_are_touched(tmp_path: Path, upto: int | None) -> None:
    talk = Talk(seed=1, tokens=50)
    folder = opened(tmp_path)
    (run,) = talk.write(folder, 10, 41)
    end = 41 if upto is None else min(upto, 41)
    slab = np.full((100, SMALL.page_bytes), 7, dtype=np.uint8)
    rows = [slab[index] for index in range(3, 99, 5)][: -(-end // 4) - 2]  # apart in the slab
    folder.read_run(run, into=rows, tokens=talk.token_bytes(10, end), upto=upto)
    folder.close()
    right = np.full((len(rows), SMALL.page_bytes), 7, dtype=np.uint8)
    for index in range(10, end):
        page, row = divmod(index - 8, 4)
        piece = SMALL.take(talk.pages[2 + page], row, row + 1)
        SMALL.put(right[page], piece, rows=(row, row + 1), of=(row, row + 1))
    whole = [page for page in range(len(rows)) if page > 0 and 4 * page + 12 <= end]
    right[whole] = talk.pages[2:][whole]
    assert (np.array(rows) == right).all()
    untouched = np.delete(slab, np.arange(3, 99, 5)[: len(rows)], axis=0)
    assert (untouched == 7).all()


@given(
    begin=st.integers(0, 40), count=st.integers(1, 40), kept=st.integers(0, 45),
    regions=st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 3), st.integers(1, 6)), max_size=3
    ),
    page_tokens=st.integers(1, 7),
)  # fmt: skip
def test_any_run_of_any_geometry_packs_and_unpacks(
    begin: int, count: int, kept: int, regions: list[tuple[int, int, int]], page_tokens: int
) -> None:
    rows, at = [], 0
    for gap, outer, size in regions:
        rows.append((at + gap, outer, size))
        at += gap + outer * size * page_tokens
    geometry = replace(SMALL, rows=tuple(rows), page_tokens=page_tokens, page_bytes=at + 3)
    end, upto = begin + count, begin + min(kept, count)
    talk = Talk(seed=count, tokens=end, geometry=geometry)
    tokens = talk.token_bytes(begin, end)
    pages = talk.rows(begin, end)
    packed = runs.pack(geometry, pages, begin=begin, end=end, tokens=tokens)
    raw = b"".join(packed)
    assert len(raw) == runs.run_bytes(geometry, begin, end)
    touched = runs.Span.of(begin, upto, page_tokens).rows()
    into = np.zeros((len(touched), geometry.page_bytes), dtype=np.uint8)
    reader = MemoryReader(raw)
    runs.unpack(reader, geometry, begin=begin, end=end, tokens=tokens, into=into, upto=upto)
    assert reader.offset == len(raw)
    for found, right, (first, last, _) in zip(into, pages, touched, strict=False):
        assert (geometry.take(found, first, last) == geometry.take(right, first, last)).all()


class MemoryReader(Reader):
    """Reads a file that lies in memory."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.offset = 0

    def read(self, views: Iterable[memoryview]) -> None:
        for view in views:
            view[:] = self.raw[self.offset : self.offset + view.nbytes]
            self.offset += view.nbytes

    def skip(self, count: int) -> None:
        self.offset += count


def test_files_are_safetensors_as_the_library_itself_writes_them(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    talk = Talk(seed=1, tokens=30)
    talk.write(folder, 2, 30)
    (path,) = files_of(tmp_path, "runs")
    found = load_file(path)
    assert {name: (array.dtype.name, array.shape) for name, array in found.items()} == {
        "tokens": ("int32", (28,)), "head": ("uint8", (58,)),
        "pages": ("uint8", (6, 128)), "tail": ("uint8", (58,)),
    }  # fmt: skip
    assert (found["tokens"] == talk.ids[2:30]).all()
    assert (found["pages"] == talk.pages[1:7]).all()
    assert (found["head"] == SMALL.take(talk.pages[0], 2, 4)).all()
    assert path.read_bytes() == save(found)
    assert path.name == f"{identity.xxh3_128(path.read_bytes()).hex()}.safetensors"
    folder.write_image(talk.image(30))
    (path,) = files_of(tmp_path, "images")
    assert (load_file(path)["image"] == talk.image(30)).all()
    folder.close()


def test_every_field_of_a_fingerprint_changes_it_and_no_other_does() -> None:
    base = SMALL.fingerprint(SPACE)
    others = [
        replace(SMALL, page_bytes=129), replace(SMALL, page_tokens=2),
        replace(SMALL, image_bytes=0), replace(SMALL, grid=8), replace(SMALL, min_chunk=1),
        replace(SMALL, layout="other"), WHOLE, replace(SMALL, rows=()),
        replace(SMALL, rows=SMALL.rows and SMALL.rows[:1]),
    ]  # fmt: skip
    found = [geometry.fingerprint(SPACE) for geometry in others]
    spaces = [
        replace(SPACE, weights="w"), replace(SPACE, kv_dtype="bf16"), replace(SPACE, rope="r"),
        replace(SPACE, draft="d"), replace(SPACE, world_size=2),
        replace(SPACE, world_size=2, rank=1),
    ]  # fmt: skip
    found += map(SMALL.fingerprint, spaces)
    assert len({base, *found}) == len(found) + 1
    assert SMALL.fingerprint(replace(SPACE, salt="s", adapter="a")) == base


def test_vectors_of_the_format() -> None:
    space = Namespace(weights="w", kv_dtype="bf16")
    geometry = DiskGeometry(
        page_bytes=64, page_tokens=4, image_bytes=0, grid=16, min_chunk=0, layout="l",
        rows=((0, 1, 8),),
    )  # fmt: skip
    assert geometry.fingerprint(space) == FINGERPRINT
    pages = np.arange(128, dtype=np.uint8).reshape(2, 64)
    tokens = np.arange(5, dtype=np.int32).tobytes()
    raw = b"".join(runs.pack(geometry, pages, begin=0, end=5, tokens=tokens))
    assert identity.xxh3_128(raw).hex() == RUN


FINGERPRINT = "b93fa2bfc702d2551bcacc2c66a5f4dc"
RUN = "63a0a2b98ebba000ef5b097a4592fee0"


def test_geometry_is_told_for_people_and_read_back(tmp_path: Path) -> None:
    for geometry in (SMALL, WHOLE):
        raw = encode_geometry(geometry, SPACE)
        fingerprint = geometry.fingerprint(SPACE)
        assert decode_geometry(raw, fingerprint) == (geometry, SPACE)
    folder = opened(tmp_path)
    told = json.loads((tmp_path / folder.fingerprint / "geometry.json").read_bytes())
    assert told["page_bytes"] == SMALL.page_bytes
    assert told["namespace"]["weights"] == SPACE.weights
    assert json.loads((tmp_path / "ninfer-pool.json").read_bytes()) == {
        "format": "ninfer-pool-store", "version": 1,
    }  # fmt: skip
    folder.close()


def test_a_manifest_reads_back_with_every_field(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    space = replace(SPACE, salt="tenant", adapter="lora")
    talk = Talk(seed=1, tokens=20, namespace=space)
    attributes = ((3, b"M\x00\xff"), (7, b""))
    record = talk.record(folder, talk.write(folder, 0, 9, 20), 9, 20, attributes=attributes)
    record = replace(
        record, created=12.75, released=True, priority=-3, used=9, gap=2**40,
        marks=tuple(replace(mark, cuts=None, expires=99.5, kind="system") for mark in record.marks),
    )  # fmt: skip
    name = folder.commit(record)
    assert (
        decode(encode(record, folder.fingerprint), fingerprint=folder.fingerprint, geometry=SMALL)
        == record
    )
    folder.close()
    folder = opened(tmp_path)
    assert folder.records == {name: record}
    folder.close()


def test_a_mark_may_have_kv_of_another_computation(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    talk = Talk(seed=1, tokens=20)
    line = talk.write(folder, 0, 10, 20)
    # The checkpoint at 14 was computed anew from position 10 on.
    again = replace_pages(talk)
    (own,) = again.write(folder, 10, 14)
    record = talk.record(folder, [*line, own], 14, 20)
    first, last = record.marks
    marks = (replace(first, runs=(0, 2)), replace(last, runs=(0, 1)))
    name = folder.commit(replace(record, marks=marks))
    folder.close()
    folder = opened(tmp_path)
    found = folder.records[name]
    assert folder.tokens(found) == talk.token_bytes(0, 20)
    slab = np.zeros_like(talk.rows(0, 14))
    folder.read_run(found.runs[0], into=slab[:3], tokens=talk.token_bytes(0, 10))
    folder.read_run(found.runs[2], into=slab[2:], tokens=talk.token_bytes(10, 14))
    assert_rows(SMALL, slab[:2], talk.pages[:2], upto=8)
    assert (SMALL.take(slab[2], 0, 2) == SMALL.take(talk.pages[2], 0, 2)).all()
    assert (SMALL.take(slab[2], 2, 4) == SMALL.take(again.pages[2], 2, 4)).all()
    folder.close()


def replace_pages(talk: Talk) -> Talk:
    """The same tokens with other KV."""
    other = Talk(seed=talk.seed + 100, tokens=talk.tokens)
    other.ids = talk.ids
    return other


def test_plain_attention_has_no_images(tmp_path: Path) -> None:
    geometry = replace(SMALL, image_bytes=0)
    folder = opened(tmp_path, geometry=geometry)
    talk = Talk(seed=1, tokens=10, geometry=geometry)
    image = Blob(file="0" * 32 + ".safetensors", checksum="0" * 32, bytes=1)
    record = talk.entry(talk.write(folder, 0, 10), {10: image})
    marks = tuple(replace(mark, image=None) for mark in record.marks)
    name = folder.commit(replace(record, marks=marks))
    with pytest.raises(StoreError, match="image"):
        folder.commit(record)
    folder.close()
    folder = opened(tmp_path, geometry=geometry)
    assert list(folder.records) == [name]
    folder.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"page_bytes": 0}, {"page_tokens": True}, {"image_bytes": -1}, {"grid": 2**50},
        {"layout": "\ud800"}, {"rows": [(0, 1, 1)]}, {"rows": ((0, 1),)}, {"rows": ((0, 0, 1),)},
        {"rows": ((0, 1, 33),)}, {"rows": ((0, 2, 4), (31, 1, 1))}, {"rows": ((-1, 1, 1),)},
    ],
    ids=str,
)  # fmt: skip
def test_a_geometry_that_cannot_be_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(GeometryError, match=next(iter(fields))):
        replace(SMALL, **fields)  # type: ignore[arg-type]
