"""The command `ninfer-pool simulate`: a command line, checked; its runs; its output files."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.resources import as_file, files
from typing import IO

from ninfer_pool.core.policy import POLICIES
from ninfer_pool.errors import UsageError
from ninfer_pool.sim import options
from ninfer_pool.sim.arguments import sweeps, tier_sizes
from ninfer_pool.sim.geometry import PageSizes, load_geometry
from ninfer_pool.sim.progress import Progress
from ninfer_pool.sim.report import Run, report
from ninfer_pool.sim.setup import Setup
from ninfer_pool.sim.simulator import Simulator, plans
from ninfer_pool.sim.trace import Trace, read_trace

SHIPPED_TRACE = "claude_code_side_requests.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """A command line of `simulate`, checked: from here on only our own bugs can fail."""

    traces: Sequence[Trace]
    setup: Setup
    sizes: PageSizes
    policies: tuple[str, ...]
    entries: tuple[int, ...]
    budgets: tuple[int, ...]
    explain: int | None


def simulate(args: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        PoolError: a mistake of the caller; nothing has been written.
    """
    job = _checked(args)
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
        for trace in job.traces:
            before = sum(map(len, runs_of_traces))
            runs_of_traces.append(list(_runs(trace, job, detail=detail, first=before)))
            _print(trace, job, runs_of_traces[-1])
        if args.json is not None:
            runs = [run for group in runs_of_traces for run in group]
            text = json.dumps({"version": 1, "runs": runs}, indent=2, allow_nan=False)
            drafts[args.json].write_text(f"{text}\n", encoding="utf-8")
        if args.plot is not None:
            from ninfer_pool.sim.plot import plot

            drafts[args.plot].write_bytes(
                plot(runs_of_traces, suffix=args.plot.suffix.lower(), sizes=job.sizes)
            )
    for path in drafts:
        print(f"wrote {path}")


def _checked(args: argparse.Namespace) -> _Job:
    """Check the whole command line and read the traces."""
    options.check_policies(args.policy, known=tuple(POLICIES))
    outputs = {"--json": args.json, "--detail": args.detail, "--plot": args.plot}
    options.check_outputs(outputs, inputs=args.traces)
    if args.plot is not None:
        options.check_plot_library()
    geometry = load_geometry(args.model)
    sizes = geometry.sizes(kv=args.kv, mtp=args.mtp)
    entries, budgets = sweeps(args)
    tiers = tier_sizes(args)
    bounds = {"--budget": budgets}
    bounds |= {f"--{tier.name}-budget": (tier.budget_bytes,) for tier in tiers}
    for option, values in bounds.items():
        options.check_budgets(
            values, option=option,
            page_bytes=sizes.page_bytes, image_bytes=sizes.image_bytes, model=geometry.name,
        )  # fmt: skip
    setup = Setup(
        geometry=geometry, model=geometry.name,
        kv=args.kv, mtp=args.mtp, lanes=args.lanes, affinity=args.affinity,
        prefill_rate=args.prefill_rate, decode_rate=args.decode_rate, tiers=tiers,
    )  # fmt: skip
    traces = [read_trace(path) for path in args.traces] or [_shipped_trace()]
    _check_explain(args.explain, traces)
    return _Job(
        traces=traces, setup=setup, sizes=sizes, policies=args.policy,
        entries=entries, budgets=budgets, explain=args.explain,
    )  # fmt: skip


def _shipped_trace() -> Trace:
    with as_file(files("ninfer_pool.sim") / "traces" / SHIPPED_TRACE) as path:
        return read_trace(path)


def _check_explain(request: int | None, traces: Sequence[Trace]) -> None:
    if request is None:
        return
    if len(traces) > 1:
        raise UsageError(f"--explain: request {request} of which trace? give one TRACE")
    last = len(traces[0].requests) - 1
    if request > last:
        raise UsageError(f"--explain: no request {request} in {traces[0].name}; 0 to {last}")


def _runs(trace: Trace, job: _Job, *, detail: IO[str] | None, first: int) -> Iterator[Run]:
    """Simulate all runs of one trace; detail lines are written at once, so that none pile up."""
    with Progress(sys.stderr) as progress:
        outcomes = Simulator(trace, job.setup, progress.show).sweep(
            policies=job.policies, entries=job.entries, budgets=job.budgets
        )
        for index, outcome in enumerate(outcomes, start=first):
            if detail is not None:
                for line in outcome.detail:
                    detail.write(json.dumps({"run": index, **line}, allow_nan=False) + "\n")
            yield outcome.run


def _print(trace: Trace, job: _Job, runs: Sequence[Run]) -> None:
    print(report(runs, sizes=job.sizes))
    if job.explain is not None:
        plan = next(plans(job.policies, job.entries, job.budgets))
        print(Simulator(trace, job.setup).explain(plan, request=job.explain))
    sys.stdout.flush()
