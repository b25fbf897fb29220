"""What must be equal before a model's pages may be used again: the namespace of a model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch
import transformers

from ninfer_pool.core.identity import Namespace
from ninfer_pool.errors import ConfigError

_MEMO = "_ninfer_pool_weights"
_NOT_IDENTITY = ("transformers_version", "architectures")


def weights_digest(model: Any) -> str:
    """Return ``sha256:…`` over the model's class, settings, parameters and buffers.

    Computed once and cached on the model until a tensor is replaced or written in place. A write
    through ``.data`` is not noticed. O(bytes of the weights) the first time.

    Raises:
        ConfigError: a tensor whose bytes cannot be read, such as one on the meta device.
    """
    mark = tuple(_fingerprint(model))
    known = model.__dict__.get(_MEMO)
    if known is None or known[0] != mark:
        known = (mark, _digest(model))
        model.__dict__[_MEMO] = known
    digest: str = known[1]
    return digest


def namespace_of(
    model: Any, *, weights: str | None = None, adapter: str | None = None, salt: str | None = None
) -> Namespace:
    """Return the namespace of ``model`` in its present form.

    ``weights``: a digest in place of `weights_digest`. ``adapter``: the name of the active
    adapter, which cannot be found from the weights.
    """
    settings = model.config.get_text_config(decoder=True)
    how = [
        str(model.dtype).removeprefix("torch."),
        f"attention={settings._attn_implementation}",
        f"experts={getattr(settings, '_experts_implementation', None)}",
        f"device={model.device.type}",
        f"transformers={transformers.__version__}",
        f"torch={torch.__version__}",
    ]
    rope = {
        "parameters": getattr(settings, "rope_parameters", None),
        "max": getattr(settings, "max_position_embeddings", None),
    }
    return Namespace(
        weights=weights or weights_digest(model),
        kv_dtype=",".join(how),
        rope=json.dumps(rope, sort_keys=True, default=str),
        adapter=adapter,
        salt=salt,
    )


def _fingerprint(model: Any) -> Iterator[tuple[Any, ...]]:
    """Yield values that change when a tensor is replaced, moved or written in place. O(tensors)."""
    for name, tensor in _tensors(model):
        version = 0 if tensor.is_inference() else tensor._version
        place = 0 if tensor.is_meta else tensor.data_ptr()
        yield name, place, version, tensor.dtype, tuple(tensor.shape)


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _digest(model: Any) -> str:
    found, known = hashlib.sha256(_settings(model)), dict(_tensors(model))
    for name, tensor in known.items():
        found.update(f"\0{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        found.update(_bytes(name, tensor))
    for name, value in sorted(model.state_dict().items()):
        # Quantized layers keep scales here that are neither parameters nor buffers.
        if isinstance(value, torch.Tensor) and name not in known:
            found.update(f"\0{name}\0{value.dtype}\0".encode())
            found.update(_bytes(name, value))
    return f"sha256:{found.hexdigest()}"


def _settings(model: Any) -> bytes:
    """Return the class and its settings as JSON, without their origin and the library's version."""
    known = model.config.to_dict()
    kept = {k: v for k, v in known.items() if k not in _NOT_IDENTITY and not k.startswith("_")}
    named = {"class": type(model).__qualname__, "module": type(model).__module__, **kept}
    return json.dumps(named, sort_keys=True, default=str).encode()


def _bytes(name: str, tensor: torch.Tensor) -> memoryview:
    if tensor.is_meta:
        raise ConfigError(f"weights: {name} is on the meta device; give weights= a digest")
    try:
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return flat.numpy().data
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise ConfigError(
            f"weights: {name} cannot be read ({error}); give weights= a digest"
        ) from None
