"""A disk that fails, is full, slow or in use: nothing is lost, and it can go on."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from ninfer_pool.errors import StoreError
from ninfer_pool.tiers.disk.files import Files
from tests.tiers.entries import Talk, opened, tree_bytes
from tests.tiers.failing_files import (
    READS,
    REMOVALS,
    WRITES,
    FailingFiles,
    LossyFiles,
    UnsyncedFiles,
    failing,
)
from tests.tiers.shops import check, shop
from tests.tiers.stores import (
    TALKS,
    ignores_modes,
    intact,
    intact_or_error,
    payload_files,
    reopened,
)

ROOT = Path(__file__).resolve().parents[2]


def calls_of(work: Callable[[Files], None], calls: tuple[str, ...]) -> int:
    """How many calls of these kinds some work makes when nothing fails."""
    files = FailingFiles(failing(), at=-1, calls=calls)
    work(files)
    return files.count


def told(work: Callable[[], object]) -> str:
    """What a `StoreError` says; nothing where the work succeeds."""
    try:
        work()
    except StoreError as error:
        return str(error)
    return ""


def test_a_disk_full_at_any_write_loses_nothing_and_can_go_on(made: Path, tmp_path: Path) -> None:
    talk, path = TALKS[3], tmp_path / "store"

    def work(files: Files) -> None:
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(made, path)
        folder = opened(path, files=files)
        try:
            before = set(folder.records)
            said = told(lambda: talk.commit(folder, 0, 9, 22))
            assert said == "" or "No space left" in said
            assert folder.bytes == tree_bytes(path)
            assert before <= set(intact(folder))
            if said:
                talk.commit(folder, 0, 9, 22)  # there is room again
            (name,) = set(intact(folder)) - before
            assert folder.bytes == tree_bytes(path)
            assert told(lambda: folder.remove(name)) == "" or not said
            assert set(folder.records) == before
        finally:
            folder.close()

    total, refused = calls_of(work, WRITES), 0
    for at in range(total):
        files = FailingFiles(failing(), at=at, calls=WRITES)
        refused += told(lambda files=files: work(files)) != ""  # type: ignore[misc]
        assert files.count > at
        assert len(reopened(path)[0]) == 3
    assert 0 < refused < total / 2  # while opening alone


def test_a_full_disk_when_a_store_is_made(tmp_path: Path) -> None:
    def work(files: Files) -> None:
        opened(tmp_path / "a", files=files).close()

    for at in range(calls_of(work, WRITES)):
        shutil.rmtree(tmp_path / "a")
        with pytest.raises(StoreError, match="No space left"):
            work(FailingFiles(failing(), at=at, calls=WRITES))
        opened(tmp_path / "a").close()


def test_a_removal_that_fails_is_told_or_made_up_for(made: Path, tmp_path: Path) -> None:
    path = tmp_path / "store"
    for at in range(6):
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(made, path)
        files = FailingFiles(failing(errno.EIO), at=at, calls=REMOVALS)
        folder = opened(path, files=files)
        names = list(folder.records)
        gone = []
        for name in names:
            try:
                folder.remove(name)
            except StoreError:
                assert name in folder.records
                continue
            gone.append(name)
        assert folder.bytes == tree_bytes(path)
        folder.close()
        found, damaged = reopened(path)
        assert sorted(found) == sorted(set(names) - set(gone))
        assert damaged == 0


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.EMFILE], ids=errno.errorcode.get)
def test_a_read_that_fails_gives_an_error_or_less_never_wrong_bytes(
    made: Path, tmp_path: Path, code: int
) -> None:
    path = tmp_path / "store"

    def work(files: Files) -> None:
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(made, path)
        folder = opened(path, files=files)
        try:
            intact(folder)
        finally:
            folder.close()

    for at in range(0, calls_of(work, READS), 1 if code == errno.EIO else 3):
        files = FailingFiles(failing(code), at=at, calls=READS)
        said = told(lambda files=files: work(files))  # type: ignore[misc]
        assert said == "" or os.strerror(code) in said
        found, _ = reopened(path)
        lost = code == errno.EMFILE  # says nothing of a file
        assert len(found) == 3 if lost else len(found) >= 1


def test_a_folder_that_may_not_be_written_is_refused_unharmed(store: Path) -> None:
    before = {path: path.read_bytes() for path in payload_files(store)}
    files = FailingFiles(failing(errno.EROFS), at=0, calls=(*WRITES, *REMOVALS), lasting=True)
    with pytest.raises(StoreError, match="Read-only file system"):
        opened(store, files=files)
    assert before == {path: path.read_bytes() for path in payload_files(store)}
    assert len(reopened(store)[0]) == 3


@pytest.mark.skipif(ignores_modes(), reason="root may write everywhere")
@pytest.mark.parametrize("name", ["", "*", "*/runs", "*/images", "*/entries"])
def test_a_folder_without_permission_is_refused(store: Path, name: str) -> None:
    (path,) = filter(Path.is_dir, store.glob(name)) if name else [store]
    path.chmod(0o500)
    try:
        with pytest.raises(StoreError, match="Permission denied"):
            opened(store)
        with pytest.raises(StoreError, match="Permission denied"):
            opened(path / "below")
        assert stat.S_IMODE(path.stat().st_mode) == 0o500
    finally:
        path.chmod(0o700)
    assert len(reopened(store)[0]) == 3


def test_a_store_that_vanishes_gives_errors(store: Path) -> None:
    folder = opened(store)
    shutil.rmtree(store)
    assert intact_or_error(folder) == []
    with pytest.raises(StoreError):
        Talk(seed=5, tokens=8).commit(folder)
    for name in folder.records:
        with pytest.raises(StoreError):
            folder.remove(name)
    folder.close()


HOLD = """
import sys, time
from tests.tiers.entries import opened
from pathlib import Path
folder = opened(Path(sys.argv[1]))
print("open", flush=True)
time.sleep(60)
"""


def test_one_writer_at_a_time_and_a_dead_one_holds_nothing(store: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(store)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        with pytest.raises(StoreError, match="in use by another process"):
            opened(store)
        process.kill()
    assert len(reopened(store)[0]) == 3


def test_one_process_opens_it_once(store: Path) -> None:
    folder = opened(store)
    with pytest.raises(StoreError, match="in use"):
        opened(store)
    folder.close()
    opened(store).close()


def test_a_refused_opening_holds_no_file_and_no_lock(store: Path) -> None:
    count = len(list(Path("/dev/fd").iterdir()))
    for at in range(0, 40, 3):
        files = FailingFiles(failing(errno.EMFILE), at=at, calls=READS)
        with suppress(StoreError):
            opened(store, files=files).close()
    assert len(list(Path("/dev/fd").iterdir())) == count
    opened(store).close()


class SlowFiles(UnsyncedFiles):
    """Writing takes until it is told to go on."""

    def __init__(self) -> None:
        self.waiting, self.go_on = threading.Event(), threading.Event()

    def _writev(self, file: int, views: Sequence[memoryview]) -> int:
        if threading.current_thread().name == "slow":
            self.waiting.set()
            assert self.go_on.wait(60)
        return super()._writev(file, views)


def test_a_slow_disk_keeps_only_who_waits_for_it_waiting(store: Path) -> None:
    files = SlowFiles()
    folder = opened(store, files=files)
    talk = TALKS[3]
    thread = threading.Thread(target=talk.write, args=(folder, 0, 22), name="slow")
    thread.start()
    assert files.waiting.wait(60)
    names = intact(folder)
    folder.remove(names[0])
    Talk(seed=1, tokens=12).commit(folder, 0, 12)
    assert len(folder.records) == 3
    closing = threading.Thread(target=folder.close)
    closing.start()
    files.go_on.set()
    thread.join(60)
    closing.join(60)
    assert not thread.is_alive()
    assert not closing.is_alive()
    opened(store).close()


# -- waits at once -----------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 3, 40])
@pytest.mark.parametrize("threads", [0, 2, 100])
def test_waits_are_done_each_once_however_many_threads_the_system_has(
    count: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = threading.Thread.start, itertools.count(1)

    def limited(thread: threading.Thread) -> None:
        if next(started) > threads:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    done: list[int] = []
    Files().each([partial(done.append, number) for number in range(count)])
    assert sorted(done) == list(range(count))


def test_a_wait_that_fails_is_told_once_none_goes_on() -> None:
    begun, ended = list[int](), list[int]()

    def slow(number: int) -> None:
        begun.append(number)
        time.sleep(0.01)
        ended.append(number)

    def fail() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    waits = [partial(slow, number) for number in range(20)]
    with pytest.raises(OSError, match="Input/output"):
        Files().each([*waits[:3], fail, *waits[3:]])
    assert sorted(ended) == sorted(begun)


def test_a_manifest_that_is_withdrawn_and_then_fails_is_counted_once(tmp_path: Path) -> None:
    files = LossyFiles()
    folder = opened(tmp_path / "disk", files=files)
    Talk(2, 20).commit(folder)
    talk, wanted = Talk(1, 20), [True]
    record = talk.record(folder, talk.write(folder, 0, 20), 20)

    def withdraw() -> None:
        files.fails, wanted[0] = False, False
        folder.withdraw()

    files.fails_after, files.before = ".json", withdraw
    with pytest.raises(StoreError, match="Input/output error"):
        folder.commit(record, wanted=lambda: wanted[0])
    assert folder.bytes == tree_bytes(tmp_path / "disk")
    assert len(folder.records) == 1
    folder.close()


def test_what_the_start_measures_with_is_gone_where_the_disk_fails(tmp_path: Path) -> None:
    files = LossyFiles()
    files.fails_after = ".safetensors"
    driver = shop(disk=tmp_path / "disk", files=files, background=True)
    files.fails, files.fails_after = False, "/"
    assert list((tmp_path / "disk").glob("*/*/*.safetensors")) == []
    check(driver, tmp_path / "disk")
    driver.close()
