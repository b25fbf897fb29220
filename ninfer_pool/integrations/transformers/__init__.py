"""Causal models of Hugging Face transformers served through a pool (extra ``transformers``).

    pip install '.[transformers]'    # from a checkout

A hybrid model's cache cannot be cropped, so the library computes a whole conversation again for
every turn. Here the cache object is split into the pool's pages and images, and rebuilt at the
deepest retained position. The model and its ``generate`` are not changed.

    from ninfer_pool.integrations.transformers import PooledModel

    chat = PooledModel(model, pool_bytes=4 << 30)
    output, report = chat.generate(input_ids, max_new_tokens=200)

Supported: a `DynamicCache` of full attention, linear attention, or layers that have both. The same
cuts of the prefill give the same bits; other cuts give logits that agree to rounding.
"""

from __future__ import annotations

from ninfer_pool.errors import install_hint

try:
    import torch as _torch  # noqa: F401
    import transformers as _transformers  # noqa: F401
except ModuleNotFoundError as error:
    message = install_hint(error.name or "transformers", "transformers")
    raise ModuleNotFoundError(message, name=error.name) from None

from ninfer_pool.integrations.transformers.engine import TransformersEngine
from ninfer_pool.integrations.transformers.identity import namespace_of, weights_digest
from ninfer_pool.integrations.transformers.pooled import (
    Generated,
    PooledModel,
    ReuseReport,
    generate,
)

__all__ = [
    "Generated",
    "PooledModel",
    "ReuseReport",
    "TransformersEngine",
    "generate",
    "namespace_of",
    "weights_digest",
]
