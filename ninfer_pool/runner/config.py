"""A model's sizes and constants, read from its Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ninfer_pool.errors import ModelError

LayerType = Literal["linear_attention", "full_attention"]
LAYER_TYPES = ("linear_attention", "full_attention")
DENSE_TYPES = ("qwen3_5", "qwen3_5_text")
MOE_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text")
MODEL_TYPES = (*DENSE_TYPES, *MOE_TYPES, "qwen3_next")
ROPE_TYPES = ("default", "mrope")
SIZES = (
    *("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"),
    *("linear_value_head_dim", "linear_conv_kernel_dim", "max_position_embeddings"),
)
"""Fields that every model states as an int of 1 or more."""
DEFAULT_SECTIONS = (11, 11, 10)
"""Default pairs of the rotary dimensions that turn with time, height and width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Sizes of a sparse layer: each token passes through ``per_token`` of ``count`` experts."""

    count: int
    per_token: int
    intermediate_size: int
    shared_intermediate_size: int
    normalise: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and constants of one hybrid model, under the names of its ``config.json``.

    ``sparse[i]`` is True where layer i has experts; ``sparse[-1]``, one past the layers, where
    the draft head's layer has. ``sections`` is None where rotary positions have one axis only.
    A model's digest covers the repr of this class.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[LayerType, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    rms_norm_eps: float
    rope_theta: float
    rotary_dim: int
    sections: tuple[int, ...] | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    mtp_num_hidden_layers: int
    eos_token_ids: tuple[int, ...]
    experts: Experts | None
    sparse: tuple[bool, ...]

    @classmethod
    def read(cls, folder: str | Path) -> ModelConfig:
        """Read ``config.json`` and, where there is one, ``generation_config.json``.

        Raises:
            ModelError: no such folder or file, a missing field, a value or an architecture that
                is not supported; names the field, the value and what would be right.
        """
        whole = read_json(Path(folder), "config.json")
        generation = read_optional_json(Path(folder), "generation_config.json")
        return cls.parse(whole, generation=generation)

    @classmethod
    def parse(
        cls, whole: Mapping[str, Any], *, generation: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """Build from the parsed JSON; see `read`."""
        model_type = whole.get("model_type")
        if model_type not in MODEL_TYPES:
            raise ModelError(f"model_type: {model_type!r}; needs one of {', '.join(MODEL_TYPES)}")
        for name in ("quantization_config", "compression_config"):
            if whole.get(name):
                raise ModelError(f"{name}: quantised weights; needs weights in bf16, fp16 or fp32")
        text = whole.get("text_config", whole)
        fields = _Fields({**whole, **text}, generation or {})
        config = cls(
            model_type=model_type,
            layer_types=fields.layer_types(),
            tie_word_embeddings=bool({**text, **whole}.get("tie_word_embeddings")),
            eos_token_ids=fields.eos_token_ids(),
            rms_norm_eps=fields.number("rms_norm_eps"),
            mtp_num_hidden_layers=fields.size("mtp_num_hidden_layers", default=0),
            **fields.sizes(model_type),
            **fields.rotary(model_type),
            **fields.sparsity(model_type),
        )
        _check(config, fields)
        return config

    @property
    def num_linear_layers(self) -> int:
        """Layers with a recurrent state (Ll)."""
        return self.layer_types.count("linear_attention")

    @property
    def num_attention_layers(self) -> int:
        """Layers with KV, the draft head's not counted."""
        return self.layer_types.count("full_attention")

    @property
    def key_dim(self) -> int:
        """Channels of all linear key heads."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        """Channels of all linear value heads."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the causal convolution (C): q, k and v side by side."""
        return 2 * self.key_dim + self.value_dim

    @property
    def recurrent_shape(self) -> tuple[int, int, int, int]:
        """Shape of one lane's recurrent states (Ll, Hv, Dk, Dv), fp32."""
        heads, keys = self.linear_num_value_heads, self.linear_key_head_dim
        return self.num_linear_layers, heads, keys, self.linear_value_head_dim

    @property
    def conv_shape(self) -> tuple[int, int, int]:
        """Shape of one lane's convolution columns (Ll, C, W - 1), in the model's dtype."""
        return self.num_linear_layers, self.conv_channels, self.linear_conv_kernel_dim - 1

    @property
    def rope(self) -> str:
        """The rotary settings, as a namespace names them."""
        sections = "/".join(map(str, self.sections or ())) or "1"
        return f"theta={self.rope_theta:g},dim={self.rotary_dim},sections={sections}"


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in ``folder / name``, or raise `ModelError`."""
    if not folder.is_dir():
        raise ModelError(f"model: {str(folder)!r} is no folder; needs a Hugging Face model's")
    try:
        value = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"model: {str(folder)!r} has no {name}; needs a model's folder") from None
    except ValueError as error:
        raise ModelError(f"{name}: {error}; needs a JSON object") from None
    if not isinstance(value, dict):
        raise ModelError(f"{name}: {type(value).__name__}; needs a JSON object")
    return value


def read_optional_json(folder: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in ``folder / name``, empty where there is no such file.

    Raises:
        ModelError: a file that holds no JSON object.
    """
    return read_json(folder, name) if (folder / name).is_file() else {}


