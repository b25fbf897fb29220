"""Media of a prompt: embeddings for its media spans, and rotary positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from ninfer_pool.core.planner import Chunk
from ninfer_pool.core.prompt import Prompt, payload_fields
from ninfer_pool.errors import PromptError
from ninfer_pool.runner.model import EmbeddingSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """What a prompt carries next to tokens: embeddings for each of its media spans, in order.

    ``positions`` int64 (3, n) are the rotary axes of the whole prompt; None: 0, 1, 2, … on each.
    """

    embeddings: Sequence[torch.Tensor] = ()
    positions: torch.Tensor | None = None

    def span_rows(self, prompt: Prompt, chunk: Chunk) -> list[EmbeddingSpan]:
        """Return the embeddings within a chunk of the prompt, located by the chunk's rows."""
        spans: list[EmbeddingSpan] = []
        for span, embeddings in zip(prompt.media, self.embeddings, strict=True):
            begin, end = max(span.begin, chunk.begin), min(span.end, chunk.end)
            if begin < end:
                rows = embeddings[begin - span.begin : end - span.begin]
                spans.append((begin - chunk.begin, end - chunk.begin, rows))
        return spans

    def rotary_positions(self, begin: int, end: int) -> torch.Tensor:
        """Return the rotary positions int64 (3, end - begin) of the prompt's tokens there."""
        if self.positions is not None:
            return self.positions[:, begin:end]
        return torch.arange(begin, end).expand(3, -1)

    def rotary_offset(self, prompt: Prompt) -> int:
        """Return the offset of generated tokens: their axes continue after the largest one."""
        return 0 if self.positions is None else int(self.positions.max()) + 1 - len(prompt)


NO_MEDIA = Media()


def media_digest(embeddings: torch.Tensor) -> str:
    """Return the digest that a media span of these embeddings must declare: dtype, shape, bytes."""
    raw = embeddings.contiguous().cpu().view(torch.uint8).numpy()
    head = f"{embeddings.dtype} {tuple(embeddings.shape)} ".encode()
    return "xxh3:" + xxhash.xxh3_128_hexdigest(head + raw.tobytes())


def check_media(prompt: Prompt, media: Media, *, hidden: int, dtype: torch.dtype) -> None:
    """Reject embeddings other than those that the prompt's media spans declare.

    Raises:
        PromptError: another number of them, another shape, dtype or digest, or positions of
            another shape or other than those of the prompt.
    """
    if len(media.embeddings) != len(prompt.media):
        raise PromptError(
            f"media: {len(media.embeddings)} embeddings; the prompt has {len(prompt.media)} spans"
        )
    for index, (span, embeddings) in enumerate(zip(prompt.media, media.embeddings, strict=True)):
        shape, needed = tuple(embeddings.shape), (span.end - span.begin, hidden)
        if shape != needed or embeddings.dtype != dtype:
            found = f"media[{index}]: embeddings {shape} of {embeddings.dtype}"
            raise PromptError(f"{found}; needs {needed} of {dtype}")
        digest = media_digest(embeddings)
        if span.digest is not None and span.digest != digest:
            raise PromptError(
                f"media[{index}].digest: {span.digest!r}; its embeddings have {digest!r}"
            )
    positions = media.positions
    if positions is not None and tuple(positions.shape) != (3, len(prompt)):
        raise PromptError(
            f"positions: {tuple(positions.shape)}; needs (3, {len(prompt)}), one for each token"
        )
    axes = None if positions is None else positions.cpu().numpy().astype(np.int32)
    used = Prompt(prompt.tokens, namespace=prompt.namespace, media=prompt.media, positions=axes)
    if _axes_of(used) != _axes_of(prompt):
        raise PromptError("positions: other than the prompt's own; needs the same in both")


def _axes_of(prompt: Prompt) -> list[tuple[int, bytes | None, bytes | None]]:
    """Return the rotary axes among a prompt's attributes: see `Prompt.attributes`."""
    fields = ((at, payload_fields(payload)) for at, payload in prompt.attributes)
    found = [(at, each.get(ord("P")), each.get(ord("Q"))) for at, each in fields]
    return [item for item in found if item[1:] != (None, None)]
