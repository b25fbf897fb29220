"""The settings that must be equal for two computations of llama.cpp to share pages."""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from pathlib import Path

import llama_cpp

from ninfer_pool.core.identity import Namespace
from ninfer_pool.errors import ConfigError

ROPE = (
    "rope_scaling_type",
    "rope_freq_base",
    "rope_freq_scale",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_orig_ctx",
)
COMPUTED = ("n_ubatch", "flash_attn_type", "attention_type", "offload_kqv", "op_offload")
"""Settings of a context that change results, or only their bits."""

PART = re.compile(r"(\d{5})-of-(\d{5})\.gguf$")
"""The names of the files of a split model."""


def namespace_of(llama: llama_cpp.Llama, *, n_ctx: int) -> Namespace:
    """Return the identity of the computations of ``llama`` with ``n_ctx`` tokens per lane.

    It has the file's digest, KV types, rope settings, context, overrides, and library version.

    Raises:
        ConfigError: the model's file cannot be read.
    """
    params = llama.context_params
    rope = [f"{name}={getattr(params, name):g}" for name in ROPE]
    settings = [f"{name}={int(getattr(params, name))}" for name in COMPUTED]
    overrides = [f"{key}={value}" for key, value in sorted((llama.kv_overrides or {}).items())]
    return Namespace(
        weights=f"sha256:{_digest(Path(llama.model_path))}",
        kv_dtype=",".join([f"k={params.type_k},v={params.type_v}", *settings]),
        rope=",".join([*rope, f"max={n_ctx}", *overrides]),
        draft=f"none,llama-cpp-python={llama_cpp.__version__}",
    )


def _digest(path: Path) -> str:
    """Return the file's digest, or one over the digests of a split model's files."""
    found = PART.search(path.name)
    if found is None:
        return _of_file(path)
    names = (f"{number + 1:05d}-of-{found[2]}.gguf" for number in range(int(found[2])))
    digests = [_of_file(path.with_name(path.name[: found.start()] + name)) for name in names]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _of_file(path: Path) -> str:
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigError(f"model_path: {error}; needs the model's file") from None
    return _hashed(path.resolve(), found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=64)
def _hashed(path: Path, size: int, modified: int) -> str:
    """Return the file's digest, computed once per size and modification time."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 22):
            digest.update(part)
    return digest.hexdigest()
