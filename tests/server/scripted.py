"""A model that says what a test wants: its sampler is told what to choose, all else is real."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ninfer_pool.runner import Sampling, Tokenizer
from ninfer_pool.runner.sampling import Sampler
from tests.server.world import Server, serve

SAMPLER = "ninfer_pool.runner.runner.Sampler"
"""What a `Voice` takes the place of."""


class Voice:
    """Makes the samplers of requests, which come one after the other.

    Each request takes the next text that was told; one for which nothing was told is left alone.
    """

    def __init__(self, tokenizer: Tokenizer, *, end: int) -> None:
        self._tokenizer = tokenizer
        self._end = end
        self._scripts: deque[list[int]] = deque()

    def says(self, *texts: str) -> None:
        """Let the next requests be answered so, each answer with its end."""
        self._scripts += ([*self._tokenizer.encode(text), self._end] for text in texts)

    def __call__(self, sampling: Sampling, **options: Any) -> Sampler:
        if not self._scripts:
            return Sampler(sampling, **options)
        return _Scripted(sampling, script=iter(self._scripts.popleft()), **options)


class _Scripted(Sampler):
    def __init__(self, sampling: Sampling, *, script: Iterator[int], **options: Any) -> None:
        super().__init__(sampling, **options)
        self._script = script

    def accept(self, logits: torch.Tensor, drafts: Sequence[int]) -> list[int]:
        """Take the drafts that agree with the script and one token more."""
        super().accept(logits, drafts)
        made: list[int] = []
        for draft in [*drafts, None]:
            made.append(next(self._script))
            if made[-1] != draft:
                break
        return made


@contextmanager
def serve_scripted(
    settings: dict[str, Any] | None = None, **options: Any
) -> Iterator[tuple[Server, Voice]]:
    """Run a server whose model can be told what to say; ``options`` as `serve` takes them."""
    with serve(settings, **options) as server, pytest.MonkeyPatch.context() as patch:
        (end,) = server.runner.model.config.eos_token_ids
        voice = Voice(server.runner.tokenizer, end=end)
        patch.setattr(SAMPLER, voice)
        yield server, voice
