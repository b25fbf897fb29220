"""The command `ninfer-pool simulate`: a command line, checked; its runs; what is written."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from ninfer_pool.errors import UsageError
from ninfer_pool.sim import options
from ninfer_pool.sim.arguments import sweeps, tier_options

if TYPE_CHECKING:
    from ninfer_pool.sim.geometry import Sizes
    from ninfer_pool.sim.replay import Setup
    from ninfer_pool.sim.report import Run
    from ninfer_pool.sim.trace import Trace

SHIPPED_TRACE = "claude_code_side_requests.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """A command line of `simulate`, checked: from here on only our own bugs can fail."""

    traces: Sequence[Trace]
    setup: Setup
    sizes: Sizes
    policies: tuple[str, ...]
    entries: tuple[int, ...]
    budgets: tuple[int, ...]
    explain: int | None


def simulate(args: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        PoolError: something that a person got wrong; nothing has been written.
    """
    plan = _plan(args)
    runs_of_traces: list[list[Run]] = []
    with ExitStack() as files:
        # Drafts become the named files when the block ends well, and vanish when it does not.
        drafts = {
            path: files.enter_context(options.replacing(path))
            for path in (args.json, args.detail, args.plot)
            if path is not None
        }
        detail = None
        if args.detail is not None:
            detail = files.enter_context(drafts[args.detail].open("w", encoding="utf-8"))
        for trace in plan.traces:
            before = sum(map(len, runs_of_traces))
            runs_of_traces.append(list(_runs(trace, plan, detail=detail, first=before)))
            _tell(trace, plan, runs_of_traces[-1])
        if args.json is not None:
            runs = [run for group in runs_of_traces for run in group]
            drafts[args.json].write_text(_json(runs), encoding="utf-8")
        if args.plot is not None:
            from ninfer_pool.sim.plot import plot

            drafts[args.plot].write_bytes(
                plot(runs_of_traces, suffix=args.plot.suffix.lower(), sizes=plan.sizes)
            )
    for path in drafts:
        print(f"wrote {path}")


def _plan(args: argparse.Namespace) -> _Plan:
    """Check the whole command line and read the traces."""
    from ninfer_pool.core.policy import POLICIES
    from ninfer_pool.sim.below import TierSize
    from ninfer_pool.sim.geometry import load_geometry
    from ninfer_pool.sim.replay import Setup

    options.check_policies(args.policy, known=tuple(POLICIES))
    outputs = {"--json": args.json, "--detail": args.detail, "--plot": args.plot}
    options.check_outputs(outputs, inputs=args.traces)
    if args.plot is not None:
        options.check_plot_library()
    geometry = load_geometry(args.model)
    sizes = geometry.sizes(kv=args.kv, mtp=args.mtp)
    entries, budgets = sweeps(args)
    below = [TierSize(**told) for told in tier_options(args)]
    asked = {"--budget": budgets}
    asked |= {f"--{tier.name}-budget": (tier.budget_bytes,) for tier in below}
    for option, sought in asked.items():
        options.check_budgets(
            sought, option=option,
            page_bytes=sizes.page_bytes, image_bytes=sizes.image_bytes, model=geometry.name,
        )  # fmt: skip
    setup = Setup(
        geometry=geometry, model=geometry.name,
        kv=args.kv, mtp=args.mtp, lanes=args.lanes, affinity=args.affinity,
        prefill_rate=args.prefill_rate, decode_rate=args.decode_rate, tiers=tuple(below),
    )  # fmt: skip
    traces = _read_traces(args.traces)
    _check_explain(args.explain, traces)
    return _Plan(
        traces=traces, setup=setup, sizes=sizes, policies=args.policy,
        entries=entries, budgets=budgets, explain=args.explain,
    )  # fmt: skip


def _read_traces(paths: Sequence[Path]) -> list[Trace]:
    from importlib.resources import as_file, files

    from ninfer_pool.sim.trace import read_trace

    if paths:
        return [read_trace(path) for path in paths]
    with as_file(files("ninfer_pool.sim") / "traces" / SHIPPED_TRACE) as path:
        return [read_trace(path)]


def _check_explain(request: int | None, traces: Sequence[Trace]) -> None:
    if request is None:
        return
    if len(traces) > 1:
        raise UsageError(f"--explain: request {request} of which trace? give one TRACE")
    last = len(traces[0].requests) - 1
    if request > last:
        raise UsageError(f"--explain: no request {request} in {traces[0].name}; 0 to {last}")


def _runs(trace: Trace, plan: _Plan, *, detail: IO[str] | None, first: int) -> Iterator[Run]:
    """Simulate all runs of one trace; detail lines go out at once, so that none pile up."""
    from ninfer_pool.sim.progress import Progress
    from ninfer_pool.sim.replay import sweep

    with Progress(sys.stderr) as progress:
        outcomes = sweep(
            trace, plan.setup, policies=plan.policies, entries=plan.entries,
            budgets=plan.budgets, on_progress=progress.show,
        )  # fmt: skip
        for index, outcome in enumerate(outcomes, start=first):
            if detail is not None:
                for line in outcome.detail:
                    detail.write(json.dumps({"run": index, **line}, allow_nan=False) + "\n")
            yield outcome.run


def _tell(trace: Trace, plan: _Plan, runs: Sequence[Run]) -> None:
    from ninfer_pool.sim.report import report

    print(report(runs, sizes=plan.sizes))
    if plan.explain is not None:
        from ninfer_pool.sim.replay import explain_request

        entries = plan.entries[0] if plan.entries else None
        budget = None if plan.entries else plan.budgets[0]
        print(
            explain_request(
                trace, plan.setup, policy=plan.policies[0], entries=entries,
                budget_bytes=budget, request=plan.explain,
            )
        )  # fmt: skip
    sys.stdout.flush()


def _json(runs: Sequence[Run]) -> str:
    return json.dumps({"version": 1, "runs": runs}, indent=2, allow_nan=False) + "\n"
