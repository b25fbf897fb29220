"""A request's prompt: tokens, the attributes of some positions, and its declared structure."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ninfer_pool.core.identity import ABSENT, Attribute, Namespace, encode_text, is_text
from ninfer_pool.errors import PromptError

KINDS = ("system", "turn", "response", "history", "junction", "grid", "frontier")
"""Every kind of checkpoint; all but ``frontier`` may be declared as a boundary."""

Array = npt.NDArray[np.int32]


class MediaSpan(NamedTuple):
    """Token positions ``[begin, end)`` that stand for one image, sound or video.

    Without a digest the span matches nothing, and nothing at or after it is retained.
    """

    begin: int
    end: int
    digest: str | None


class Boundary(NamedTuple):
    """A position where the prompt's structure allows an engine to take a checkpoint."""

    position: int
    kind: str


class Prompt:
    """Token ids, everything else that identifies them, and where checkpoints may be taken.

    Args:
        tokens: int32 ids, not negative: a buffer of int32 (taken without a copy: leave it
            unchanged while a lease on the prompt runs) or a sequence of Python ints.
        namespace: the identity that must be equal before tokens are compared.
        boundaries: ``(position, kind)``, positions ascending in 1..n.
        positions: int32 of shape (3, n), the three rotary axes; None: 0, 1, 2, … on each.
        token_types: int32 of shape (n,); None: all 0.
        media: `MediaSpan` or ``(begin, end, digest)``, ascending and apart.

    Raises:
        PromptError: names the field and what would be right. Nothing else has changed.

    >>> space = Namespace(weights="sha256:1", kv_dtype="bf16")
    >>> len(Prompt([5, 6, 7], namespace=space, boundaries=[(2, "system")]))
    3
    """

    __slots__ = (
        "attributes",
        "boundaries",
        "buffer",
        "length",
        "media",
        "namespace",
        "seen",
        "shareable",
    )

    def __init__(
        self,
        tokens: Any,
        *,
        namespace: Namespace,
        boundaries: Iterable[tuple[int, str]] = (),
        positions: Any = None,
        token_types: Any = None,
        media: Iterable[tuple[int, int, str | None]] = (),
    ) -> None:
        if not isinstance(namespace, Namespace):
            raise PromptError(f"namespace: {namespace!r}; needs a Namespace")
        self.namespace = namespace
        self.buffer = token_bytes(tokens, "tokens")
        if not self.buffer:
            raise PromptError("tokens: empty; needs at least one token id")
        self.length = count = len(self.buffer) // 4
        """Tokens: ``len(prompt)``, without a call."""
        self.media = _media(media, count)
        self.boundaries = _boundaries(boundaries, count, self.media)
        bare = [span.begin for span in self.media if span.digest is None]
        self.shareable = bare[0] if bare else sys.maxsize
        """The position up to which anything may be matched or retained: the first media span
        without a digest, else without bound."""
        self.seen: Any = None
        """The last lookup's pool, its version and result: for `ninfer_pool.core.lookup` alone."""
        self.attributes: tuple[Attribute, ...] = ()
        if self.media or positions is not None or token_types is not None:
            axes = _axis(positions, (3, count), "positions")
            types = _axis(token_types, (count,), "token_types")
            self.attributes = _attributes(self.media, axes, types, count)

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        return f"Prompt({self.length} tokens, boundaries={list(map(tuple, self.boundaries))})"

    @property
    def tokens(self) -> Array:
        """The ids as a read-only int32 array of shape (n,), without a copy."""
        array = np.frombuffer(self.buffer, dtype=np.int32)
        array.flags.writeable = False
        return array

    @property
    def asked(self) -> int:
        """Where the answer begins: the end, or before the fixed prologue of an answer.

        A prompt that ends with a ``response`` boundary was written up to the ``turn`` boundary
        before it. The rest is the template's, and no later prompt needs to repeat it.
        """
        if not self.boundaries or self.boundaries[-1] != (len(self), "response"):
            return len(self)
        turns = (position for position, kind in reversed(self.boundaries) if kind == "turn")
        return next(turns, len(self))

    def inside_media(self, position: int) -> bool:
        """Return whether ``position`` is strictly inside a media span, where none may resume."""
        return any(span.begin < position < span.end for span in self.media)


