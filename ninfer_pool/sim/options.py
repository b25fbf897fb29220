"""Parsing and checking of command lines: sizes, lists, rates and output files.

Every function returns a usable value or raises `UsageError`: one line that quotes the text and
names a right one. Nothing is written, and files are read only for the check.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from ninfer_pool.core.sizes import format_bytes, parse_size
from ninfer_pool.errors import UsageError, install_hint

T = TypeVar("T")

BOUNDS = ("single_lane", "endless", "clairvoyant")
PLOT_SUFFIXES = (".svg", ".png", ".html")
LARGEST_COUNT = 2**31 - 1
LARGEST_LANES = 1024


def argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return a parser as argparse takes it; argparse then names the option in its message."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def parse_count(text: str, *, largest: int = LARGEST_COUNT) -> int:
    """Return a whole number from 1 to `largest`."""
    value = _whole(text)
    if value is None or not 1 <= value <= largest:
        raise UsageError(f"{text!r}: write a whole number from 1 to {largest}")
    return value


def parse_lanes(text: str) -> int:
    """Return a number of lanes, 1 to 1,024."""
    return parse_count(text, largest=LARGEST_LANES)


def parse_index(text: str) -> int:
    """Return a request's id: a whole number, 0 or more."""
    value = _whole(text)
    if value is None:
        raise UsageError(f"{text!r}: write a request's id, a whole number from 0")
    return value


def parse_rate(text: str) -> float:
    """Return tokens per second: a positive, finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise UsageError(f"{text!r}: write a positive number of tokens per second, such as 1140")
    return value


def parse_byte_rate(text: str) -> int:
    """Return bytes per second: a size, with or without ``/s`` after it."""
    try:
        return parse_size(text.strip().removesuffix("/s"))
    except UsageError as error:
        raise UsageError(f"{text!r}: write bytes per second, such as 25GB or 25GiB") from error


def parse_sizes(text: str) -> tuple[int, ...]:
    """Return sizes between commas, in the order given, without repeats."""
    return _each(text, parse_size)


def parse_entries(text: str) -> tuple[int, ...]:
    """Return entry counts K between commas, in the order given, without repeats; no K is 0."""
    return _each(text, parse_count)


def parse_policies(text: str) -> tuple[str, ...]:
    """Return policy names between commas, in the order given, without repeats; none is checked."""
    return _each(text, str)


def parse_plot(text: str) -> Path:
    """Return the path of a plot: `.svg`, `.png` or `.html`."""
    if Path(text).suffix.lower() not in PLOT_SUFFIXES:
        raise UsageError(f"{text!r}: the name must end in {_names(PLOT_SUFFIXES)}")
    return Path(text)


def _whole(text: str) -> int | None:
    # Twelve digits bound the work; int() alone would take "1_0", " 1 " and digits of other scripts.
    return int(text) if re.fullmatch(r"[0-9]{1,12}", text) else None


def _each(text: str, parse: Callable[[str], T]) -> tuple[T, ...]:
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise UsageError(f"{text!r}: an item is empty; write values with one comma between them")
    return tuple(dict.fromkeys(parse(item) for item in items))


def _names(names: Iterable[str]) -> str:
    return ", ".join(names)


def check_policies(names: Sequence[str], *, known: Collection[str]) -> None:
    """Refuse a name that is no policy; the message lists the policies."""
    for name in names:
        if name in BOUNDS:
            raise UsageError(
                f"--policy: {name!r} is a bound, which every run includes; "
                f"choose among {_names(known)}"
            )
        if name not in known:
            raise UsageError(f"--policy: unknown policy {name!r}; choose among {_names(known)}")


def check_budgets(
    budgets: Sequence[int],
    *,
    page_bytes: int,
    image_bytes: int,
    model: str,
    option: str = "--budget",
) -> None:
    """Refuse a budget with no room for one page and one image, which fills whole pages."""
    least = page_bytes * (1 + math.ceil(image_bytes / page_bytes))
    for budget in budgets:
        if budget < least:
            raise UsageError(
                f"{option}: {format_bytes(budget)} is smaller than one page plus one image; "
                f"{model} needs at least {least} bytes ({format_bytes(least)})"
            )


def check_plot_library() -> None:
    """Refuse to plot without matplotlib; the message names the command that installs it."""
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise UsageError("--plot: " + install_hint("matplotlib", "plot")) from error


def check_outputs(outputs: dict[str, Path | None], *, inputs: Sequence[Path] = ()) -> None:
    """Refuse outputs, by option, that cannot be written or would replace an input."""
    taken = {path.resolve(): str(path) for path in inputs}
    for option, path in outputs.items():
        if path is None:
            continue
        check_output(path, option=option)
        if not _is_device(path):
            other = taken.setdefault(path.resolve(), option)
            if other != option:
                raise UsageError(f"{option}: '{path}' is also {other}; name another file")


def check_output(path: Path, *, option: str) -> None:
    """Refuse a file whose folder is missing or read-only, or that is itself a folder."""
    folder = path.parent
    if path.is_dir():
        raise UsageError(f"{option}: '{path}' is a folder; name a file in it")
    if not folder.is_dir():
        raise UsageError(f"{option}: folder '{folder}' does not exist; make it first")
    if not os.access(path if _is_device(path) else folder, os.W_OK):
        raise UsageError(f"{option}: cannot write to '{folder}'; choose a folder you may write to")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file next to `path`: renamed to it on success, else removed."""
    if _is_device(path):
        yield path
        return
    target = path.resolve()
    draft = target.with_name(f".{os.getpid()}.{target.name[:200]}")
    try:
        yield draft
        draft.replace(target)
    finally:
        with suppress(FileNotFoundError):
            draft.unlink()


def _is_device(path: Path) -> bool:
    # /dev/stdout, /dev/null or a pipe is opened for writing, never replaced.
    return path.exists() and not path.is_file() and not path.is_dir()
