"""llama.cpp's models, through llama-cpp-python, served from a pool (extra ``llama``).

    pip install '.[llama]'    # from a checkout

The library re-evaluates a hybrid model's whole prompt whenever its tail differs from the one
conversation that it holds, because recurrent state cannot be cut back. Here a sequence's state is
taken out by `LlamaEngine` into the pool's pages and images, and put back at the deepest position
that was kept; `PooledLlama` serves requests that way. `convert` makes a GGUF file of a Qwen3.5
folder.
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
