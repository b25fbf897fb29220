"""Identity: namespaces and keys. A key finds an entry; only comparing tokens confirms it.

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

import dataclasses
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import xxhash

from ninfer_pool.errors import NamespaceError

Bytes: TypeAlias = bytes | bytearray | memoryview
"""Raw bytes in any of the forms that the hash takes without a copy."""

Attribute: TypeAlias = tuple[int, bytes]
"""(position, payload): everything but the token at a position; see `ninfer_pool.core.prompt`."""

ABSENT = 0xFFFFFFFF
MAX_SALT = 128
MAX_NUMBER = 2**63 - 1
_OPTIONAL = ("adapter", "salt")
_NUMBERS = ("rank", "world_size")


def xxh3_128(*parts: Bytes) -> bytes:
    """Return the 16 bytes (big-endian, as xxhash prints them) of xxh3-128 over ``parts``. O(n)."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.digest()


def is_text(value: object) -> bool:
    """Return whether ``value`` is a str that UTF-8 can carry: one without lone surrogates."""
    return isinstance(value, str) and value.encode("utf-8", "ignore").decode("utf-8") == value


def encode_text(value: str | None) -> bytes:
    """Encode an optional text: u32 length and UTF-8, or the length ``0xFFFFFFFF`` for None."""
    if value is None:
        return struct.pack("<I", ABSENT)
    raw = value.encode("utf-8")
    return struct.pack("<I", len(raw)) + raw


def encode_number(value: int) -> bytes:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """The identity of a computation: equal in every field, or nothing is shared.

    Args:
        weights: digest of the model's weights.
        kv_dtype: how KV is stored, e.g. ``"int8-g64"``.
        rope: rotary settings and the context window, e.g. ``"theta=1e7,max=262144"``.
        draft: speculative backend and draft window, e.g. ``"mtp3"``.
        adapter: digest of an adapter, or None.
        salt: a tenant's salt of 1 to 128 characters, or None. Nothing, explanations included,
            crosses a salt.
        rank, world_size: this pool's rank, where a model runs over several.

    Raises:
        NamespaceError: a field of the wrong type or out of range.

    The pool adds its own ``grid`` and ``min_chunk`` to the digest: where prefill is cut is part
    of the identity.
    """

    weights: str
    kv_dtype: str
    rope: str = ""
    draft: str = "none"
    adapter: str | None = None
    salt: str | None = None
    rank: int = 0
    world_size: int = 1
    _hash: int = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for field in _identity():
            _check(field.name, getattr(self, field.name))
        if self.salt is not None and not 1 <= len(self.salt) <= MAX_SALT:
            raise NamespaceError(f"salt: {len(self.salt)} characters; needs 1 to {MAX_SALT}")
        if not 0 <= self.rank < self.world_size:
            raise NamespaceError(f"rank: {self.rank}; needs 0 <= rank < {self.world_size}")
        fields = tuple(getattr(self, field.name) for field in _identity())
        object.__setattr__(self, "_hash", hash(fields))

    def __hash__(self) -> int:
        """The fields' hash, computed once: every lookup needs it."""
        return self._hash

    def encode(self, *, grid: int, min_chunk: int) -> bytes:
        """Return the encoding of this namespace in a pool of that grid."""
        parts = [b"NPns\x01"]
        for field in _identity():
            value = getattr(self, field.name)
            parts.append(encode_number(value) if field.name in _NUMBERS else encode_text(value))
        return b"".join([*parts, encode_number(grid), encode_number(min_chunk)])

    def digest(self, *, grid: int, min_chunk: int) -> bytes:
        """Return the 16-byte digest of `encode`."""
        return xxh3_128(self.encode(grid=grid, min_chunk=min_chunk))

    def first_difference(self, other: Namespace) -> str | None:
        """Return the name of the first field that differs, or None."""
        for field in _identity():
            if getattr(self, field.name) != getattr(other, field.name):
                return field.name
        return None


def _identity() -> list[dataclasses.Field[object]]:
    return [field for field in dataclasses.fields(Namespace) if field.compare]


def _check(name: str, value: object) -> None:
    if name in _NUMBERS:
        if type(value) is not int or abs(value) > MAX_NUMBER:
            raise NamespaceError(f"{name}: {value!r}; needs an int of 64 bits")
    elif not is_text(value) and not (value is None and name in _OPTIONAL):
        raise NamespaceError(f"{name}: {value!r}; needs a str of valid Unicode")
