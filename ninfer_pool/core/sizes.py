"""Sizes in bytes, as people write and read them."""

from __future__ import annotations

import re
from fractions import Fraction

from ninfer_pool.errors import UsageError

UNITS = {
    "": 1, "B": 1,
    "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
LARGEST_SIZE = 2**50

_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([A-Za-z]*)")
_SIZE_HELP = "write a positive size such as 8GiB, 512MiB, 8GB or plain bytes"


def parse_size(text: str) -> int:
    """Bytes of `text`: a number and a unit (`8GiB`, `1.5GiB`, `8GB`) or plain bytes.

    Units are exact, so that `8Gib` (bits?) and `8G` (which of two?) are refused, not guessed.

    Raises:
        UsageError: quotes the text and names the right form.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not a size; {_SIZE_HELP}")
    number, unit = match.groups()
    if unit not in UNITS:
        raise UsageError(f"{text!r}: unit {unit!r} is not known; {_SIZE_HELP}")
    size = int(Fraction(number) * UNITS[unit])
    if size <= 0:
        raise UsageError(f"{text!r} is less than one byte; {_SIZE_HELP}")
    if size > LARGEST_SIZE:
        raise UsageError(f"{text!r} is too large; at most {LARGEST_SIZE >> 40}TiB")
    return size


def format_bytes(size: int) -> str:
    """`size` in the largest binary unit that it fills: `8 GiB`, `149 MiB`, `2.19 MiB`."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    digits = 0 if value == int(value) or value >= 100 else 2 if value < 10 else 1
    return f"{value:.{digits}f} {unit}"
