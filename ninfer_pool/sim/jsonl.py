"""JSON Lines, read strictly: every error names the file, the line, the field and a right value."""

from __future__ import annotations

import codecs
import gzip
import json
import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from ninfer_pool.errors import TraceError

T = TypeVar("T")

_GZIP_MAGIC: Final = b"\x1f\x8b"
_SHOWN: Final = 60
"""Characters of a value in an error."""


@dataclass(frozen=True, slots=True)
class JsonFields:
    """The fields of one JSON object, checked where they are read.

    ``where`` names the file and the line for errors, ``path`` the object inside that line, such
    as ``messages[0].``. A field without a default must be there.
    """

    values: dict[str, object]
    where: str
    path: str = ""

    def error(self, name: str, value: object, wanted: str) -> TraceError:
        """Return the error for a field: place, name, value, and a right value."""
        shown = json.dumps(value, default=repr)
        shown = shown if len(shown) <= _SHOWN else shown[: _SHOWN - 3] + "..."
        return TraceError(f"{self.where}, field {self.path}{name}: {shown}; must be {wanted}")

    def missing(self, name: str) -> TraceError:
        """Return the error for a field that is not there."""
        return TraceError(f"{self.where}, field {self.path}{name}: missing; must be given")

    def has(self, name: str) -> bool:
        """Return True if the field is there and not null."""
        return self.values.get(name) is not None

    def get(self, name: str, default: object = None) -> object:
        """Return a field of any type."""
        if name in self.values:
            return self.values[name]
        if default is None:
            raise self.missing(name)
        return default

    def whole(self, name: str, default: int | None = None, *, least: int = 0) -> int:
        """Return a whole number (a bool is none) of at least `least`."""
        return self.whole_item(name, self.get(name, default), least=least)

    def whole_item(self, name: str, value: object, *, least: int = 0) -> int:
        """Return a value inside the field `name`, checked as `whole` does."""
        if type(value) is not int or value < least:
            raise self.error(name, value, f"a whole number, {least} or more")
        return value

    def seconds(self, name: str) -> float:
        """Return a finite time of 0 or more."""
        value = self.get(name)
        if type(value) is int or type(value) is float:
            try:
                number = float(value)
            except OverflowError:
                number = math.inf
            if math.isfinite(number) and number >= 0:
                return number
        raise self.error(name, value, "a finite number, 0 or more")

    def text(self, name: str, default: str | None = None) -> str:
        """Return a string."""
        return self._typed(name, default, str, "a string")

    def flag(self, name: str, *, default: bool) -> bool:
        """Return true or false."""
        return self._typed(name, default, bool, "true or false")

    def items(self, name: str, default: list[object] | None = None) -> list[object]:
        """Return a list."""
        return self._typed(name, default, list, "a list")

    def _typed(self, name: str, default: object, kind: type[T], wanted: str) -> T:
        value = self.get(name, default)
        if not isinstance(value, kind):
            raise self.error(name, value, wanted)
        return value

    def tuples(self, name: str, size: int, shape: str) -> Iterator[list[object]]:
        """Yield the elements of an optional list, each a list of `size` values."""
        for item in self.items(name, []):
            if not isinstance(item, list) or len(item) != size:
                raise self.error(name, item, shape)
            yield item

    def child(self, name: str) -> JsonFields:
        """Return the fields of an object."""
        return self.item(name, self.get(name))

    def children(self, name: str) -> Iterator[JsonFields]:
        """Yield the fields of each object of a list."""
        for number, item in enumerate(self.items(name)):
            yield self.item(f"{name}[{number}]", item)

    def item(self, name: str, value: object) -> JsonFields:
        """Return the fields of a value that must be an object."""
        if not isinstance(value, dict):
            raise self.error(name, value, "an object")
        return JsonFields(value, self.where, f"{self.path}{name}.")

    def constants(self, what: str, **wanted: object) -> None:
        """Check fields that have one right value: those of the header of `what`."""
        for name, constant in wanted.items():
            value = self.get(name)
            if type(value) is not type(constant) or value != constant:
                raise self.error(name, value, f"{json.dumps(constant)} (the header of {what})")


def read_objects(lines: Iterable[bytes], *, origin: str) -> Iterator[JsonFields]:
    """Yield each line of a file as a JSON object; blank lines may only end the file.

    Raises:
        TraceError: a line is blank or no JSON object in UTF-8, or the file is empty.
    """
    number, last = 0, 0
    for number, raw in enumerate(lines, start=1):
        line = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
        text = decode(line, where=f"{origin}, line {number}")
        if not text.strip():
            continue
        if last != number - 1:
            raise TraceError(f"{origin}, line {last + 1}: blank; must be a JSON object")
        last = number
        yield parse_object(text, where=f"{origin}, line {number}")
    if not last:
        raise TraceError(f"{origin}, line 1: the file is empty; must be JSON Lines")


def decode(line: bytes, *, where: str) -> str:
    """Return a line's text.

    Raises:
        TraceError: it is not UTF-8.
    """
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise TraceError(f"{where}: not UTF-8 text; must be JSON Lines") from error


def parse_object(text: str | bytes, *, where: str) -> JsonFields:
    """Parse a JSON object; of a key that is given twice the last counts.

    Raises:
        TraceError: not JSON, or not an object.
    """
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise TraceError(f"{where}: not valid JSON ({reason}); must be a JSON object") from error
    if not isinstance(record, dict):
        raise TraceError(f"{where}: not a JSON object; must be one")
    return JsonFields(record, where)


def file_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file one by one, decompressed when it is gzip.

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
