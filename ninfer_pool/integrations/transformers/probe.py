"""A trial run at construction that shows whether a model can be served through a pool."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ninfer_pool.core.config import PoolConfig
from ninfer_pool.core.identity import Namespace
from ninfer_pool.errors import ConfigError
from ninfer_pool.integrations.transformers.engine import (
    Logits,
    TransformersEngine,
    fresh_cache,
    run,
)
from ninfer_pool.integrations.transformers.layout import (
    SUPPORTED,
    CacheLayout,
    check_layers,
    layout_of,
)

CUT, TOKENS = 6, 9
"""The trial run is split after `CUT` tokens and continues to `TOKENS`."""
BOUND = {torch.float64: 1e-3, torch.float32: 1e-3}
LOW_PRECISION_BOUND = 5e-2
"""RMS of the difference over that of the logits, in bf16 and fp16: a lost state shows as 1e-1 and
more, another order of the same sums as less."""
GROWING_ROPE = ("dynamic", "longrope")


def measure(model: Any, *, page_tokens: int) -> CacheLayout:
    """Return the layout of ``model``'s pages and images, after a trial of nine tokens.

    The trial splits a sequence's cache, rebuilds it, continues, and compares the logits with
    those of the same tokens run at once. So state outside of the cache is found here.

    Raises:
        ConfigError: a model that cannot be served, with the reason and the supported models.
    """
    refuse(model)
    refuse_training(model)
    tokens = np.arange(1, TOKENS + 1) % model.config.get_text_config(decoder=True).vocab_size
    cache = fresh_cache(model)
    check_layers(cache)
    try:
        run(model, tokens[:CUT], cache)
    except Exception as error:
        raise ConfigError(
            f"model: its forward fails with a cache ({error}); {SUPPORTED}"
        ) from error
    layout = layout_of(cache, page_tokens=page_tokens)
    whole, resumed = _whole(model, tokens), _resumed(model, layout, tokens)
    size = float(np.sqrt(np.mean(whole**2)))
    error_rms = float(np.sqrt(np.mean((whole - resumed) ** 2)))
    bound = BOUND.get(model.dtype, LOW_PRECISION_BOUND)
    if not error_rms <= bound * size:
        raise ConfigError(
            f"model: resumed from its cache's own tensors its logits are off by {error_rms:.1e} "
            f"of {size:.1e}: part of its state is elsewhere, or its forward does not go on from "
            f"a state; {SUPPORTED}"
        )
    return layout


def refuse(model: Any) -> None:
    """Raise `ConfigError` for a model whose settings show that it cannot be served."""
    if not _generates(model):
        raise ConfigError(f"model: a {type(model).__name__}; needs a causal PreTrainedModel")
    settings = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        raise ConfigError(f"model: encoder-decoder; its cache depends on two inputs; {SUPPORTED}")
    if settings is not model.config:
        raise ConfigError(
            f"model: {type(model).__name__} takes pictures or sound, which token ids do not "
            "identify; load its text model (…ForCausalLM)"
        )
    if "cache" not in inspect.signature(model.forward).parameters:
        raise ConfigError(f"model: forward takes no cache=, so no state comes out; {SUPPORTED}")
    if not model._supports_default_dynamic_cache():
        raise ConfigError(f"model: the library gives it a cache class of its own; {SUPPORTED}")
    rope = str(getattr(settings, "rope_parameters", None))
    for kind in GROWING_ROPE:
        if f"'{kind}'" in rope:
            raise ConfigError(
                f"model: rope of type {kind} rotates keys by the sequence's length at that time, "
                "so equal tokens have unequal KV; needs a fixed rope"
            )
    if model.generation_config.cache_implementation is not None:
        raise ConfigError(
            f"generation_config.cache_implementation: "
            f"{model.generation_config.cache_implementation!r}; needs None"
        )


def _generates(model: Any) -> bool:
    return isinstance(model, PreTrainedModel) and bool(model.can_generate())


def refuse_training(model: Any) -> None:
    """Raise `ConfigError` in training mode, where dropout makes KV that cannot be shared."""
    if model.training:
        raise ConfigError("model: in training mode; call model.eval() first")


def pool_layout(layout: CacheLayout) -> dict[str, Any]:
    """Return the fields of a `PoolConfig` that the model decides."""
    return {
        "page_bytes": layout.page_bytes,
        "image_bytes": layout.image_bytes,
        "page_tokens": layout.page_tokens,
        "end_logits": False,  # a cache object keeps no hidden tail
    }


def _whole(model: Any, tokens: Any) -> Logits:
    return run(model, tokens, fresh_cache(model)).cpu().numpy()


def _resumed(model: Any, layout: CacheLayout, tokens: Any) -> Logits:
    """Return the same logits through pages and an image: two tokens at once, then one."""
    images = -(-layout.image_bytes // layout.page_bytes)
    pages = -(-TOKENS // layout.page_tokens)
    config = PoolConfig(num_pages=pages + images + 1, lanes=2, **pool_layout(layout))
    space = Namespace(weights="trial", kv_dtype="trial")
    engine = TransformersEngine(model, config=config, layout=layout, namespace=space)
    table, image = list(range(pages)), list(range(pages, pages + images))
    engine.prefill(tokens[:CUT], lane=0, begin=0, table=table)
    if image:
        engine.save_image(0, image)
        engine.load_image(1, image)
    engine.prefill(tokens[CUT:-1], lane=1, begin=CUT, table=list(table))
    return engine.decode(int(tokens[-1]), lane=1, begin=TOKENS - 1, table=table)