def token_bytes(tokens: Any, field: str) -> memoryview:
    """Return ``tokens`` as a flat view of int32 bytes, without a copy where it is a buffer.

    Raises:
        PromptError: not int32, not one-dimensional, or a negative id. O(n).
    """
    flat = flat_bytes(tokens, field)
    check_ids(flat, field)
    return flat


def flat_bytes(tokens: Any, field: str) -> memoryview:
    """Return what `token_bytes` does, whatever the ids are."""
    if isinstance(tokens, (list, tuple)):
        tokens = _from_ints(tokens, field)
    try:
        view = memoryview(tokens)
    except TypeError:
        raise PromptError(
            f"{field}: {type(tokens).__name__}; needs an int32 buffer or a list of ints"
        ) from None
    if view.format not in ("i", "<i", "l", "<l") or view.itemsize != 4 or view.ndim != 1:
        raise PromptError(
            f"{field}: format {view.format!r}, {view.ndim} axes; needs one axis of int32"
        )
    if not view.c_contiguous:
        view = memoryview(view.tobytes()).cast("i")
    return view.cast("B") if view.format in ("i", "l") else np.asarray(view).view(np.uint8).data


def check_ids(flat: memoryview, field: str) -> None:
    """Reject a negative id among int32 bytes."""
    if flat and int(np.frombuffer(flat, dtype=np.int32).min()) < 0:
        ids = np.frombuffer(flat, dtype=np.int32)
        at = int((ids < 0).argmax())
        raise PromptError(f"{field}[{at}]: {ids[at]}; needs token ids of 0 or more")


def _from_ints(tokens: Sequence[Any], field: str) -> Array:
    for index, token in enumerate(tokens):
        if isinstance(token, bool) or not isinstance(token, (int, np.integer)):
            raise PromptError(f"{field}[{index}]: {token!r}; needs an int")
        if not -(2**31) <= token < 2**31:
            raise PromptError(f"{field}[{index}]: {token}; needs an int32, 0 to {2**31 - 1}")
    return np.array(tokens, dtype=np.int32)


def _axis(values: Any, shape: tuple[int, ...], field: str) -> Array | None:
    if values is None:
        return None
    try:
        array = np.asarray(values)
    except ValueError:
        raise PromptError(f"{field}: ragged; needs int32 of shape {shape}") from None
    if array.dtype != np.int32 or array.shape != shape:
        raise PromptError(
            f"{field}: {array.dtype} of shape {array.shape}; needs int32 of shape {shape}"
        )
    return array


def _each(items: Any, field: str) -> Iterator[Any]:
    try:
        return iter(items)
    except TypeError:
        raise PromptError(f"{field}: {items!r}; needs a list, empty for none") from None


def _media(spans: Iterable[tuple[int, int, str | None]], count: int) -> tuple[MediaSpan, ...]:
    result: list[MediaSpan] = []
    end = 0
    for index, raw in enumerate(_each(spans, "media")):
        field = f"media[{index}]"
        try:
            span = MediaSpan(*raw)
        except TypeError:
            raise PromptError(f"{field}: {raw!r}; needs (begin, end, digest)") from None
        if not all(map(_is_int, raw[:2])):
            raise PromptError(f"{field}: {raw!r}; needs begin and end as ints")
        digest: object = span.digest
        if not (digest is None or is_text(digest)) or digest == "":
            raise PromptError(f"{field}.digest: {digest!r}; needs a text, or None")
        if not 0 <= span.begin < span.end <= count:
            raise PromptError(
                f"{field}: [{span.begin}, {span.end}); needs 0 <= begin < end <= {count}"
            )
        if span.begin < end:
            raise PromptError(f"{field}: begins at {span.begin}; the span before ends at {end}")
        end = span.end
        result.append(span)
    return tuple(result)


