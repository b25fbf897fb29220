"""The only thing here that touches the file system, so that tests can make any call of it fail."""

from __future__ import annotations

import errno
import os
import stat
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ninfer_pool.errors import StoreError

if sys.platform != "win32":
    import fcntl

MOST_VIEWS = 512
"""Pieces of one call; systems allow 1,024."""
MOST_WAITS = 8
"""Threads that wait for the disk at once: a file system then makes many files last in one go."""
_SAFE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
# A pipe must not make whoever opens it wait; it is refused right after.
_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | _SAFE
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)


class Files:
    """Folders and files by descriptor. Names are looked up in an open folder, never followed.

    Everything made is owner-only, whatever the umask. Raises OSError as the system does, and
    EOFError where a file ends too early.
    """

    def make_folder(self, path: Path) -> None:
        """Make a folder and those above it where they are missing."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            path.mkdir()
            path.chmod(0o700)

    def open_folder(self, path: Path) -> int:
        """Open the folder that ``path`` names, which may be a link: a person wrote it."""
        return os.open(path, _FOLDER)

    def make_subfolder(self, folder: int, name: str) -> None:
        """Make a folder in a folder where it is missing."""
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=folder)
            os.chmod(name, 0o700, dir_fd=folder)

    def open_subfolder(self, folder: int, name: str) -> int:
        """Open a folder in a folder."""
        return os.open(name, _FOLDER | _SAFE, dir_fd=folder)

    def restrict(self, descriptor: int, mode: int) -> None:
        """Give an open file or folder this mode, unless it has it or is another user's."""
        if stat.S_IMODE(os.fstat(descriptor).st_mode) != mode:
            with suppress(PermissionError):
                os.fchmod(descriptor, mode)

    def tighten(self, folder: int) -> None:
        """Take an open folder from all but its owner, unless it is another user's.

        Raises:
            OSError: it may not be written.
        """
        mode = stat.S_IMODE(os.fstat(folder).st_mode)
        if mode & 0o077:
            self.restrict(folder, mode & 0o700)
        if not os.access(".", os.W_OK | os.X_OK, dir_fd=folder):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def listing(self, folder: int) -> dict[str, int | None]:
        """Return each name in a folder with its size in bytes, None where it is no plain file."""
        found: dict[str, int | None] = {}
        with os.scandir(folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # gone since
                    about = entry.stat(follow_symlinks=False)
                    found[entry.name] = about.st_size if stat.S_ISREG(about.st_mode) else None
        return found

    def tree_bytes(self, folder: int) -> int:
        """Return the bytes of all plain files below a folder; links are not followed. O(files)."""
        total = 0
        for name, size in self.listing(folder).items():
            if size is not None:
                total += size
                continue
            try:
                below = self.open_subfolder(folder, name)
            except OSError:  # a link, a pipe, another's folder
                continue
            try:
                total += self.tree_bytes(below)
            finally:
                self.close(below)
        return total

    def open(self, folder: int, name: str) -> int:
        """Open a plain file to read; OSError for anything else, links and pipes included."""
        file = os.open(name, _READ, dir_fd=folder)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise OSError(0, "not a plain file")
        return file

    def create(self, folder: int, name: str) -> int:
        """Make a file that is not there yet, and open it to write."""
        file = os.open(name, _NEW, 0o600, dir_fd=folder)
        os.fchmod(file, 0o600)
        return file

    def size(self, file: int) -> int:
        """Return an open file's size in bytes."""
        return os.fstat(file).st_size

    def write(self, file: int, views: Sequence[memoryview]) -> None:
        """Write all views, one after the other, however little each call takes."""
        left = [view for view in views if view.nbytes]
        while left:
            left = _after(left, self._writev(file, left[:MOST_VIEWS]))

    def write_beginning(self, file: int, raw: bytes) -> None:
        """Write over a file's first bytes."""
        done = 0
        while done < len(raw):
            done += self._pwrite(file, memoryview(raw)[done:], done)

    def read(self, file: int, views: Sequence[memoryview], offset: int) -> None:
        """Fill all views from ``offset`` on, however little each call gives.

        Raises:
            EOFError: the file ends before.
        """
        left = [view for view in views if view.nbytes]
        while left:
            count = self._preadv(file, left[:MOST_VIEWS], offset)
            if not count:
                raise EOFError(f"ends at byte {offset}")
            offset += count
            left = _after(left, count)

    def _writev(self, file: int, views: Sequence[memoryview]) -> int:
        return os.writev(file, views)

    def _pwrite(self, file: int, view: memoryview, offset: int) -> int:
        return os.pwrite(file, view, offset)

    def _preadv(self, file: int, views: Sequence[memoryview], offset: int) -> int:
        return os.preadv(file, views, offset)

    def sync(self, descriptor: int) -> None:
        """Return when a file's bytes, or a folder's names, outlive a loss of power."""
        os.fsync(descriptor)

    def each(self, waits: Collection[Callable[[], None]]) -> None:
        """Do several waits for the disk at once; raises the first error when all are over.

        Each may happen in a thread of its own, which keeps no process from ending.
        """
        left, errors = deque(waits), list[Exception]()

        def work() -> None:
            while left and not errors:
                try:
                    wait = left.popleft()
                except IndexError:  # another thread took the last one
                    return
                try:
                    wait()
                except Exception as error:
                    errors.append(error)

        threads = []
        for _ in range(min(len(waits), MOST_WAITS) - 1):
            thread = threading.Thread(target=work, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system has no more: with those that there are
                break
            threads.append(thread)
        work()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def rename(self, folder: int, old: str, new: str) -> None:
        """Give a file another name in its folder, at once or not at all."""
        os.rename(old, new, src_dir_fd=folder, dst_dir_fd=folder)

    def unlink(self, folder: int, name: str) -> None:
        """Remove a name that is no folder's."""
        os.unlink(name, dir_fd=folder)

    def remove_subfolder(self, folder: int, name: str) -> None:
        """Remove an empty folder."""
        os.rmdir(name, dir_fd=folder)

    def lock_file(self, folder: int, name: str, *, create: bool) -> int:
        """Open a plain file to lock it, and make it first where told to."""
        flags = os.O_RDWR | os.O_CREAT if create else os.O_RDONLY
        file = os.open(name, flags | getattr(os, "O_NONBLOCK", 0) | _SAFE, 0o600, dir_fd=folder)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise OSError(0, "not a plain file")
        if create:
            self.restrict(file, 0o600)
        return file

    def lock(self, file: int, mode: str) -> bool:
        """Take an ``"exclusive"`` or ``"shared"`` lock; False where another holds it.

        It is held until the descriptor is closed, by its process's death too.
        """
        if sys.platform == "win32":
            raise StoreError("disk: needs file locks of POSIX; Windows has none")
        kind = fcntl.LOCK_EX if mode == "exclusive" else fcntl.LOCK_SH
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self, descriptor: int) -> None:
        """Close a file or folder."""
        os.close(descriptor)


def _after(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """Return what is left of ``views`` after their first ``count`` bytes."""
    for index, view in enumerate(views):
        if count < view.nbytes:
            return [view[count:], *views[index + 1 :]]
        count -= view.nbytes
    return []


@contextmanager
def telling(where: object) -> Iterator[None]:
    """Turn what the system says no to into a `StoreError` of one line that names the file."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{where}: {error.strerror or error}") from error
    except EOFError as error:
        raise StoreError(f"{where}: {error}; the file is cut short") from error


@contextmanager
def locating(where: object) -> Iterator[None]:
    """Name a file in a `StoreError` that does not say which one it is about."""
    try:
        yield
    except StoreError as error:
        told = str(error)
        if told.startswith(str(where)):
            raise
        raise type(error)(f"{where}: {told}") from error.__cause__
