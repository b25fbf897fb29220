"""The record of one entry, and the manifest that commits it: JSON, every field checked."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ninfer_pool.core.identity import Attribute, Namespace, xxh3_128
from ninfer_pool.core.prompt import KINDS
from ninfer_pool.errors import GeometryError, NamespaceError, StoreError
from ninfer_pool.tiers.disk.geometry import VERSION, DiskGeometry
from ninfer_pool.tiers.disk.runs import image_file_bytes, run_bytes

MAX_MANIFEST_BYTES = 16 << 20
MAX_VALUES = 1_000_000
"""Values of one manifest, about: they take memory beyond their text."""
MAX_TOKENS = 1 << 24
MAX_NUMBER = 2**63 - 1

HASH = re.compile(r"[0-9a-f]{32}")
FILE = re.compile(r"([0-9a-f]{32})(-[1-9][0-9]{0,5})?\.safetensors")
_HEAD = b'{"checksum":"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """One payload file: its name, the xxh3-128 of its bytes (32 hexadecimal digits), its size."""

    file: str
    checksum: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBlob(Blob):
    """The file of the KV of token positions ``[begin, end)``, and the xxh3-128 of the tokens."""

    begin: int
    end: int
    tokens_checksum: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkRecord:
    """One checkpoint.

    ``runs`` are indices into the record's runs, ascending by their begin; each counts up to
    where the next begins, and together they cover ``[0, position)``. ``cuts`` as in the pool,
    None: never exact. ``expires``: seconds of the wall clock. ``image``: None exactly where the
    geometry has no images.
    """

    position: int
    kind: str
    cuts: tuple[int, ...] | None
    expires: float | None
    runs: tuple[int, ...]
    image: Blob | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryRecord:
    """One whole entry.

    ``tokens`` counts them: the position of its deepest checkpoint, the last of ``marks``, which
    ascend. ``key`` names namespace, tokens and ``attributes``. ``used`` orders records by their
    last use; ``created`` is in seconds of the wall clock.
    """

    namespace: Namespace
    key: str
    tokens: int
    prompt_tokens: int
    priority: int
    hits: int
    gap: int
    used: int
    created: float
    released: bool
    attributes: tuple[Attribute, ...]
    runs: tuple[RunBlob, ...]
    marks: tuple[MarkRecord, ...]

    def files(self) -> dict[tuple[str, str], int]:
        """Return the (folder, name) of each file that it needs, with its bytes."""
        found = {("runs", run.file): run.bytes for run in self.runs}
        images = [mark.image for mark in self.marks if mark.image is not None]
        return found | {("images", image.file): image.bytes for image in images}


def encode(record: EntryRecord, fingerprint: str) -> bytes:
    """Return the manifest: ``{"checksum":"…",`` and the rest, whose xxh3-128 that is.

    Raises:
        StoreError: it is larger than a manifest may be.
    """
    fields = {name: getattr(record, name) for name in EntryRecord.__slots__}
    fields["namespace"] = plain(record.namespace)
    fields["attributes"] = encode_attributes(record.attributes)
    fields["runs"] = [plain(run) for run in record.runs]
    fields["marks"] = [
        {**plain(mark), "image": None if mark.image is None else plain(mark.image)}
        for mark in record.marks
    ]
    return seal({**fields, "version": VERSION, "fingerprint": fingerprint})


def seal(fields: dict[str, Any]) -> bytes:
    """Return ``fields`` as JSON in its one canonical form, begun with the checksum of the rest.

    Raises:
        StoreError: larger than a manifest may be.
    """
    text = json.dumps(fields, separators=(",", ":"), sort_keys=True, allow_nan=False)
    rest = text.encode("ascii")[1:]
    raw = _HEAD + xxh3_128(rest).hex().encode("ascii") + b'",' + rest
    _check_size(raw)
    return raw


def unseal(raw: bytes) -> dict[str, Any]:
    """Return the fields of what `seal` made; it may still be another form of the same.

    Raises:
        StoreError: too large, damaged, no JSON.
    """
    _check_size(raw)
    rest = raw[len(_HEAD) + 34 :]
    if not (raw.startswith(_HEAD) and identity(raw) == xxh3_128(rest).hex()):
        raise StoreError("checksum: not that of the manifest")
    try:
        fields: dict[str, Any] = json.loads(b"{" + rest)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"manifest: {type(error).__name__}; needs JSON") from None
    return fields


def identity(raw: bytes) -> str:
    """Return the id of a manifest: its checksum."""
    return raw[len(_HEAD) : len(_HEAD) + 32].decode("ascii", "replace")


def decode(raw: bytes, *, fingerprint: str, geometry: DiskGeometry) -> EntryRecord:
    """Return the record of a manifest.

    Raises:
        StoreError: says what is wrong with it.
    """
    fields = unseal(raw)
    with wrong_fields():
        record = _record(fields, fingerprint)
    check(record, geometry)
    if encode(record, fingerprint) != raw:
        raise StoreError("manifest: not as this ninfer-pool writes it")
    return record


@contextmanager
def wrong_fields() -> Iterator[None]:
    """Turn what fields of the wrong kind raise into a `StoreError`."""
    try:
        yield
    except (TypeError, KeyError, ValueError, AttributeError, OverflowError) as error:
        raise StoreError(f"manifest: {type(error).__name__} {error}; a field is wrong") from None
    except (NamespaceError, GeometryError) as error:
        raise StoreError(f"manifest: {error}") from None


def plain(value: Any) -> dict[str, Any]:
    """Return a dataclass's public fields, without going into what they hold."""
    names = [field.name for field in dataclasses.fields(value) if not field.name.startswith("_")]
    return {name: getattr(value, name) for name in names}


def encode_attributes(attributes: Sequence[Attribute]) -> list[list[Any]]:
    """Return attributes as JSON holds them."""
    return [[position, base64.b64encode(raw).decode("ascii")] for position, raw in attributes]


def decode_attributes(found: Any) -> tuple[Attribute, ...]:
    """Return what `encode_attributes` was given; TypeError, ValueError for other values."""
    return tuple((position, base64.b64decode(raw, validate=True)) for position, raw in found)


def _check_size(raw: bytes) -> None:
    if len(raw) > MAX_MANIFEST_BYTES:
        raise StoreError(f"manifest: {len(raw)} bytes; at most {MAX_MANIFEST_BYTES}")
    values = sum(map(raw.count, (b",", b"[", b"{")))
    if values > MAX_VALUES:
        raise StoreError(f"manifest: {values} values; at most {MAX_VALUES}")


def _record(fields: dict[str, Any], fingerprint: str) -> EntryRecord:
    for name, right in (("version", VERSION), ("fingerprint", fingerprint)):
        found = fields.pop(name)
        if found != right:
            raise StoreError(f"{name}: {found!r}; this folder's is {right!r}")
    fields["namespace"] = Namespace(**fields["namespace"])
    fields["attributes"] = decode_attributes(fields["attributes"])
    fields["runs"] = tuple(RunBlob(**run) for run in fields["runs"])
    fields["marks"] = tuple(map(_mark, fields["marks"]))
    return EntryRecord(**fields)


def _mark(fields: dict[str, Any]) -> MarkRecord:
    image, cuts = fields.pop("image"), fields.pop("cuts")
    return MarkRecord(
        **{**fields, "runs": tuple(fields["runs"])},
        image=None if image is None else Blob(**image),
        cuts=None if cuts is None else tuple(cuts),
    )


def check(record: EntryRecord, geometry: DiskGeometry) -> None:
    """Say no to a record that does not fit the geometry, or itself.

    Raises:
        StoreError: names the field, the value and what would be right.
    """
    check_common(record)
    for name in ("hits", "gap", "used"):
        _int(name, getattr(record, name), 0, MAX_NUMBER)
    if type(record.released) is not bool:
        raise StoreError(f"released: {record.released!r:.40}; needs true or false")
    for index, run in enumerate(record.runs):
        _check_run(f"runs[{index}]", run, record.tokens, geometry)
    _check_marks(record, geometry)


def check_common(record: Any) -> None:
    """Say no to the fields that an entry has on disk and in a bundle; as `check`."""
    _int("tokens", record.tokens, 1, MAX_TOKENS)
    _int("priority", record.priority, -MAX_NUMBER, MAX_NUMBER)
    _int("prompt_tokens", record.prompt_tokens, 0, MAX_NUMBER)
    _number("created", record.created)
    _hash("key", record.key)
    _check_attributes(record.attributes)


def check_mark(field: str, mark: Any, before: int, tokens: int) -> None:
    """Say no to a checkpoint's own fields; as `check`."""
    _int(f"{field}.position", mark.position, before + 1, tokens)
    if mark.kind not in KINDS:
        raise StoreError(f"{field}.kind: {mark.kind!r:.40}; needs one of {', '.join(KINDS)}")
    if mark.expires is not None:
        _number(f"{field}.expires", mark.expires)
    for cut in mark.cuts or ():
        _int(f"{field}.cuts", cut, 0, MAX_TOKENS)


def _check_attributes(attributes: Sequence[tuple[int, object]]) -> None:
    before = -1
    for position, payload in attributes:
        _int("attributes: position", position, before + 1, MAX_TOKENS)
        if type(payload) is not bytes:
            raise StoreError(f"attributes: {type(payload).__name__} at {position}; needs bytes")
        before = position


def _check_run(field: str, run: RunBlob, tokens: int, geometry: DiskGeometry) -> None:
    _int(f"{field}.begin", run.begin, 0, tokens - 1)
    _int(f"{field}.end", run.end, run.begin + 1, MAX_TOKENS)
    _hash(f"{field}.tokens_checksum", run.tokens_checksum)
    _check_blob(field, run, run_bytes(geometry, run.begin, run.end))


def _check_blob(field: str, blob: Blob, size: int) -> None:
    _hash(f"{field}.checksum", blob.checksum)
    name: object = blob.file
    match = FILE.fullmatch(name) if isinstance(name, str) else None
    if match is None or match[1] != blob.checksum:
        raise StoreError(f"{field}.file: {blob.file!r}; needs {blob.checksum}.safetensors")
    if type(blob.bytes) is not int or blob.bytes != size:
        raise StoreError(f"{field}.bytes: {blob.bytes!r}; needs {size}")


def _check_marks(record: EntryRecord, geometry: DiskGeometry) -> None:
    before = 0
    for index, mark in enumerate(record.marks):
        field = f"marks[{index}]"
        check_mark(field, mark, before, record.tokens)
        before = mark.position
        _check_cover(field, mark, record.runs)
        if (mark.image is None) != (geometry.image_bytes == 0):
            right = "one" if geometry.image_bytes else "none"
            raise StoreError(f"{field}.image: {mark.image!r:.100}; needs {right}")
        if mark.image is not None:
            _check_blob(f"{field}.image", mark.image, image_file_bytes(geometry))
    if before != record.tokens:
        raise StoreError(f"marks: the last is at {before}; needs one at {record.tokens}, the end")


def _check_cover(field: str, mark: MarkRecord, runs: Sequence[RunBlob]) -> None:
    covered, begin = 0, -1
    for index in mark.runs:
        _int(f"{field}.runs", index, 0, len(runs) - 1)
        run = runs[index]
        if not begin < run.begin <= covered:
            raise StoreError(f"{field}.runs: {mark.runs}; run {index} does not go on at {covered}")
        begin, covered = run.begin, run.end
    if covered < mark.position:
        raise StoreError(f"{field}.runs: cover {covered} of {mark.position} positions")


def _int(field: str, value: object, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise StoreError(f"{field}: {value!r:.100}; needs an int of {least} to {most}")


def _number(field: str, value: object) -> None:
    fits = isinstance(value, (int, float)) and -MAX_NUMBER <= value <= MAX_NUMBER  # and no NaN
    if type(value) is bool or not fits:
        raise StoreError(f"{field}: {value!r:.100}; needs a finite number")


def _hash(field: str, value: object) -> None:
    if not isinstance(value, str) or HASH.fullmatch(value) is None:
        raise StoreError(f"{field}: {value!r:.100}; needs 32 hexadecimal digits")
