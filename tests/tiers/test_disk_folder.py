"""A folder as its writer uses it: written once, shared, removed, counted; refusals."""

from __future__ import annotations

import os
import stat
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ninfer_pool.errors import StoreError
from ninfer_pool.tiers.disk.folder import Folder
from ninfer_pool.tiers.disk.manifest import RunBlob
from tests.tiers.entries import SMALL, SPACE, Bytes, Talk, opened, tree_bytes
from tests.tiers.stores import files_of


def test_a_conversation_that_grows_writes_its_kv_once(tmp_path: Path) -> None:
    talk, written, name = Talk(seed=1, tokens=400), [], ""
    folder = opened(tmp_path)
    for turn in range(1, 41):
        written += talk.write(folder, 10 * turn - 10, 10 * turn)
        old, name = name, folder.commit(talk.record(folder, written, 10 * turn))
        if old:
            folder.remove(old)
    kv = sum(run.bytes for run in written)
    overhead = sum(map(tree_bytes, [*tmp_path.glob("*/entries"), *tmp_path.glob("*/images")]))
    assert folder.bytes == tree_bytes(tmp_path)
    assert folder.bytes - overhead - kv < 1000  # what the folder says of itself
    assert kv <= talk.pages.size * 3  # small pages: headers outweigh them
    talk.check(folder, folder.records[name])
    folder.close()


