"""The arguments of a pooled ``generate``; those that it cannot serve are rejected."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import GenerationConfig

from ninfer_pool.errors import PromptError

PASSED_ON = (
    "generation_config",
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "streamer",
    "tokenizer",
)
"""Arguments of the library's ``generate`` that are no fields of its `GenerationConfig`."""
ONE = ("num_beams", "num_return_sequences", "num_beam_groups")
"""Fields that must be 1 or unset: a lane holds one sequence."""
UNSET = {
    "cache_implementation": "the pool brings the cache",
    "prefill_chunk_size": "the pool cuts the prefill; see PooledModel's grid",
    "token_healing": "it changes the prompt",
    "prompt_lookup_num_tokens": "rejected drafts cannot be taken back out of a state",
    "assistant_early_exit": "rejected drafts cannot be taken back out of a state",
    "use_mtp": "rejected drafts cannot be taken back out of a state",
    "is_assistant": "rejected drafts cannot be taken back out of a state",
    "penalty_alpha": "it runs several continuations of one sequence",
    "dola_layers": "it brings a decoding loop of its own",
}
"""Fields that must be unset, and why."""
DEFAULT_NEW_TOKENS = 20
"""New tokens that the library generates by default."""


def prompt_tokens(model: Any, input_ids: Any, attention_mask: Any) -> npt.NDArray[np.int32]:
    """Return the ids of one sequence without padding, int32 (n,).

    Raises:
        PromptError: several sequences, none, padding, or something that is no tensor of ids.
    """
    if not isinstance(input_ids, torch.Tensor) or input_ids.is_floating_point():
        raise PromptError(f"input_ids: {type(input_ids).__name__}; needs an integer tensor (1, n)")
    shape = tuple(input_ids.shape)
    if len(shape) != 2 or shape[0] != 1 or shape[1] == 0:
        raise PromptError(f"input_ids: {shape}; needs (1, n), one sequence a call")
    if attention_mask is None:
        _check_padding(model, input_ids)
    elif tuple(attention_mask.shape) != shape or not bool((attention_mask == 1).all()):
        raise PromptError("attention_mask: not all ones (1, n); padding cannot be resumed")
    ids: npt.NDArray[np.int64] = input_ids[0].cpu().numpy()
    most = model.config.get_text_config(decoder=True).vocab_size
    if ids.min() < 0 or ids.max() >= most:
        raise PromptError(f"input_ids: up to {ids.max()}; needs ids of 0 to {most - 1}")
    return ids.astype(np.int32)


def _check_padding(model: Any, input_ids: Any) -> None:
    """Raise `PromptError` for tokens that the library would mask out as padding."""
    settings = model.generation_config
    pad, stop = settings.pad_token_id, settings.eos_token_id
    stops = stop if isinstance(stop, (list, tuple)) else [stop]
    if pad is not None and pad not in stops and bool((input_ids == pad).any()):
        raise PromptError(
            f"input_ids: holds the pad token {pad}, which the library would mask; give an "
            "attention_mask of ones if it is meant, or take the padding off"
        )


def check_options(model: Any, options: dict[str, Any]) -> None:
    """Check the options of a call.

    Raises:
        PromptError: names the argument and the reason.
    """
    fields = vars(GenerationConfig())  # type: ignore[no-untyped-call]
    for name in options:
        if name not in PASSED_ON and (name not in fields or name.startswith("_")):
            raise PromptError(
                f"{name}: not an argument of a pooled generate; needs a GenerationConfig field or "
                f"one of {', '.join(PASSED_ON)}. The pool identifies a prompt by token ids alone"
            )
    for name in ONE:
        value = option(model, options, name)
        if value not in (None, 1):
            raise PromptError(f"{name}: {value}; a lane holds one sequence")
    for name, reason in UNSET.items():
        value = option(model, options, name)
        if value:
            raise PromptError(f"{name}: {value!r}; needs None: {reason}")
    if option(model, options, "use_cache") is False:
        raise PromptError("use_cache: False; without a cache there is nothing to resume")


def option(model: Any, options: dict[str, Any], name: str) -> Any:
    """Return the value of a generation field: the caller's, else the configuration's."""
    if options.get(name) is not None:
        return options[name]
    given = options.get("generation_config")
    value = getattr(given, name, None) if given is not None else None
    return value if value is not None else getattr(model.generation_config, name, None)


def new_tokens(model: Any, options: dict[str, Any], *, prompt: int) -> int:
    """Return the most tokens that the library will generate after ``prompt`` tokens."""
    explicit = option(model, options, "max_new_tokens")
    if explicit is not None:
        return max(int(explicit), 0)
    length = option(model, options, "max_length")
    return max(int(length) - prompt, 0) if length is not None else DEFAULT_NEW_TOKENS
