"""What the header of a bundle says of its entry, and the one way to say it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ninfer_pool.core import identity
from ninfer_pool.core.identity import Attribute, Namespace
from ninfer_pool.errors import StoreError
from ninfer_pool.tiers.disk import manifest
from ninfer_pool.tiers.disk.geometry import SHARED, VERSION, DiskGeometry, VersionError, geometry_of
from ninfer_pool.tiers.disk.runs import Tensors, header_of

METADATA = "ninfer-pool-bundle"
_BEGINNING = f'{{"__metadata__":{{"{METADATA}":'


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleMark:
    """One checkpoint; see `MarkRecord`. ``tail``: it has a partly covered page of its own."""

    position: int
    kind: str
    cuts: tuple[int, ...] | None
    expires: float | None
    tail: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """What a bundle says of its entry; see `EntryRecord`.

    ``salted``, which writing sets, says that the namespace has a salt, which is left out along
    with the token ids.
    """

    geometry: DiskGeometry
    namespace: Namespace
    key: str
    tokens: int
    prompt_tokens: int
    priority: int
    created: float
    attributes: tuple[Attribute, ...]
    marks: tuple[BundleMark, ...]
    salted: bool = False

    @property
    def pages(self) -> int:
        """How many pages the entry's KV fills."""
        return -(-self.tokens // self.geometry.page_tokens)


def check_bundle(bundle: Bundle) -> None:
    """Say no to fields of the wrong kind or that do not fit together."""
    manifest.check_common(bundle)
    if type(bundle.salted) is not bool:
        raise StoreError(f"salted: {bundle.salted!r:.40}; needs true or false")
    before = 0
    for mark in bundle.marks:
        manifest.check_mark("marks", mark, before, bundle.tokens)
        before = mark.position
        if mark.tail not in (False, before % bundle.geometry.page_tokens > 0):
            raise StoreError(f"marks: tail {mark.tail!r:.40} at {before}; that page is whole")
    if before != bundle.tokens:
        raise StoreError(f"marks: the last is at {before}; needs one at {bundle.tokens}, the end")


def check_tokens(bundle: Bundle, tokens: bytes) -> None:
    """Say no to token ids that are not those that the key names."""
    space = bundle.geometry
    digest = bundle.namespace.digest(grid=space.grid, min_chunk=space.min_chunk)
    key = identity.sequence_key(digest, [tokens], bundle.attributes)
    if len(tokens) != 4 * bundle.tokens or key != bundle.key:
        raise StoreError(f"key: {bundle.key}; the tokens and attributes have {key}")


def tensors_of(bundle: Bundle, names: Iterable[str]) -> Tensors:
    """Return the tensors of these names, in order."""
    page, image = bundle.geometry.page_bytes, bundle.geometry.image_bytes
    shapes: dict[str, tuple[str, tuple[int, ...], int]] = {
        "tokens": ("I32", (bundle.tokens,), 4 * bundle.tokens),
        "pages": ("U8", (bundle.pages, page), bundle.pages * page),
        "image": ("U8", (image,), image),
        "tail": ("U8", (page,), page),
    }
    return [(name, *shapes[name.partition(".")[0]]) for name in names]


def tensor_names(bundle: Bundle, *, tokens: bool) -> list[str]:
    """Return the names of a bundle's tensors, in order."""
    images = bundle.marks if bundle.geometry.image_bytes else ()
    return [
        *(["tokens"] if tokens else []),
        "pages",
        *(f"image.{mark.position}" for mark in images),
        *(f"tail.{mark.position}" for mark in bundle.marks if mark.tail),
    ]


def header_for(bundle: Bundle, sums: Mapping[str, str]) -> bytes:
    """Return a bundle's header; ``sums`` has the checksum of each tensor, in order."""
    fields = manifest.plain(bundle)
    geometry = manifest.plain(bundle.geometry)
    namespace = manifest.plain(bundle.namespace)
    attributes = manifest.encode_attributes(bundle.attributes)
    marks = [manifest.plain(mark) for mark in bundle.marks]
    fields |= {"geometry": geometry, "namespace": namespace, "attributes": attributes}
    fields |= {"marks": marks, "version": VERSION, "tensors": dict(sums)}
    fields["fingerprint"] = bundle.geometry.fingerprint(bundle.namespace)
    text = manifest.seal(fields).decode("ascii")
    return header_of(tensors_of(bundle, sums), metadata={METADATA: text})


def parse_header(header: bytes) -> tuple[Bundle, dict[str, str]]:
    """Return what a header says, and its tensors' checksums; none but the one way to say it."""
    try:
        text = header[8:].decode("ascii")
        if not text.startswith(_BEGINNING):
            raise StoreError("header: not that of a bundle of ninfer-pool")
        value, _ = json.JSONDecoder().raw_decode(text, len(_BEGINNING))
        sealed = value.encode("ascii")
    except (ValueError, AttributeError, RecursionError):
        raise StoreError("header: damaged") from None
    fields = manifest.unseal(sealed)
    with manifest.wrong_fields():
        version = fields.pop("version")
        if version != VERSION:
            raise VersionError(f"version: {version!r:.40}; this ninfer-pool reads {VERSION}")
        sums = fields.pop("tensors")
        del fields["fingerprint"]
        fields["geometry"] = geometry_of(fields["geometry"])
        fields["namespace"] = Namespace(**fields["namespace"])
        fields["attributes"] = manifest.decode_attributes(fields["attributes"])
        fields["marks"] = tuple(map(_mark, fields["marks"]))
        bundle = Bundle(**fields)
        check_bundle(bundle)
        sums = {name: sums[name] for name in tensor_names(bundle, tokens="tokens" in sums)}
        if header_for(bundle, sums) != header:
            raise StoreError("header: not as this ninfer-pool writes it")
    return bundle, sums


def _mark(fields: dict[str, Any]) -> BundleMark:
    cuts = fields.pop("cuts")
    return BundleMark(**fields, cuts=None if cuts is None else tuple(cuts))


def check_fit(bundle: Bundle, geometry: DiskGeometry | None, namespace: Namespace | None) -> None:
    """Say no to a bundle of another geometry or base namespace, and in what it differs."""
    sides: list[tuple[Iterable[str], Any, Any]] = []
    if geometry is not None:
        sides.append((DiskGeometry.__slots__, geometry, bundle.geometry))
    if namespace is not None:
        sides.append((SHARED, namespace, bundle.namespace))
    for names, ours, its in sides:
        for name in names:
            mine, theirs = getattr(ours, name), getattr(its, name)
            if mine != theirs:
                raise StoreError(f"{name}: {theirs!r:.100}; this pool's is {mine!r:.100}")
