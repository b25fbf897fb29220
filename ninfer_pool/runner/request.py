"""One request: checked when it is made, a sequence while it has a lane, and its output."""

from __future__ import annotations

import dataclasses
import time
from collections import abc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from queue import Empty, SimpleQueue
from threading import Event
from typing import Any

import torch

from ninfer_pool.core.identity import Namespace
from ninfer_pool.core.lease import Lease
from ninfer_pool.core.planner import Chunk
from ninfer_pool.core.prompt import Prompt
from ninfer_pool.core.results import Refusal
from ninfer_pool.errors import PromptError
from ninfer_pool.runner.media import NO_MEDIA, Media, check_media
from ninfer_pool.runner.sampling import Sampler, Sampling
from ninfer_pool.runner.stops import StopStrings
from ninfer_pool.runner.tokenizer import Tokenizer

GREEDY = Sampling()
MAX_TOKENS = 256
"""New tokens of a request without a limit of its own."""
UNDECLARED = 5
"""Images beyond one per boundary: one resumed, a junction's, two before the end, the frontier's."""
_IDENTITY = [each.name for each in dataclasses.fields(Namespace) if each.compare]


class ContextError(PromptError):
    """A prompt and its new tokens are longer than the model's context."""

    def __init__(self, *, prompt_tokens: int, max_tokens: int, context: int) -> None:
        wanted = f"tokens: {prompt_tokens} and max_tokens {max_tokens}"
        super().__init__(f"{wanted}; the context is {context}")
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.context = context


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The bounds of a runner's requests."""

    namespace: Namespace
    context: int
    vocabulary: int
    pages: int
    page_tokens: int
    image_pages: int
    draft_tokens: int
    hidden: int
    dtype: torch.dtype
    stop_tokens: Collection[int]
    """Ids that end a request without ids of its own."""
    tokenizer: Tokenizer | None = None

    def kv_pages(self, tokens: int) -> int:
        """Return the pages of a prompt and its new tokens, drafts included."""
        return -(-(tokens + self.draft_tokens) // self.page_tokens)


def check_request(limits: Limits, prompt: Prompt, *, max_tokens: int, media: Media) -> None:
    """Reject a request that could never run.

    Raises:
        PromptError: names the field, with the sizes.
    """
    for field_name in _IDENTITY:
        own, wanted = getattr(prompt.namespace, field_name), getattr(limits.namespace, field_name)
        if own != wanted and field_name != "salt":
            raise PromptError(f"namespace.{field_name}: {own!r}; this runner's is {wanted!r}")
    if type(max_tokens) is not int or max_tokens < 1:
        raise PromptError(f"max_tokens: {max_tokens!r}; needs an int of 1 or more")
    tokens = prompt.tokens
    total = len(tokens) + max_tokens
    if total > limits.context:
        raise ContextError(prompt_tokens=len(tokens), max_tokens=max_tokens, context=limits.context)
    largest = int(tokens.max())
    if largest >= limits.vocabulary:
        raise PromptError(f"tokens: id {largest}; needs ids below {limits.vocabulary}")
    pages = limits.kv_pages(total)
    if pages > limits.pages:
        wanted = f"tokens: {len(tokens)} and max_tokens {max_tokens}"
        raise PromptError(f"{wanted} take {pages} pages; the slab has {limits.pages}")
    if prompt.attributes or media is not NO_MEDIA:
        check_media(prompt, media, hidden=limits.hidden, dtype=limits.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The result of one request.

    ``tokens`` are the new ones. ``finish`` is ``stop``, ``length``, ``cancelled``, or
    ``refused``: nothing ran and there was still no room. ``reused`` of the ``prompt_tokens`` were
    resumed by the path ``reuse`` (see `Lease.reuse`), ``exact`` with the bits of a cold run;
    ``reason`` explains. ``key`` names the retained entry, or is None. ``drafted`` tokens were
    proposed and ``accepted`` of them kept. ``lane`` is None where it never had one. Seconds count
    from admission; ``queued_seconds`` are those before.
    """

    tokens: tuple[int, ...] = ()
    finish: str
    prompt_tokens: int
    reused: int = 0
    reuse: str = "full_reset"
    exact: bool = True
    reason: str = "no_room"
    key: str | None = None
    drafted: int = 0
    accepted: int = 0
    first_token_seconds: float = 0.0
    seconds: float = 0.0
    queued_seconds: float = 0.0
    lane: int | None = None
    retained: int = 0
    """The position of the deepest checkpoint that it left; 0: none."""
    tier: str | None = None
    """The tier of its resumed prefix at arrival; None: it resumed nothing."""

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second after the first."""
        spent = self.seconds - self.first_token_seconds
        return (len(self.tokens) - 1) / spent if spent > 0 else 0.0


def _ignore() -> None:
    """No-op."""


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A checked request; made by `Scheduler.submit` or `Runner.request`.

    Its owner iterates it once for its new tokens; `result` waits for the end; `cancel` requests
    an early one. Any thread may do so. An owner that must not wait passes ``notify``, which the
    scheduler's thread calls at admission, with new tokens, and at the end; `take` then returns
    the tokens so far.
    """

    prompt: Prompt
    limits: Limits
    sampling: Sampling = GREEDY
    max_tokens: int = MAX_TOKENS
    stop_tokens: Collection[int] = ()
    stop_strings: StopStrings | None = None
    media: Media = NO_MEDIA
    pool_options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `PrefixPool.acquire`."""
    notify: Callable[[], None] = _ignore
    hint: str | None = None
    """Requests of one hint prefer one lane."""
    sequence: Sequence | None = None
    """Itself in a lane, once it was admitted."""
    submitted: float = field(default_factory=time.perf_counter)
    admitted: float = inf
    cancelled: bool = False
    refusal: Refusal | None = None
    """The reason of a refusal."""
    pending: bool = False
    """It waits for a sibling's prefill, and was not refused."""
    fetching: bool | None = None
    """Its prefix is being read from disk; None: not requested yet."""
    fetched: bool = False
    """Its prefix was on disk at arrival, and was promoted while it waited."""
    _given: int = 0
    _tokens: SimpleQueue[int | None] = field(default_factory=SimpleQueue)
    _ended: Event = field(default_factory=Event)
    _output: RequestOutput | BaseException | None = None

    @property
    def kv_pages(self) -> int:
        """Pages of its prompt and its new tokens."""
        return self.limits.kv_pages(len(self.prompt) + self.max_tokens)

    @property
    def needed_pages(self) -> tuple[int, int]:
        """The least and the most pages without which it cannot run.

        All of its prompt may be resumed, or nothing. Images are taken only where there is room.
        """
        whole = self.kv_pages
        return whole - len(self.prompt) // self.limits.page_tokens, whole

    @property
    def most_pages(self) -> int:
        """The most pages that it could hold: its KV, every image, and its resumed prefix."""
        images = len(self.prompt.boundaries) + UNDECLARED
        # One more: the partly filled page that a fork copies.
        return self.kv_pages + images * self.limits.image_pages + 1

    def __iter__(self) -> Iterator[int]:
        """Yield new tokens as they are made.

        Raises:
            Exception: the error that ended the request, if any.
        """
        while (token := self._tokens.get()) is not None:
            yield token
        self._tokens.put(None)
        self.result()

    def take(self) -> list[int]:
        """Return the new tokens since the last time, without waiting."""
        taken: list[int] = []
        with suppress(Empty):
            while (token := self._tokens.get_nowait()) is not None:
                taken.append(token)
            self._tokens.put(None)  # `__iter__` finds the end, too
        return taken

    def result(self, *, timeout: float | None = None) -> RequestOutput:
        """Wait for the end.

        Raises:
            TimeoutError: it has not ended in time.
            Exception: the error that ended the request, if any.
        """
        if not self._ended.wait(timeout):
            raise TimeoutError(f"result: not there after {timeout} seconds")
        if isinstance(self._output, BaseException):
            raise self._output
        assert self._output is not None
        return self._output

    @property
    def ended(self) -> bool:
        """True once it is finished, cancelled, refused or failed."""
        return self._ended.is_set()

    def cancel(self) -> None:
        """Request the end; the scheduler obeys before its next step."""
        self.cancelled = True

    # -- for the scheduler -----------------------------------------------------------------

    def begin(self, sequence: Sequence) -> None:
        """Record the admission."""
        self.sequence = sequence
        self.admitted = time.perf_counter()
        self.notify()

    def push(self) -> None:
        """Pass the sequence's new tokens to the owner."""
        assert self.sequence is not None
        new = self.sequence.tokens[self._given :]
        for token in new:
            self._tokens.put(token)
        self._given += len(new)
        if new:
            self.notify()

    def end(self, finish: str | BaseException) -> None:
        """Record the end: by itself, else by ``finish``, a word or the error."""
        self._output = finish if isinstance(finish, BaseException) else self.output(finish)
        self._tokens.put(None)
        self._ended.set()
        self.notify()

    def output(self, finish: str) -> RequestOutput:
        """Return its output; ``finish`` where its sequence did not finish by itself."""
        queued = min(self.admitted, time.perf_counter()) - self.submitted
        if self.sequence is None:
            prompt_tokens = len(self.prompt)
            return RequestOutput(finish=finish, prompt_tokens=prompt_tokens, queued_seconds=queued)
        return self.sequence.output(finish, queued_seconds=queued)


def make_request(
    limits: Limits,
    prompt: Prompt,
    *,
    sampling: Sampling = GREEDY,
    max_tokens: int = MAX_TOKENS,
    stop_tokens: Collection[int] | None = None,
    stop_strings: Iterable[str] = (),
    media: Media = NO_MEDIA,
    hint: str | None = None,
    **pool_options: Any,
) -> Request:
    """Check a request.

    Args:
        stop_tokens: ids that end it; None: the model's own.
        stop_strings: texts that end it once its new text contains one; needs a tokenizer.
        hint: requests of one hint prefer one lane; see `Scheduler`.
        pool_options: as `PrefixPool.acquire` takes them.

    Raises:
        PromptError: as `check_request` and `StopStrings`.
    """
    check_request(limits, prompt, max_tokens=max_tokens, media=media)
    stops = stop_strings not in ((), [])
    return Request(
        prompt=prompt,
        limits=limits,
        sampling=sampling,
        max_tokens=max_tokens,
        stop_tokens=limits.stop_tokens if stop_tokens is None else stop_tokens,
        stop_strings=StopStrings(limits.tokenizer, stop_strings) if stops else None,
        media=media,
        hint=hint,
        pool_options=pool_options,
    )


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """A request that holds a lane; made by `Runner.admit`."""

    request: Request
    lease: Lease
    sampler: Sampler
    table: torch.Tensor
    chunks: Iterator[Chunk]
    axes: int
    """Added to a generated token's position for its rotary one."""
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

    @property
    def stop_tokens(self) -> Collection[int]:
        """Ids that end it."""
        return self.request.stop_tokens

    @property
    def tier(self) -> str | None:
        """The tier of its resumed prefix at arrival; None: it resumed nothing."""
        if not self.lease.start:
            return None
        tier = self.lease.explanation.tier or "device"
        return "disk" if self.request.fetched and tier == "host" else tier

    def emit(self, new: abc.Sequence[int]) -> None:
        """Append new tokens; a stop token or its last token ends it."""
        if not self.tokens:
            self.first = time.perf_counter()
        self.tokens += new
        self.sampler.note(new)
        if self.tokens[-1] in self.stop_tokens or self._spelled():
            self.finish = "stop"
        elif len(self.tokens) >= self.request.max_tokens:
            self.finish = "length"

    def upto(self, new: abc.Sequence[int]) -> int:
        """Return how many of a round's new tokens to take: up to a stop, or to the last."""
        room = self.request.max_tokens - len(self.tokens)
        for count, token in enumerate(new[:room], start=1):
            if token in self.stop_tokens or self._spelled(new[:count]):
                return count
        return min(len(new), room)

    def _spelled(self, new: abc.Sequence[int] = ()) -> bool:
        """Return whether ``new`` tokens complete a stop string."""
        strings = self.request.stop_strings
        return strings is not None and strings.completed(self.tokens, new)

    def output(self, finish: str = "cancelled", *, queued_seconds: float = 0.0) -> RequestOutput:
        """Return its output, once its lease has ended; see `Request.output`."""
        lease = self.lease
        return RequestOutput(
            tokens=tuple(self.tokens),
            finish=self.finish or finish,
            prompt_tokens=len(self.request.prompt),
            reused=lease.start,
            reuse=lease.reuse,
            exact=lease.exact,
            reason=lease.reason,
            key=lease.key,
            drafted=self.drafted,
            accepted=self.accepted,
            first_token_seconds=(self.first or self.ended) - self.begun,
            seconds=self.ended - self.begun,
            queued_seconds=queued_seconds,
            lane=lease.lane,
            retained=lease.retained,
            tier=self.tier,
        )
