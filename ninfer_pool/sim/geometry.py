"""Model geometry: the bytes of a page and an image, checked against layers and heads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Final

from ninfer_pool.errors import GeometryError

_POSITIVE: Final = ("hidden", "layers", "full_attention_layers", "q_heads", "kv_heads", "head_dim")
_LINEAR: Final = (
    "gdn_qk_heads",
    "gdn_v_heads",
    "gdn_head_dim",
    "conv_channels",
    "conv_kept_columns",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSizes:
    """Bytes of one page and of one image, and the token positions of a page."""

    page_bytes: int
    image_bytes: int
    page_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Sizes of one model; layers, heads and channels are counts, the rest bytes.

    A page holds keys and values of `page_tokens` positions over all full-attention layers. An image
    is one complete continuation state: recurrent state (fp32) and kept convolution columns (bf16)
    of every linear-attention layer, and the hidden tail (bf16). A model of plain attention has
    `linear_layers` 0 and `image_bytes` 0.

    Raises:
        GeometryError: a size is missing, not positive, or contradicts the others.
    """

    name: str
    hidden: int
    layers: int
    full_attention_layers: int
    linear_layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    image_bytes: int
    kv_bytes_per_token: Mapping[str, int]
    mtp_bytes_per_token: Mapping[str, int]
    mtp_layers: int = 0
    gdn_qk_heads: int = 0
    gdn_v_heads: int = 0
    gdn_head_dim: int = 0
    conv_channels: int = 0
    conv_kept_columns: int = 0

    def __post_init__(self) -> None:
        self._check_counts()
        self._check_layers()
        self._check_image()
        self._check_kv()

    def sizes(self, *, kv: str, mtp: bool, page_tokens: int = 64) -> PageSizes:
        """Return bytes of a page and an image for KV type `kv`; ``mtp``: the draft layer's too.

        Raises:
            GeometryError: `kv` is not a type this model states bytes for; the known are listed.
        """
        if type(page_tokens) is not int or page_tokens < 1:
            raise self._error("page_tokens", page_tokens, "a whole number, 1 or more")
        per_token = self._bytes_of(self.kv_bytes_per_token, kv)
        if mtp and self.mtp_layers:
            per_token += self._bytes_of(self.mtp_bytes_per_token, kv)
        return PageSizes(
            page_bytes=per_token * page_tokens,
            image_bytes=self.image_bytes,
            page_tokens=page_tokens,
        )

    def _bytes_of(self, table: Mapping[str, int], kv: str) -> int:
        if kv not in table:
            raise self._error("kv", kv, "one of " + ", ".join(sorted(table)))
        return table[kv]

    def _check_counts(self) -> None:
        for name in _POSITIVE:
            self._check_int(name, getattr(self, name), least=1)
        for name in ("linear_layers", "mtp_layers", "image_bytes"):
            self._check_int(name, getattr(self, name), least=0)
        for name in _LINEAR:
            self._check_int(name, getattr(self, name), least=1 if self.linear_layers else 0)

    def _check_layers(self) -> None:
        total = self.full_attention_layers + self.linear_layers
        if total != self.layers:
            wanted = f"full_attention_layers + linear_layers, {total}"
            raise self._error("layers", self.layers, wanted)
        if self.q_heads % self.kv_heads:
            raise self._error("q_heads", self.q_heads, f"a multiple of kv_heads, {self.kv_heads}")

    def _check_image(self) -> None:
        if not self.linear_layers and not self.image_bytes:
            return
        state = self.gdn_v_heads * self.gdn_head_dim * self.gdn_head_dim * 4
        columns = self.conv_channels * self.conv_kept_columns * 2
        wanted = self.linear_layers * (state + columns) + self.hidden * 2
        if self.image_bytes != wanted:
            text = f"{wanted}: recurrent state, convolution columns and hidden tail"
            raise self._error("image_bytes", self.image_bytes, text)

    def _check_kv(self) -> None:
        tables = (
            ("kv_bytes_per_token", self.kv_bytes_per_token, self.full_attention_layers),
            ("mtp_bytes_per_token", self.mtp_bytes_per_token, self.mtp_layers),
        )
        for name, table, layers in tables:
            if layers and not table:
                raise self._error(name, dict(table), "a table with at least one KV type")
            for kv, value in table.items():
                self._check_int(f"{name}.{kv}", value, least=1)
            for kv, wanted in self._derived(layers).items():
                if layers and table.get(kv, wanted) != wanted:
                    text = f"{wanted}: {layers} layers of keys and values"
                    raise self._error(f"{name}.{kv}", table[kv], text)

    def _derived(self, layers: int) -> dict[str, int]:
        """Return bytes per token of the KV types with a formula (int8-g64: a bf16 scale per 64)."""
        values = layers * 2 * self.kv_heads * self.head_dim
        return {"bf16": values * 2, "int8-g64": values + values // 64 * 2}

    def _check_int(self, name: str, value: object, *, least: int) -> None:
        if type(value) is not int or value < least:
            raise self._error(name, value, f"a whole number, {least} or more")

    def _error(self, name: str, value: object, wanted: str) -> GeometryError:
        shown = json.dumps(value, default=repr)
        return GeometryError(f"model {self.name}, field {name}: {shown}; must be {wanted}")


def presets() -> dict[str, Geometry]:
    """Return the models that ship with the package, by name."""
    records = _object(_shipped()["models"], "models", "geometry.json")
    return {name: _geometry(name, record, "geometry.json") for name, record in records.items()}


def load_geometry(name_or_path: str | Path) -> Geometry:
    """Load a shipped model by name, else a model from a JSON file.

    The file holds one model's record (named by its ``name``, else after the file) or
    ``{"models": {name: record}}`` with one model.

    Raises:
        GeometryError: no such model or file, not JSON, or sizes that do not add up.
    """
    known = presets()
    if isinstance(name_or_path, str) and name_or_path in known:
        return known[name_or_path]
    path = Path(name_or_path)
    if path.suffix.lower() != ".json" and not path.is_file():
        names = ", ".join(sorted(known))
        raise GeometryError(f"model {name_or_path}: unknown; must be {names} or a file NAME.json")
    return _from_file(path)


def _from_file(path: Path) -> Geometry:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise GeometryError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise GeometryError(f"{path}: not valid JSON; must hold one model's sizes") from error
    record = _object(content, "the file", str(path))
    if "models" not in record:
        name = record.get("name", path.stem)
        return _geometry(name if isinstance(name, str) else path.stem, record, str(path))
    models = _object(record["models"], "models", str(path))
    if len(models) != 1:
        raise GeometryError(f"{path}, field models: {len(models)} models; must be one")
    ((name, model),) = models.items()
    return _geometry(name, model, str(path))


def _geometry(name: str, record: object, origin: str) -> Geometry:
    values = dict(_object(record, name, origin))
    known = {field.name for field in fields(Geometry)} - {"name"}
    values = {key: value for key, value in values.items() if key in known}
    values.setdefault("mtp_bytes_per_token", {})
    for table in ("kv_bytes_per_token", "mtp_bytes_per_token"):
        values[table] = _object(values.get(table), table, origin)
    needed = (*_POSITIVE, "linear_layers", "image_bytes")
    missing = [key for key in needed if key not in values]
    if missing:
        raise GeometryError(f"{origin}, model {name}, field {missing[0]}: missing; must be given")
    # Geometry itself checks every value's type.
    return Geometry(name=name, **values)  # type: ignore[arg-type]


def _object(value: object, name: str, origin: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise GeometryError(f"{origin}, field {name}: must be a JSON object")
    return value


def _shipped() -> dict[str, object]:
    text = (resources.files("ninfer_pool.sim") / "geometry.json").read_text(encoding="utf-8")
    return _object(json.loads(text), "the file", "geometry.json")
