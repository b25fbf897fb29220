"""The runs of one trace: policies swept over K and bytes, and the bounds to compare them with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ninfer_pool.core.policy.classical import Lru
from ninfer_pool.sim.clairvoyant import MODES, Clairvoyant, Mode
from ninfer_pool.sim.replay import Replay
from ninfer_pool.sim.setup import RunOutcome, RunPlan, Setup, pool_config
from ninfer_pool.sim.single_lane import run_single_lane
from ninfer_pool.sim.tokens import TokenSource
from ninfer_pool.sim.trace import Trace

OnProgress = Callable[[str, int, int], None]
PROGRESS_REQUESTS = 32


class Simulator:
    """A trace on one machine; ``on_progress`` gets (policy, requests done, requests in all)."""

    def __init__(self, trace: Trace, setup: Setup, on_progress: OnProgress | None = None) -> None:
        self.trace = trace
        self.setup = setup
        self._source = TokenSource(trace)
        self._on_progress = on_progress

    def sweep(
        self, *, policies: Sequence[str], entries: Sequence[int], budgets: Sequence[int]
    ) -> Iterator[RunOutcome]:
        """Yield every run of the trace: online policies first, then the bounds."""
        online: list[RunOutcome] = []
        for plan in plans(policies, entries, budgets):
            online.append(self.run(plan))
            yield online[-1]
        yield from self.bounds(online, entries, budgets)

    def run(self, plan: RunPlan) -> RunOutcome:
        """Replay the whole trace under one plan."""
        replay = Replay(self.trace, self._source, self.setup, plan)
        total = len(self.trace.requests)

        def on_step(done: int) -> None:
            if self._on_progress is not None and done % PROGRESS_REQUESTS == 0:
                self._on_progress(plan.policy, done, total)

        replay.run(on_step)
        return replay.outcome()

    def bounds(
        self, online: Sequence[RunOutcome], entries: Sequence[int], budgets: Sequence[int]
    ) -> Iterator[RunOutcome]:
        """Yield the bounds' runs: ``single_lane`` and ``endless`` once, then ``clairvoyant``.

        ``online`` are the sweep's runs, which `clairvoyant` never falls below. Bounds have the
        device alone, so runs with tiers below it do not count.
        """
        bare = self
        if self.setup.tiers:
            setup, online = replace(self.setup, tiers=()), ()
            bare = Simulator(self.trace, setup, self._on_progress)
        yield run_single_lane(bare.trace, bare.setup)
        yield bare.run(RunPlan(policy="endless", make=Lru))
        for plan in plans(["clairvoyant"], entries, budgets):
            yield bare.clairvoyant(plan, online)

    def clairvoyant(self, plan: RunPlan, online: Sequence[RunOutcome]) -> RunOutcome:
        """Return the best of the offline plans, and of the online runs under the same bound."""
        runs = (self.run(foreseeing(self.trace, self.setup, plan, mode)) for mode in MODES)
        best = max(runs, key=lambda outcome: outcome.run["reused_tokens"])
        for outcome in online:
            run = outcome.run
            same = (run["entries"], run["budget_bytes"]) == (plan.entries, plan.budget_bytes)
            if same and run["reused_tokens"] > best.run["reused_tokens"]:
                best = RunOutcome({**run, "policy": "clairvoyant"}, outcome.detail)
        return best

    def explain(self, plan: RunPlan, request: int) -> str:
        """Return why one request reused no more: its match, its loss, the reason, the remedy."""
        trace = self.trace
        replay = Replay(trace, self._source, self.setup, plan, until=request)
        replay.run()
        prompt = replay.prompt(trace.requests[request], self._source.prompt(request))
        explanation = replay.pool.explain(prompt)
        places = [f"{m.position} ({m.kind})" for m in replay.pool.lookup(prompt)[-8:]]
        line = f"request {request} of {trace.name} under {plan.policy}: {explanation}"
        return "\n".join([line, f"  deepest resumable positions: {', '.join(places) or 'none'}"])


def plans(
    policies: Sequence[str], entries: Sequence[int], budgets: Sequence[int]
) -> Iterator[RunPlan]:
    """Yield the runs: policies x entries, then policies x budgets; never crossed."""
    for policy in policies:
        for most in entries:
            yield RunPlan(policy=policy, entries=most)
    for policy in policies:
        for budget in budgets:
            yield RunPlan(policy=policy, budget_bytes=budget)


def foreseeing(trace: Trace, setup: Setup, plan: RunPlan, mode: Mode) -> RunPlan:
    """Return a plan under the same bound whose policy has the whole trace."""
    config = pool_config(trace, setup, replace(plan, policy="lru", entries=None))
    policy = Clairvoyant(
        trace,
        mode=mode,
        entries=plan.entries,
        pages=config.retained_pages,
        image_pages=config.image_pages,
        page_tokens=config.page_tokens,
    )
    return replace(plan, policy="clairvoyant", make=lambda: policy, on_request=policy.now)
