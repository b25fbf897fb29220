"""JSON Lines read strictly: every error names the file, the line, the field and what is right."""

from __future__ import annotations

import codecs
import gzip
import json
import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ninfer_pool.errors import TraceError

_GZIP_MAGIC: Final = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class Where:
    """A place in a file, for messages; `line` counts from 1, None where the file has no lines."""

    origin: str
    line: int | None = None

    def __str__(self) -> str:
        return self.origin if self.line is None else f"{self.origin}, line {self.line}"

    def error(self, name: str, value: object, wanted: str) -> TraceError:
        """Make the error for a field: place, name, value, and what would be right."""
        shown = json.dumps(value, default=repr)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return TraceError(f"{self}, field {name}: {shown}; must be {wanted}")

    def missing(self, name: str) -> TraceError:
        """Make the error for a field that is not there."""
        return TraceError(f"{self}, field {name}: missing; must be given")


def file_lines(path: Path) -> Iterator[bytes]:
    """Give the lines of a file one by one, decompressed when it is gzip.

    Raises:
        TraceError: the file cannot be read, or its gzip data is damaged.
    """
    try:
        with path.open("rb") as file:
            packed = file.read(2) == _GZIP_MAGIC
        with gzip.open(path) if packed else path.open("rb") as lines:
            yield from lines
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: damaged gzip data ({error})") from error
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror or error})") from error


def text_lines(lines: Iterable[bytes], *, origin: str) -> Iterator[tuple[int, str]]:
    """Give (line number from 1, text) for each line; blank lines may only end the file.

    Raises:
        TraceError: a line is not UTF-8 or blank, or the file holds nothing.
    """
    number, last = 0, 0
    for number, raw in enumerate(lines, start=1):
        line = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            message = f"{origin}, line {number}: not UTF-8 text; must be JSON Lines"
            raise TraceError(message) from error
        if not text.strip():
            continue
        if last != number - 1:
            raise TraceError(f"{origin}, line {last + 1}: blank; must be a JSON object")
        last = number
        yield number, text
    if not last:
        raise TraceError(f"{origin}, line 1: the file is empty; must be JSON Lines")


def parse_object(text: str, *, where: Where) -> dict[str, object]:
    """Parse one line as a JSON object without duplicate keys.

    Raises:
        TraceError: not JSON, not an object, or a key given twice.
    """

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        record = dict(pairs)
        if len(record) != len(pairs):
            keys = [key for key, _ in pairs]
            again = next(key for key in keys if keys.count(key) > 1)
            raise where.error(again, record[again], "given once in its object")
        return record

    try:
        record = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise TraceError(f"{where}: not valid JSON ({reason}); must be a JSON object") from error
    if not isinstance(record, dict):
        raise TraceError(f"{where}: not a JSON object; must be one")
    return record


def needed(record: dict[str, object], name: str, where: Where) -> object:
    """Give a field that must be there."""
    if name not in record:
        raise where.missing(name)
    return record[name]


def whole(value: object, name: str, where: Where, *, least: int) -> int:
    """Check a whole number (a bool is none) of at least `least`."""
    if type(value) is not int or value < least:
        raise where.error(name, value, f"a whole number, {least} or more")
    return value


def seconds(value: object, name: str, where: Where) -> float:
    """Check a finite time of 0 or more."""
    if type(value) is int or type(value) is float:
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number) and number >= 0:
            return number
    raise where.error(name, value, "a finite number, 0 or more")


def text_of(value: object, name: str, where: Where) -> str:
    """Check a string."""
    if not isinstance(value, str):
        raise where.error(name, value, "a string")
    return value


def list_of(value: object, name: str, where: Where) -> list[object]:
    """Check a list."""
    if not isinstance(value, list):
        raise where.error(name, value, "a list")
    return value


def object_of(value: object, name: str, where: Where) -> dict[str, object]:
    """Check an object."""
    if not isinstance(value, dict):
        raise where.error(name, value, "an object")
    return value
