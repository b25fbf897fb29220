"""Plays a script on a scheduler and records the tokens that each request reused."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from ninfer_pool.demo.scenarios import Scenario, Script, ScriptedRequest
from ninfer_pool.runner import TINY, RequestOutput, Runner, Scheduler
from ninfer_pool.runner.chat import Chat

KV_BUDGET = "128MiB"
"""Room for all entries of a play, so that K alone causes evictions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The pool with K entries, or (None) one retained lane as engines have today."""

    entries: int | None

    @property
    def label(self) -> str:
        """Return the heading of a table's column."""
        return "today" if self.entries is None else f"K={self.entries}"


TODAY = Setting(entries=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedRequest:
    """One served request; ``first_token_ms`` counts from its submission."""

    label: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    reuse: str
    reason: str
    exact: bool
    first_token_ms: float

    def __str__(self) -> str:
        return f"{self.cached_tokens} of {self.prompt_tokens}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """A scenario played in one setting, on a pool that was empty before."""

    setting: Setting
    served: tuple[PlayedRequest, ...]

    @property
    def prompt_tokens(self) -> int:
        """Return the sum over the requests."""
        return sum(each.prompt_tokens for each in self.served)

    @property
    def cached_tokens(self) -> int:
        """Return the sum over the requests."""
        return sum(each.cached_tokens for each in self.served)

    @property
    def hit_rate(self) -> float:
        """Return the share of the prompt tokens that needed no prefill."""
        return self.cached_tokens / self.prompt_tokens

    @property
    def first_token_ms(self) -> float:
        """Return the median over the requests."""
        return median(each.first_token_ms for each in self.served)


class Stage:
    """The shipped model, loaded once; each play gets a scheduler and a pool of its own."""

    def __init__(self) -> None:
        self._loaded = Runner.from_pretrained(TINY, dtype="fp32", kv_budget=KV_BUDGET)
        self._chat = Chat(self._loaded.tokenizer)
        warm = self._loaded.prompt(list(range(3, 300)))
        self._loaded.generate(warm, max_tokens=4)  # the first call is slower

    @property
    def model(self) -> str:
        """Return a line on model, lane and pool."""
        room = str(self._loaded.capacity).partition(":")[0]
        return f"the shipped model in fp32 on the CPU, one lane, {room}"

    def play(self, script: Script, setting: Setting) -> Play:
        """Serve a script's requests, one after the other."""
        scheduler = self._scheduler(setting)
        served: list[PlayedRequest] = []
        request = next(script)
        while True:
            output = self._serve(scheduler, request, setting)
            served.append(_played(request, output))
            text = scheduler.runner.tokenizer.decode(output.tokens).strip()
            try:
                request = script.send(text)
            except StopIteration:
                return Play(setting=setting, served=tuple(served))

    def _scheduler(self, setting: Setting) -> Scheduler:
        today = setting.entries is None
        runner = Runner(
            self._loaded.model,
            num_pages=self._loaded.pool.config.num_pages,
            tokenizer=self._loaded.tokenizer,
            lanes=1,
            max_entries=setting.entries or 1,
            policy="lru" if today else "default",
        )
        return Scheduler(runner)

    def _serve(
        self, scheduler: Scheduler, request: ScriptedRequest, setting: Setting
    ) -> RequestOutput:
        rendered = self._chat.render(request.messages, tools=request.tools, enable_thinking=False)
        prompt = scheduler.runner.prompt(rendered.tokens, boundaries=rendered.boundaries)
        retain = request.retain or setting.entries is None  # each request overwrites a lane
        return scheduler.generate(prompt, max_tokens=request.max_tokens, retain=retain)


def _played(request: ScriptedRequest, output: RequestOutput) -> PlayedRequest:
    return PlayedRequest(
        label=request.label,
        prompt_tokens=output.prompt_tokens,
        cached_tokens=output.reused,
        output_tokens=len(output.tokens),
        reuse=output.reuse,
        reason=output.reason,
        exact=output.exact,
        first_token_ms=1000 * (output.queued_seconds + output.first_token_seconds),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioResult:
    """A scenario played in every setting: ``plays`` begin with today's and rise with K."""

    scenario: Scenario
    plays: tuple[Play, ...]

    @property
    def today(self) -> Play:
        """Return the play with one retained lane."""
        return self.plays[0]

    @property
    def pool(self) -> Play:
        """Return the play with the largest K."""
        return self.plays[-1]