def test_the_same_bytes_are_one_file_until_nobody_needs_it(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    talk = Talk(seed=1, tokens=20)
    one = talk.commit(folder, 0, 8, used=1)
    two = talk.commit(folder, 0, 8, 20, used=2)
    assert len(files_of(tmp_path, "runs")) == len(files_of(tmp_path, "images")) == 2
    folder.remove(one)
    talk.check(folder, folder.records[two])
    folder.remove(two)
    assert files_of(tmp_path, "*") == []
    assert folder.bytes == tree_bytes(tmp_path)
    folder.close()


def test_a_name_taken_by_other_bytes_gets_a_suffix(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    talk = Talk(seed=1, tokens=8)
    (first,) = talk.write(folder, 0, 8)
    taken = files_of(tmp_path, "runs")[0]
    taken.write_bytes(b"?" * first.bytes)  # a collision, or a file that has rotted
    (second,) = talk.write(folder, 0, 8)
    assert second.file == f"{first.checksum}-1.safetensors"
    assert second.checksum == first.checksum
    name = folder.commit(talk.record(folder, [second], 8))
    folder.abandon(first)
    assert [path.name for path in files_of(tmp_path, "runs")] == [second.file]
    folder.close()
    folder = opened(tmp_path)
    talk.check(folder, folder.records[name])
    folder.close()


def test_an_abandoned_write_leaves_nothing(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    before = folder.bytes
    talk = Talk(seed=1, tokens=30)
    blobs = [*talk.write(folder, 0, 20, 30), folder.write_image(talk.image(30))]
    assert folder.bytes > before
    for blob in blobs:
        folder.abandon(blob)
    assert folder.bytes == before == tree_bytes(tmp_path)
    folder.close()


def test_a_write_that_is_not_committed_survives_the_removal_of_who_shares_it(
    tmp_path: Path,
) -> None:
    folder = opened(tmp_path)
    talk = Talk(seed=1, tokens=8)
    name = talk.commit(folder)
    again = talk.write(folder, 0, 8)
    folder.remove(name)
    name = folder.commit(talk.record(folder, again, 8))
    talk.check(folder, folder.records[name])
    folder.close()


def test_sizes_are_known_before_writing(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    talk = Talk(seed=1, tokens=50)
    for begin, end in [(0, 1), (3, 4), (3, 9), (0, 48), (5, 50)]:
        (run,) = talk.write(folder, begin, end)
        assert run.bytes == folder.run_bytes(begin, end)
        assert (tmp_path / folder.fingerprint / "runs" / run.file).stat().st_size == run.bytes
    image = folder.write_image(talk.image(50))
    assert image.bytes == folder.image_file_bytes
    before = folder.bytes
    record = talk.entry(talk.write(folder, 0, 50), {50: image})
    assert folder.bytes == before + folder.run_bytes(0, 50)
    folder.commit(record)
    assert folder.bytes == before + folder.run_bytes(0, 50) + folder.record_bytes(record)
    folder.close()


def test_the_same_record_twice_is_one(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    talk = Talk(seed=1, tokens=8)
    name = talk.commit(folder)
    before = folder.bytes
    assert talk.commit(folder) == name
    assert folder.bytes == before == tree_bytes(tmp_path)
    folder.remove(name)
    assert files_of(tmp_path, "*") == []
    folder.close()


@pytest.mark.parametrize("mask", [0o000, 0o777])
def test_all_is_its_owners_alone_whatever_the_umask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        folder = opened(tmp_path / "store") if not mask else opened(tmp_path)
        Talk(seed=1, tokens=8).commit(folder)
        folder.close()
    finally:
        os.umask(before)
    root = tmp_path if mask else tmp_path / "store"
    for path in [root, *root.rglob("*")]:
        right = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == right, path


def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    talk = Talk(seed=1, tokens=20)
    record = talk.record(folder, talk.write(folder, 0, 20), 8, 20)
    first, last = record.marks
    stranger = replace(record.runs[0], file="0" * 32 + ".safetensors", checksum="0" * 32)
    for wrong, field in [
        (replace(record, key="0" * 32), "key"),
        (replace(record, tokens=19), "tokens|position"),
        (replace(record, namespace=replace(SPACE, weights="other")), "namespace"),
        (replace(record, runs=()), "runs"),
        (replace(record, runs=(stranger,)), "not there"),
        (replace(record, marks=()), "marks"),
        (replace(record, marks=(first,)), "marks"),
        (replace(record, marks=(last, first)), "position"),
        (replace(record, marks=(first, replace(last, image=None))), "image"),
        (replace(record, marks=(replace(first, kind="other"), last)), "kind"),
        (replace(record, marks=(replace(first, runs=(1,)), last)), "runs"),
        (replace(record, marks=(replace(first, expires=float("nan")), last)), "expires"),
        (replace(record, created=float("inf")), "created"),
        (replace(record, attributes=((3, b""), (3, b""))), "attributes"),
        (replace(record, hits=-1), "hits"),
        (replace(record, released=1), "released"),  # type: ignore[arg-type]
    ]:
        before = folder.bytes
        with pytest.raises(StoreError, match=field):
            folder.commit(wrong)
        assert folder.bytes == before
        assert folder.records == {}
    name = folder.commit(record)
    talk.check(folder, folder.records[name])
    folder.close()


@pytest.mark.parametrize(
    ("tokens", "pages"), [(19, 5), (21, 5), (20, 4), (20, 6)], ids=["-", "+", "few", "many"]
)
def test_tokens_and_pages_of_other_counts_are_refused(
    tmp_path: Path, tokens: int, pages: int
) -> None:
    folder = opened(tmp_path)
    talk = Talk(seed=1, tokens=40)
    before = folder.bytes
    with pytest.raises(StoreError, match=r"tokens|pages"):
        folder.write_run(
            begin=0, end=20, tokens=talk.token_bytes(0, tokens), pages=talk.pages[:pages]
        )
    assert folder.bytes == before == tree_bytes(tmp_path)
    folder.close()


@pytest.mark.parametrize(
    "shape",
    [
        np.zeros((5, 64), np.uint8),
        np.zeros((5, 128), np.int8),
        np.zeros((5, 256), np.uint8)[:, ::2],
    ],
    ids=["size", "dtype", "strided"],
)
def test_pages_of_another_form_are_refused(tmp_path: Path, shape: Bytes) -> None:
    folder = opened(tmp_path)
    with pytest.raises(StoreError, match="needs contiguous uint8"):
        folder.write_run(begin=0, end=20, tokens=bytes(80), pages=shape)
    folder.close()


def test_threads_may_write_read_and_remove_at_once(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    wrong: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(4):
                talk = Talk(seed=turn % 2, tokens=20)  # others write the same bytes
                name = talk.commit(folder, 0, 9, 20, used=100 * number + turn)
                talk.check(folder, folder.records[name])
                folder.remove(name)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert files_of(tmp_path, "*") == []
    assert folder.bytes == tree_bytes(tmp_path)
    folder.close()


def test_a_closed_folder_says_so(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    (run,) = Talk(seed=1, tokens=8).write(folder, 0, 8)
    folder.close()
    folder.close()
    with pytest.raises(StoreError, match="closed"):
        folder.abandon(run)


def blob_of(folder: Folder, talk: Talk) -> RunBlob:
    (run,) = talk.write(folder, 0, talk.tokens)
    return run


def test_tokens_are_compared_again_when_kv_is_read(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    talk = Talk(seed=1, tokens=20)
    run = blob_of(folder, talk)
    other = Talk(seed=2, tokens=20).token_bytes(0, 20)
    into = np.full((5, 128), 7, dtype=np.uint8)
    for tokens in (other, talk.token_bytes(0, 19), b"", talk.token_bytes(0, 20) + b"0000"):
        with pytest.raises(StoreError, match="tokens"):
            folder.read_run(run, into=into, tokens=tokens)
    assert (into == 7).all()
    folder.close()


def test_other_fingerprints_are_left_alone_until_room_is_needed(tmp_path: Path) -> None:
    spaces = [replace(SPACE, weights=text) for text in ("a", "b")]
    for number, space in enumerate(spaces):
        folder = Folder(tmp_path, geometry=SMALL, namespace=space)
        for seed in (1, 2):
            talk = Talk(seed=seed, tokens=8, namespace=space)
            talk.commit(folder, created=100 - 10 * number + seed, used=seed)
        folder.close()
    folder = opened(tmp_path)
    mine = Talk(seed=9, tokens=8)
    name = mine.commit(folder, created=1)
    assert folder.bytes == tree_bytes(tmp_path)
    assert list(folder.records) == [name]
    left = [path.parts[-3] for path in files_of(tmp_path, "entries")]
    older = SMALL.fingerprint(spaces[1])
    assert left.count(older) == 2
    assert folder.drop_foreign(1) > 0
    left = [path.parts[-3] for path in files_of(tmp_path, "entries")]
    assert left.count(older) == 1
    assert folder.bytes == tree_bytes(tmp_path)
    assert folder.drop_foreign(2**40) > 0
    assert [path.parts[-3] for path in files_of(tmp_path, "entries")] == [folder.fingerprint]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [folder.fingerprint, "lock", "ninfer-pool.json"]
    )
    assert folder.bytes == tree_bytes(tmp_path)
    assert folder.drop_foreign(1) == 0
    mine.check(folder, folder.records[name])
    folder.close()
