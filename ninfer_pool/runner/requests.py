"""What can be said of a request before it runs: whether it ever could, and how much it may take."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ninfer_pool.core.prompt import Prompt
from ninfer_pool.errors import PromptError
from ninfer_pool.runner.running import NO_MEDIA, Media, check_media
from ninfer_pool.runner.stops import check_stop_strings

if TYPE_CHECKING:
    from ninfer_pool.runner.runner import Runner

MAX_TOKENS = 256
"""New tokens of a request that does not say how many."""
UNDECLARED = 5
"""Images beyond one a boundary: one resumed, a junction's, two before the end, the frontier's."""


def check_request(
    runner: Runner,
    prompt: Prompt,
    *,
    max_tokens: int = MAX_TOKENS,
    stop_strings: Sequence[str] = (),
    media: Media = NO_MEDIA,
    **_: Any,
) -> None:
    """Say no to what could never run; takes what `Runner.start` takes.

    Raises:
        PromptError: names what cannot be, with the sizes.
    """
    field = runner.namespace.first_difference(dataclasses.replace(prompt.namespace, salt=None))
    if field is not None:
        raise PromptError(
            f"namespace.{field}: {getattr(prompt.namespace, field)!r}; this runner's is "
            f"{getattr(runner.namespace, field)!r}"
        )
    if type(max_tokens) is not int or max_tokens < 1:
        raise PromptError(f"max_tokens: {max_tokens!r}; needs an int of 1 or more")
    wanted = f"tokens: {len(prompt)} and max_tokens {max_tokens}"
    if len(prompt) + max_tokens > runner.max_context:
        raise PromptError(f"{wanted}; the context is {runner.max_context}")
    largest, vocabulary = int(prompt.tokens.max()), runner.model.config.vocab_size
    if largest >= vocabulary:
        raise PromptError(f"tokens: id {largest}; needs ids below {vocabulary}")
    pages, slab = _kv_pages(runner, prompt, max_tokens), runner.pool.config.num_pages
    if pages > slab:
        raise PromptError(f"{wanted} take {pages} pages; the slab has {slab}")
    check_stop_strings(stop_strings)
    config = runner.model.config
    check_media(prompt, media, hidden=config.hidden_size, dtype=runner.model.dtype)


def needed_pages(
    runner: Runner, prompt: Prompt, *, max_tokens: int = MAX_TOKENS, **_: Any
) -> tuple[int, int]:
    """Return the least and the most pages without which a request cannot run.

    All of its prompt may be resumed, or nothing. Images are taken only where there is room.
    """
    whole = _kv_pages(runner, prompt, max_tokens)
    return whole - len(prompt) // runner.pool.config.page_tokens, whole


def most_pages(runner: Runner, prompt: Prompt, *, max_tokens: int = MAX_TOKENS, **_: Any) -> int:
    """Return the most pages that a request could hold: its KV, every image, and what it resumes."""
    images = len(prompt.boundaries) + UNDECLARED
    whole = _kv_pages(runner, prompt, max_tokens) + images * runner.pool.config.image_pages
    return whole + 1  # the partly filled page that a fork copies


def _kv_pages(runner: Runner, prompt: Prompt, max_tokens: int) -> int:
    tokens = len(prompt) + max_tokens + runner.executor.draft_tokens
    return -(-tokens // runner.pool.config.page_tokens)
