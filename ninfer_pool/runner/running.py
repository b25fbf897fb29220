"""One request in a lane: where it stands, what it has made, and why it ended."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import xxhash

from ninfer_pool.core.lease import Lease
from ninfer_pool.core.planner import Chunk
from ninfer_pool.core.prompt import Prompt, payload_fields
from ninfer_pool.errors import PromptError
from ninfer_pool.runner.model import EmbeddingSpan
from ninfer_pool.runner.sampling import Sampler
from ninfer_pool.runner.stops import StopStrings


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """What a prompt carries beside tokens: embeddings for each of its media spans, in order.

    ``positions`` int64 (3, n) are the rotary axes of the whole prompt; None: 0, 1, 2, … on each.
    """

    embeddings: Sequence[torch.Tensor] = ()
    positions: torch.Tensor | None = None


NO_MEDIA = Media()


def media_digest(embeddings: torch.Tensor) -> str:
    """Return the digest that a media span of these embeddings must declare: dtype, shape, bytes."""
    raw = embeddings.contiguous().cpu().view(torch.uint8).numpy()
    head = f"{embeddings.dtype} {tuple(embeddings.shape)} ".encode()
    return "xxh3:" + xxhash.xxh3_128_hexdigest(head + raw.tobytes())


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What came of one request.

    ``tokens`` are the new ones; ``finish`` is ``stop``, ``length``, ``cancelled`` or, of an
    engine that has no room for it, ``refused``. ``reused``
    of the ``prompt_tokens`` were resumed by the path ``reuse`` (see `Lease.reuse`), ``exact``
    as a cold run's bits; ``reason`` explains. ``key`` names what was retained, or is None.
    ``drafted`` tokens were proposed and ``accepted`` of them kept. Seconds are of this process.
    """

    tokens: tuple[int, ...]
    finish: str
    prompt_tokens: int
    reused: int
    reuse: str
    exact: bool
    reason: str
    key: str | None
    drafted: int
    accepted: int
    first_token_seconds: float
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """New tokens a second after the first."""
        spent = self.seconds - self.first_token_seconds
        return (len(self.tokens) - 1) / spent if spent > 0 else 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class Running:
    """A request that holds a lane; made by `Runner.start`."""

    lease: Lease
    prompt: Prompt
    sampler: Sampler
    max_tokens: int
    stop_tokens: Collection[int]
    stop_strings: StopStrings | None
    media: Media
    table: torch.Tensor
    chunks: Iterator[Chunk]
    axes: int
    """What is added to a generated token's position to give its rotary one."""
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    ready: bool = False
    """The prompt is prefilled and the first token sampled: decode rounds may begin."""
    drafted: int = 0
    accepted: int = 0
    begun: float = field(default_factory=time.perf_counter)
    first: float = 0.0
    ended: float = 0.0

    @property
    def lane(self) -> int:
        """The lane that it runs in."""
        return self.lease.lane

    def emit(self, new: Sequence[int]) -> None:
        """Take new tokens; the request ends at a stop token or at its last token."""
        if not self.tokens:
            self.first = time.perf_counter()
        self.tokens += new
        self.sampler.note(new)
        if self.tokens[-1] in self.stop_tokens or self._spelled():
            self.finish = "stop"
        elif len(self.tokens) >= self.max_tokens:
            self.finish = "length"

    def upto(self, new: Sequence[int]) -> int:
        """Return how many of a round's new tokens to take: up to what stops it or the last."""
        room = self.max_tokens - len(self.tokens)
        for count, token in enumerate(new[:room], start=1):
            if token in self.stop_tokens or self._spelled(new[:count]):
                return count
        return min(len(new), room)

    def _spelled(self, new: Sequence[int] = ()) -> bool:
        """Say whether ``new`` tokens complete a stop string."""
        return self.stop_strings is not None and self.stop_strings.end(self.tokens, new)

    def result(self) -> Generation:
        """Return what came of it; its lease has ended."""
        lease = self.lease
        first = self.first or self.ended
        return Generation(
            tokens=tuple(self.tokens),
            finish=self.finish or "cancelled",
            prompt_tokens=len(self.prompt),
            reused=lease.start,
            reuse=lease.reuse,
            exact=lease.exact,
            reason=lease.reason,
            key=lease.key,
            drafted=self.drafted,
            accepted=self.accepted,
            first_token_seconds=first - self.begun,
            seconds=self.ended - self.begun,
        )


def check_media(prompt: Prompt, media: Media, *, hidden: int, dtype: torch.dtype) -> None:
    """Say no to embeddings that are not those that the prompt's media spans declare.

    Raises:
        PromptError: another number of them, another shape, dtype or digest, or positions of
            another shape or other than those that the prompt is known by.
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
    """Return what tells a prompt's rotary axes apart from others: see `Prompt.attributes`."""
    fields = ((at, payload_fields(payload)) for at, payload in prompt.attributes)
    found = [(at, each.get(ord("P")), each.get(ord("Q"))) for at, each in fields]
    return [item for item in found if item[1:] != (None, None)]


def spans_in(prompt: Prompt, media: Media, chunk: Chunk) -> list[EmbeddingSpan]:
    """Return what of the media lies in a chunk, in rows of the chunk."""
    spans: list[EmbeddingSpan] = []
    for span, embeddings in zip(prompt.media, media.embeddings, strict=True):
        begin, end = max(span.begin, chunk.begin), min(span.end, chunk.end)
        if begin < end:
            rows = embeddings[begin - span.begin : end - span.begin]
            spans.append((begin - chunk.begin, end - chunk.begin, rows))
    return spans


def rotary_positions(media: Media, begin: int, end: int) -> torch.Tensor:
    """Return the rotary positions int64 (3, end - begin) of the prompt's tokens there."""
    if media.positions is not None:
        return media.positions[:, begin:end]
    return torch.arange(begin, end).expand(3, -1)


def rotary_offset(prompt: Prompt, media: Media) -> int:
    """Return what is added to a generated token's position: it goes on after the largest axis."""
    return 0 if media.positions is None else int(media.positions.max()) + 1 - len(prompt)


def token_tensor(prompt: Prompt, chunk: Chunk, device: torch.device) -> torch.Tensor:
    """Return a chunk's tokens as int64 on the device."""
    ids = np.frombuffer(prompt.buffer[4 * chunk.begin : 4 * chunk.end], dtype=np.int32)
    return torch.from_numpy(ids.astype(np.int64)).to(device)
