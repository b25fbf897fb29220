"""Keys: what names a namespace, an entry or a checkpoint. A key finds; it never confirms.

The encoding is little-endian and length-prefixed; ``docs/reference/formats.md`` has test vectors.

* ``text``   u32 byte length, then UTF-8; an absent text is the length ``0xFFFFFFFF`` alone
* ``number`` i64
* namespace  ``b"NPns" 0x01``, then each field of `Namespace` in the order declared, then the
  pool's grid and min_chunk as numbers; its digest is xxh3-128 of that
* key        ``b"NPky" 0x01``, the namespace's digest (u32 length 16, 16 bytes), the token bytes
  (u64 byte length, int32 each), the number of attributes (u64), then each attribute: position
  (u64), payload (u32 byte length, bytes). xxh3-128 of that, as 32 hexadecimal digits.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TypeAlias

import xxhash

Bytes: TypeAlias = bytes | bytearray | memoryview
"""Raw bytes in any of the forms that the hash takes without a copy."""

Attribute: TypeAlias = tuple[int, bytes]
"""(position, payload): what a position carries beside its token; see `ninfer_pool.core.prompt`."""

ABSENT = 0xFFFFFFFF


def xxh3_128(*parts: Bytes) -> bytes:
    """Return the 16 bytes (big-endian, as xxhash prints them) of xxh3-128 over ``parts``. O(n)."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.digest()


def is_text(value: object) -> bool:
    """Say whether ``value`` is a str that UTF-8 can carry: one without lone surrogates."""
    return isinstance(value, str) and value.encode("utf-8", "ignore").decode("utf-8") == value


def text(value: str | None) -> bytes:
    """Encode an optional text: u32 length and UTF-8, or the length ``0xFFFFFFFF`` for None."""
    if value is None:
        return struct.pack("<I", ABSENT)
    raw = value.encode("utf-8")
    return struct.pack("<I", len(raw)) + raw


def number(value: int) -> bytes:
    """Encode a number as i64."""
    return struct.pack("<q", value)


def sequence_key(namespace: bytes, tokens: Sequence[Bytes], attributes: Sequence[Attribute]) -> str:
    """Return the key of the token bytes (int32, in parts) with ``attributes`` under a namespace.

    One hash pass without a copy: O(n), about 0.1 µs for 1,000 tokens.
    """
    size = sum(len(part) for part in tokens)
    parts: list[Bytes] = [b"NPky\x01", struct.pack("<I", len(namespace)), namespace]
    parts += [struct.pack("<Q", size), *tokens, struct.pack("<Q", len(attributes))]
    for position, payload in attributes:
        parts += [struct.pack("<QI", position, len(payload)), payload]
    return xxh3_128(*parts).hex()
