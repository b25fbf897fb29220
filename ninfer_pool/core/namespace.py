"""What must be equal before two prompts' tokens are compared at all."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ninfer_pool.core import keys
from ninfer_pool.errors import NamespaceError

_OPTIONAL = ("adapter", "salt")
_NUMBERS = ("rank", "world_size")
MAX_SALT = 128
MAX_NUMBER = 2**63 - 1


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
        """The fields' hash, worked out once: every lookup asks for it."""
        return self._hash

    def encode(self, *, grid: int, min_chunk: int) -> bytes:
        """Return the bytes that name this namespace in a pool of that grid; see `keys`."""
        parts = [b"NPns\x01"]
        for field in _identity():
            value = getattr(self, field.name)
            parts.append(keys.number(value) if field.name in _NUMBERS else keys.text(value))
        return b"".join([*parts, keys.number(grid), keys.number(min_chunk)])

    def digest(self, *, grid: int, min_chunk: int) -> bytes:
        """Return the 16-byte digest of `encode`."""
        return keys.xxh3_128(self.encode(grid=grid, min_chunk=min_chunk))

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
    elif not keys.is_text(value) and not (value is None and name in _OPTIONAL):
        raise NamespaceError(f"{name}: {value!r}; needs a str of valid Unicode")
