"""Runs requests through a runner and keeps every logit, to be compared with a cold run's."""

from __future__ import annotations

import random
from collections import abc
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ninfer_pool.core.planner import Chunk
from ninfer_pool.runner.model import Model
from ninfer_pool.runner.request import RequestOutput, Sequence
from ninfer_pool.runner.runner import Runner

Boundaries = list[tuple[int, str]]


class Recorder:
    """A sampler that also keeps the logits that every kept token was chosen from."""

    def __init__(self, running: Sequence) -> None:
        self._inner = running.sampler
        self._running = running
        self.rows: list[torch.Tensor] = []

    def draft(self, logits: torch.Tensor, before: abc.Sequence[int]) -> int:
        return self._inner.draft(logits, before)

    def accept(self, logits: torch.Tensor, drafts: abc.Sequence[int]) -> list[int]:
        new = self._inner.accept(logits, drafts)
        self.rows += logits[: self._running.upto(new)].clone().unbind()
        return new

    def note(self, tokens: abc.Sequence[int]) -> None:
        self._inner.note(tokens)


@dataclass
class Seen:
    """One request's logits: of its prompt's positions from ``start``, and of its new tokens."""

    generation: RequestOutput
    start: int
    prompt: torch.Tensor
    new: torch.Tensor


def make(
    model: Model, *, num_pages: int = 160, shuffle: int | None = None, **options: Any
) -> Runner:
    """A runner of a random model, its pages poisoned and, by a seed, in another order."""
    runner = Runner(model, num_pages=num_pages, **{"kv_dtype": "fp32", "grid": 64, **options})
    if shuffle is not None:
        ledger = runner.pool.state.ledger
        np.random.default_rng(shuffle).shuffle(ledger._free)
    poison(runner)
    return runner


def poison(runner: Runner) -> None:
    """Fill every page that nothing counts on with bytes that are NaN in every float dtype."""
    free = runner.pool.state.ledger.free_pages().tolist()
    runner.slab.pages[runner.slab.ids(free)] = 0xFF


@dataclass
class Script:
    """A conversation: prompts of growing length with their boundaries, as a server makes them."""

    seed: int
    vocab: int
    tokens: list[int] = field(default_factory=list)
    boundaries: Boundaries = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._add(self._random.randint(20, 150), "system")

    def _add(self, count: int, kind: str) -> None:
        self.tokens += [self._random.randrange(1, self.vocab) for _ in range(count)]
        self.boundaries.append((len(self.tokens), kind))

    def ask(self) -> tuple[list[int], Boundaries]:
        """Add a user's turn; return the prompt and all boundaries so far."""
        self._add(self._random.randint(3, 90), "turn")
        return list(self.tokens), list(self.boundaries)

    def answer(self, tokens: abc.Sequence[int]) -> None:
        """Add what the model said."""
        self.tokens += tokens


def begin(
    runner: Runner, tokens: abc.Sequence[int], boundaries: Boundaries, **options: Any
) -> tuple[Sequence, Recorder]:
    """Admit a request and record its logits."""
    prompt = runner.prompt(tokens, boundaries=boundaries)
    running = runner.start(prompt, stop_tokens=(), **options)
    assert running is not None, runner.pool.last_refusal
    recorder = Recorder(running)
    running.sampler = recorder  # type: ignore[assignment]
    return running, recorder


def serve(
    runner: Runner,
    tokens: abc.Sequence[int],
    boundaries: Boundaries,
    *,
    steps: int = 64,
    beside: abc.Sequence[Sequence] = (),
    **options: Any,
) -> Seen:
    """Run one request for ``steps`` greedy tokens, others decoding beside it; commit it."""
    running, recorder = begin(runner, tokens, boundaries, max_tokens=steps, **options)
    logits: list[torch.Tensor] = []

    def look(_: Chunk, hidden: torch.Tensor) -> None:
        logits.append(runner.model.logits(hidden))

    while not running.ready:
        runner.prefill(running, look=look)
        runner.decode(beside)
    while running.finish is None:
        runner.decode([running, *beside])
    runner.finish(running)
    poison(runner)
    runner.pool.check()
    start = running.lease.start
    width = runner.model.config.vocab_size
    prompt = torch.cat(logits) if logits else torch.empty(0, width)
    assert len(prompt) == len(tokens) - start
    return Seen(running.output(), start, prompt, torch.stack(recorder.rows))


def assert_same_bits(warm: Seen, cold: Seen) -> None:
    """Every logit of the resumed run is the cold run's, bit for bit; none is NaN."""
    assert cold.start == 0
    assert not torch.isnan(warm.new).any()
    assert torch.equal(warm.prompt, cold.prompt[warm.start :])
    assert torch.equal(warm.new, cold.new)
    assert warm.generation.tokens == cold.generation.tokens


def error_of(one: torch.Tensor, other: torch.Tensor) -> float:
    """RMS of the difference over RMS of the second."""
    return float((one - other).pow(2).mean().sqrt() / other.pow(2).mean().sqrt())


def assert_near(one: Seen, other: Seen, *, bound: float) -> None:
    """Logits within ``bound``; greedy tokens equal but where two logits were all but equal.

    After a token that differs the two runs say other things, so nothing later is compared.
    """
    begin = max(one.start, other.start)
    if begin < one.start + len(one.prompt):
        mine, theirs = one.prompt[begin - one.start :], other.prompt[begin - other.start :]
        assert error_of(mine, theirs) <= bound
    pairs = zip(one.generation.tokens, other.generation.tokens, strict=True)
    parting = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    upto = len(one.new) if parting is None else parting + 1
    assert error_of(one.new[:upto], other.new[:upto]) <= bound
    if parting is not None:
        moved = (one.new[parting] - other.new[parting]).abs().max()
        best = other.new[parting].topk(2).values
        assert best[0] - best[1] <= 2 * moved, "a token changed that was no near-tie"
