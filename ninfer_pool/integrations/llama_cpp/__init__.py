"""llama.cpp's models, through llama-cpp-python, served from a pool (extra ``llama``).

    pip install '.[llama]'    # from a checkout

The library holds one conversation. Where a prompt's tail differs, it computes a hybrid model's
whole prompt again, because recurrent state cannot be truncated. Here `LlamaEngine` copies a
sequence's state into the pool's pages and images, and restores it at the deepest retained
position. `PooledLlama` serves requests that way. `convert` makes a GGUF file of a Qwen3.5 folder.
"""

from __future__ import annotations

from ninfer_pool.errors import install_hint

try:
    import llama_cpp as _llama_cpp  # noqa: F401
except ModuleNotFoundError:
    message = install_hint("llama-cpp-python", "llama")
    raise ModuleNotFoundError(message, name="llama_cpp") from None

from ninfer_pool.integrations.llama_cpp.completion import Completion
from ninfer_pool.integrations.llama_cpp.engine import LlamaEngine
from ninfer_pool.integrations.llama_cpp.identity import namespace_of
from ninfer_pool.integrations.llama_cpp.pooled import PooledLlama
from ninfer_pool.integrations.llama_cpp.sampler import LlamaSampling
from ninfer_pool.integrations.llama_cpp.sequences import LibraryError, RestoreError

__all__ = [
    "Completion",
    "LibraryError",
    "LlamaEngine",
    "LlamaSampling",
    "PooledLlama",
    "RestoreError",
    "namespace_of",
]