class _Fields:
    """Reads and checks the fields of a parsed ``config.json``."""

    def __init__(self, values: Mapping[str, Any], generation: Mapping[str, Any]) -> None:
        self.values = values
        self.generation = generation

    def size(self, name: str, *, default: int | None = None) -> int:
        value = self.values.get(name, default)
        least = 1 if default is None else 0
        if value is None and name not in self.values:
            raise ModelError(f"{name}: missing in config.json; needs an int of {least} or more")
        if type(value) is not int or value < least:
            raise ModelError(f"{name}: {value!r}; needs an int of {least} or more")
        return value

    def number(self, name: str) -> float:
        return _positive(name, self.values.get(name))

    def sizes(self, model_type: str) -> dict[str, Any]:
        dense = None if model_type not in MOE_TYPES else 0
        sizes = {name: self.size(name) for name in SIZES}
        return {**sizes, "intermediate_size": self.size("intermediate_size", default=dense)}

    def layer_types(self) -> tuple[LayerType, ...]:
        layers = self.size("num_hidden_layers")
        types = self.values.get("layer_types")
        if types is None:
            interval = self.size("full_attention_interval", default=4) or 1
            types = [LAYER_TYPES[(i + 1) % interval == 0] for i in range(layers)]
        for kind in types:
            if kind not in LAYER_TYPES:
                raise ModelError(f"layer_types: {kind!r}; needs one of {', '.join(LAYER_TYPES)}")
        if len(types) != layers:
            raise ModelError(f"layer_types: {len(types)} of them; needs {layers}, one per layer")
        return tuple(types)

    def eos_token_ids(self) -> tuple[int, ...]:
        found = self.generation.get("eos_token_id", self.values.get("eos_token_id"))
        ids = found if isinstance(found, list) else [] if found is None else [found]
        for token in ids:
            if type(token) is not int or not 0 <= token < self.size("vocab_size"):
                raise ModelError(f"eos_token_id: {token!r}; needs token ids of the vocabulary")
        return tuple(ids)

    def rotary(self, model_type: str) -> dict[str, Any]:
        """Read the rotary settings, nested in one object or, in older folders, flat."""
        nested = self.values.get("rope_parameters") or self.values.get("rope_scaling") or {}
        kind = nested.get("rope_type", nested.get("type", "default"))
        if kind not in ROPE_TYPES:
            raise ModelError(f"rope_type: {kind!r}; needs one of {', '.join(ROPE_TYPES)}")
        if not nested.get("mrope_interleaved", True):
            raise ModelError("mrope_interleaved: False; needs True")
        flat = {**self.values, **nested}
        theta = _positive("rope_theta", flat.get("rope_theta"))
        part = _positive("partial_rotary_factor", flat.get("partial_rotary_factor", 0.25))
        dim = int(self.size("head_dim") * part)
        if dim < 2 or dim % 2 or part > 1:
            raise ModelError(
                f"partial_rotary_factor: {part!r} of head_dim {self.size('head_dim')}; "
                "needs an even number of rotary dimensions, at most head_dim"
            )
        axes = None if model_type == "qwen3_next" else _sections(nested.get("mrope_section"))
        return {"rope_theta": theta, "rotary_dim": dim, "sections": axes}

    def sparsity(self, model_type: str) -> dict[str, Any]:
        """Return the experts' sizes and the layers with experts, the draft head's as the last."""
        layers = self.size("num_hidden_layers") + 1
        count = self.size("num_experts", default=0)
        if model_type in DENSE_TYPES or count == 0:
            return {"experts": None, "sparse": (False,) * layers}
        dense = self.values.get("mlp_only_layers") or []
        step = self.size("decoder_sparse_step", default=1) or 1
        sparse = tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))
        if not any(sparse[:-1]) and dense:  # a dense model of a family that has experts
            return {"experts": None, "sparse": (False,) * layers}
        experts = Experts(
            count=count,
            per_token=self.size("num_experts_per_tok"),
            intermediate_size=self.size("moe_intermediate_size"),
            shared_intermediate_size=self.size("shared_expert_intermediate_size"),
            normalise=model_type in MOE_TYPES or bool(self.values.get("norm_topk_prob", True)),
        )
        return {"experts": experts, "sparse": sparse}


def _positive(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ModelError(f"{name}: {value!r}; needs a number above 0")
    return float(value)


def _sections(value: object) -> tuple[int, ...]:
    found = DEFAULT_SECTIONS if value is None else value
    if not isinstance(found, list | tuple) or len(found) != 3:
        raise ModelError(f"mrope_section: {value!r}; needs three ints")
    if not all(type(pairs) is int and pairs >= 0 for pairs in found):
        raise ModelError(f"mrope_section: {value!r}; needs three ints of 0 or more")
    return tuple(found)


def _check(config: ModelConfig, fields: _Fields) -> None:
    """Raise `ModelError` where fields, each valid alone, do not fit together."""
    for heads, of in (
        ("num_attention_heads", "num_key_value_heads"),
        ("linear_num_value_heads", "linear_num_key_heads"),
    ):
        found, divisor = getattr(config, heads), getattr(config, of)
        if found % divisor:
            raise ModelError(f"{heads}: {found}; needs a multiple of {of} ({divisor})")
    if not config.num_attention_layers:
        raise ModelError("layer_types: no full_attention; needs one layer of it or more")
    if config.linear_conv_kernel_dim < 2:
        raise ModelError("linear_conv_kernel_dim: 1; needs 2 or more")
    if config.mtp_num_hidden_layers > 1:
        found = config.mtp_num_hidden_layers
        raise ModelError(f"mtp_num_hidden_layers: {found}; needs 0 or 1")
    if config.experts is not None and config.experts.per_token > config.experts.count:
        found = config.experts.per_token
        raise ModelError(f"num_experts_per_tok: {found}; needs at most {config.experts.count}")
    if fields.values.get("attention_bias"):
        raise ModelError("attention_bias: True; needs False")
    if fields.values.get("hidden_act", "silu") != "silu":
        raise ModelError(f"hidden_act: {fields.values['hidden_act']!r}; needs 'silu'")
