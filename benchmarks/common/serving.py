"""The cost of a runner's requests: restored or cold, with and without drafts, in N lanes."""

from __future__ import annotations

import random
import time
from collections import abc
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.ratios import Ratio, Timed, interleaved, ratio
from ninfer_pool import Prompt
from ninfer_pool.errors import ModelError
from ninfer_pool.kernels import PAGE_TOKENS
from ninfer_pool.runner import TINY as SHIPPED
from ninfer_pool.runner import Model, Runner, Sampling, Sequence, Tokenizer

OPENINGS = (
    "She walked to the window, and looked out upon the garden, where",
    "It was some time before either of them spoke; and when at last he did, his voice was low, and",
    '"You are very kind," replied Mrs. Dashwood, "but I cannot accept of it." Her daughter, who',
    "The party were to meet at the inn by ten o'clock, and the carriage being ordered, they",
)
"""Text to measure drafts on: of the kind that the model learnt, but no line of it."""
RESTORED, FASTER = 0.02, 1.0
"""Limits: restoring over a cold prefill; a token with drafts over one without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerScale:
    """How much is measured.

    Args:
        entry_tokens: length of the entry that is restored; turn_tokens: of the turn after it.
        prefill_tokens: lengths of prompts, compared with transformers.
        new_tokens: decoded by each request that decoding is measured on.
        lanes: counts of lanes; drafts: draft windows.
        repeats: of everything but images; image_repeats: of those.
        image_bytes: of images that are saved in turn; more than a processor's cache holds.
        copied_bytes, attended_tokens, attended_rows: on CUDA, of copies and of decode attention.
    """

    entry_tokens: int = 4_096
    turn_tokens: int = 64
    prefill_tokens: tuple[int, ...] = (512, 2_048)
    new_tokens: int = 64
    lanes: tuple[int, ...] = (1, 2, 4)
    drafts: tuple[int, ...] = (1, 2, 3)
    repeats: int = 8
    image_repeats: int = 40
    image_bytes: int = 64 << 20
    copied_bytes: int = 1 << 30
    attended_tokens: int = 16_384
    attended_rows: int = 8


DEFAULT = RunnerScale()
TINY = RunnerScale(
    entry_tokens=96, turn_tokens=8, prefill_tokens=(48,), new_tokens=4, lanes=(1, 2), drafts=(1,),
    repeats=2, image_repeats=2, image_bytes=1 << 20, copied_bytes=1 << 16, attended_tokens=100,
    attended_rows=2,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A loaded model, and how much to measure of it."""

    folder: Path
    model: Model
    tokenizer: Tokenizer
    scale: RunnerScale

    @classmethod
    def load(cls, scale: RunnerScale, folder: Path = SHIPPED, *, device: str = "cpu") -> Bench:
        """Load a folder: in fp32 on a CPU, in bf16 on CUDA.

        Raises:
            ModelError: a folder that cannot be run, or one without tokenizer.
        """
        on_cpu = torch.device(device).type == "cpu"
        model = Model.load(folder, device=device, dtype="fp32" if on_cpu else "bf16")
        tokenizer = Tokenizer.load(folder)
        if tokenizer is None:
            raise ModelError(
                f"tokenizer: none in {str(folder)!r}; needs a folder with tokenizer.json"
            )
        return cls(folder=folder, model=model, tokenizer=tokenizer, scale=scale)

    def synchronise(self) -> None:
        """Wait until the device has done its work."""
        synchronise(self.model.device)

    def runner(self, **options: Any) -> Runner:
        """Return a new runner of the model with room for the longest entry in every lane."""
        lanes = options.get("lanes", 1)
        longest = max(self.scale.entry_tokens, *self.scale.prefill_tokens)
        pages = (lanes + 2) * (longest // PAGE_TOKENS + 64)
        options = {"num_pages": pages, "tokenizer": self.tokenizer, **options}
        return Runner(self.model, **options)

    def tokens(self, count: int, *, seed: int = 0) -> list[int]:
        """Return token ids that depend on the seed alone."""
        source = random.Random(seed)
        return [source.randrange(3, self.model.config.vocab_size) for _ in range(count)]


def synchronise(device: torch.device) -> None:
    """Wait until a CUDA device has done its work; on a CPU a no-op."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def restore_rows(bench: Bench) -> list[Ratio]:
    """Compare an entry and the turn after it: restored and cold."""
    runner, size = bench.runner(), bench.scale.entry_tokens
    tokens = bench.tokens(size + bench.scale.turn_tokens)
    entry = runner.prompt(tokens[:size], boundaries=[(size, "turn")])
    turn = runner.prompt(tokens, boundaries=[(size, "turn"), (len(tokens), "turn")])
    retain(runner, entry)
    for prompt in (entry, turn):
        check_resumed(runner, prompt, at=size)
    shape, more = f"{size:,} tokens", f"{size:,} + {bench.scale.turn_tokens} tokens"
    taken = interleaved(
        {
            "restore": partial(restore, bench, runner, entry),
            "cold": partial(first_token, bench, runner, entry, read=False),
            "warm turn": partial(first_token, bench, runner, turn),
            "cold turn": partial(first_token, bench, runner, turn, read=False),
        },
        repeats=bench.scale.repeats,
    )
    return [
        ratio(
            "restore", shape, taken["restore"], taken["cold"],
            beside="cold prefill", at_most=RESTORED,
        ),
        ratio("first token", more, taken["warm turn"], taken["cold turn"], beside="cold"),
    ]  # fmt: skip


def retain(runner: Runner, prompt: Prompt) -> None:
    """Serve a prompt cold and retain it."""
    made = runner.generate(prompt, max_tokens=1, stop_tokens=())
    assert made.reused == 0, f"the entry was not made cold: {made.reused} tokens reused"
    assert made.key is not None, f"nothing was retained: {made.reason}"


def check_resumed(runner: Runner, prompt: Prompt, *, at: int) -> None:
    """Confirm that a prompt resumes exactly, with the tokens of a cold run."""
    asks = {"max_tokens": 4, "stop_tokens": (), "retain": False}
    warm = runner.generate(prompt, **asks)
    cold = runner.generate(prompt, read=False, **asks)
    if (warm.reused, warm.exact, cold.reused) != (at, True, 0):
        raise AssertionError(f"resumed {warm.reused} (exact: {warm.exact}), not {at} exactly")
    if warm.tokens != cold.tokens:
        raise AssertionError(f"the resumed run made {warm.tokens}, the cold one {cold.tokens}")


def started(runner: Runner, prompt: Prompt, **options: Any) -> Sequence:
    """Admit a request that retains nothing and ends by its length alone."""
    running = runner.start(prompt, stop_tokens=(), retain=False, **options)
    assert running is not None, f"no room: {runner.pool.last_refusal}"
    return running


def restore(bench: Bench, runner: Runner, prompt: Prompt, _: int) -> int:
    """Admit a request that resumes its whole prompt; return nanoseconds until it is ready."""
    begin = time.perf_counter_ns()
    running = started(runner, prompt, max_tokens=1)
    bench.synchronise()
    taken = time.perf_counter_ns() - begin
    runner.cancel(running)
    return taken


def first_token(bench: Bench, runner: Runner, prompt: Prompt, _: int, **options: Any) -> int:
    """Admit, prefill the rest of the prompt, sample; return nanoseconds."""
    begin = time.perf_counter_ns()
    running = started(runner, prompt, max_tokens=1, **options)
    while not running.ready:
        runner.prefill(running)
    bench.synchronise()
    taken = time.perf_counter_ns() - begin
    runner.cancel(running)
    return taken


@dataclass(slots=True, kw_only=True)
class Decoding:
    """Decodes openings in turn in a runner of its own, and counts drafts."""

    bench: Bench
    runner: Runner
    sampling: Sampling = field(default_factory=Sampling)
    requests: int = 1
    drafted: int = 0
    accepted: int = 0
    outputs: list[tuple[int, ...]] = field(default_factory=list)

    def __call__(self, number: int) -> int:
        """Decode requests in one batch; return nanoseconds per token after the first."""
        batch = [self._begin(number + each) for each in range(self.requests)]
        begin = time.perf_counter_ns()
        while any(each.finish is None for each in batch):
            self.runner.decode(batch)
        self.bench.synchronise()
        taken = time.perf_counter_ns() - begin
        for each in batch:
            self.runner.cancel(each)
            self.drafted += each.drafted
            self.accepted += each.accepted
            self.outputs.append(tuple(each.tokens))
        return taken // sum(len(each.tokens) - 1 for each in batch)

    def _begin(self, number: int) -> Sequence:
        tokens = self.bench.tokenizer.encode(OPENINGS[number % len(OPENINGS)])
        new = self.bench.scale.new_tokens + 1
        prompt = self.runner.prompt(tokens)
        running = started(self.runner, prompt, max_tokens=new, sampling=self.sampling)
        while not running.ready:
            self.runner.prefill(running)
        return running

    @property
    def kept(self) -> str:
        """The share of accepted drafts."""
        return f"{self.accepted / max(1, self.drafted):.0%} of drafts kept"


def draft_rows(bench: Bench) -> list[Ratio]:
    """Compare a token with N drafts per round with one without; greedy ones have a limit."""
    if bench.model.draft_head is None:
        return []
    rows = []
    for name, sampling in (("greedy", Sampling()), ("sampled", Sampling(temperature=1, seed=1))):
        decoding = {
            drafts: Decoding(
                bench=bench, runner=bench.runner(draft_tokens=drafts), sampling=sampling
            )
            for drafts in (0, *bench.scale.drafts)
        }
        named: dict[str, Timed] = {str(drafts): each for drafts, each in decoding.items()}
        taken = interleaved(named, repeats=bench.scale.repeats)
        rows += [
            ratio(
                "decode", f"{drafts} drafts, {name}", taken[str(drafts)], taken["0"],
                beside="no drafts", note=decoding[drafts].kept,
                at_most=FASTER if name == "greedy" else None,
            )
            for drafts in bench.scale.drafts
        ]  # fmt: skip
    return rows


def lane_rows(bench: Bench) -> list[Ratio]:
    """Compare a token of N requests, or of one, in N lanes with one request in one lane."""
    most = bench.scale.lanes[-1]
    decoding = {
        (lanes, requests): Decoding(
            bench=bench, runner=bench.runner(lanes=lanes), requests=requests
        )
        for lanes, requests in [(each, each) for each in bench.scale.lanes] + [(most, 1)]
    }
    named: dict[str, Timed] = {str(key): each for key, each in decoding.items()}
    taken = interleaved(named, repeats=bench.scale.repeats)
    check_same(
        *(each.outputs[: bench.scale.repeats] for (_, n), each in decoding.items() if n == 1)
    )
    rates = {key: 1e9 / sorted(times)[len(times) // 2] for key, times in taken.items()}
    return [
        ratio(
            "decode", f"{lanes} lanes, {requests} requests", taken[str((lanes, requests))],
            taken[str((1, 1))], beside="1 lane",
            note=f"{rates[str((lanes, requests))]:,.0f} tokens/s",
        )
        for lanes, requests in decoding
    ]  # fmt: skip


def check_same(*runs: abc.Sequence[tuple[int, ...]]) -> None:
    """Confirm that a request makes the same first token with any number of lanes."""
    # Batches of two sizes round differently, and a near-tie may part them: the first token alone.
    assert len({tuple(output[0] for output in run) for run in runs}) == 1, "lanes change the tokens"