def _boundaries(
    boundaries: Iterable[tuple[int, str]], count: int, media: tuple[MediaSpan, ...]
) -> tuple[Boundary, ...]:
    result: list[Boundary] = []
    before = 1
    for index, raw in enumerate(_each(boundaries, "boundaries")):
        field = f"boundaries[{index}]"
        try:
            position, kind = raw
        except (TypeError, ValueError):
            raise PromptError(f"{field}: {raw!r}; needs (position, kind)") from None
        if not isinstance(kind, str) or kind not in KINDS[:-1]:
            raise PromptError(f"{field}.kind: {kind!r}; needs one of {', '.join(KINDS[:-1])}")
        if not _is_int(position) or not 1 <= position <= count:
            raise PromptError(f"{field}.position: {position!r}; needs an int of 1 to {count}")
        if position < before:
            raise PromptError(f"{field}.position: {position} after {before}; needs ascending ones")
        if any(span.begin < position < span.end for span in media):
            raise PromptError(f"{field}.position: {position} is inside a media span")
        before = position
        result.append(Boundary(position, kind))
    return tuple(result)


def _is_int(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _attributes(
    media: tuple[MediaSpan, ...], axes: Array | None, types: Array | None, count: int
) -> tuple[Attribute, ...]:
    """Return the attributes of a prompt: ``(position, payload)``, sorted, canonical.

    Equal prefixes give equal attributes, and two prompts that differ first at position q have
    attributes that differ first at q (inside a media span: at the span's begin). A payload is
    one or more of:

    * ``M`` span length and digest
    * ``Q`` the span's block of positions
    * ``P`` the offset of the three axes from the token's index, where it changes
    * ``T`` the token type, where it changes
    """
    found: dict[int, bytes] = {}
    for span in media:
        head = b"M" + struct.pack("<q", span.end - span.begin) + encode_text(span.digest)
        found[span.begin] = head
    if axes is not None:
        _add_axes(found, axes, media, count)
    if types is not None:
        changes = np.flatnonzero(np.diff(types, prepend=np.int32(0)))
        for at in changes.tolist():
            found[at] = found.get(at, b"") + b"T" + struct.pack("<i", int(types[at]))
    return tuple(sorted(found.items()))


def payload_fields(payload: bytes) -> dict[int, bytes]:
    """Return an attribute's payload by tag, as `_attributes` wrote it."""
    fields: dict[int, bytes] = {}
    while payload:
        tag = payload[0]
        if tag == ord("M"):
            (length,) = struct.unpack_from("<I", payload, 9)
            end = 13 + (0 if length == ABSENT else length)
        elif tag == ord("Q"):
            end = 9 + struct.unpack_from("<q", payload, 1)[0]
        else:
            end = 25 if tag == ord("P") else 5
        fields[tag], payload = payload[1:end], payload[end:]
    return fields


def _add_axes(
    found: dict[int, bytes], axes: Array, media: tuple[MediaSpan, ...], count: int
) -> None:
    offsets = axes.astype(np.int64) - np.arange(count)
    outside = np.ones(count, dtype=bool)
    for span in media:
        outside[span.begin : span.end] = False
        block = offsets[:, span.begin : span.end]
        before = np.flatnonzero(outside[: span.begin])
        base = offsets[:, before[-1]] if len(before) else np.zeros(3, dtype=np.int64)
        if (block != base[:, None]).any():
            raw = np.ascontiguousarray(axes[:, span.begin : span.end]).tobytes()
            found[span.begin] += b"Q" + struct.pack("<q", len(raw)) + raw
    plain = np.flatnonzero(outside)
    steps = np.diff(offsets[:, plain], axis=1, prepend=np.zeros((3, 1), dtype=np.int64))
    for at in plain[np.flatnonzero((steps != 0).any(axis=0))].tolist():
        payload = b"P" + struct.pack("<3q", *(int(value) for value in offsets[:, at]))
        found[at] = found.get(at, b"") + payload
