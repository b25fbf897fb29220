"""The command `ninfer-pool trace`: convert a log to a trace, or summarize one."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence

from ninfer_pool.errors import UsageError
from ninfer_pool.sim import options
from ninfer_pool.sim.converters import convert
from ninfer_pool.sim.report import percent
from ninfer_pool.sim.trace import HEADER_TEXTS, Trace, TraceRequest, read_trace, write_trace


def convert_trace(args: argparse.Namespace) -> None:
    """Run `trace convert`.

    Raises:
        PoolError: a mistake of the caller; nothing has been written.
    """
    if args.tokenizer is not None and args.source != "openai-jsonl":
        raise UsageError("--tokenizer: only --from openai-jsonl counts tokens; leave it out")
    inputs = [args.input] if args.tokenizer is None else [args.input, args.tokenizer]
    options.check_outputs({"OUT": args.output}, inputs=inputs)
    trace = convert(args.source, args.input, tokenizer=args.tokenizer)
    write_trace(args.output, trace)
    print(f"wrote {args.output}: {len(trace.requests):,} requests")


def print_info(args: argparse.Namespace) -> None:
    """Run `trace info`."""
    for line in trace_info(read_trace(args.file)):
        print(line)


def trace_info(trace: Trace) -> Iterator[str]:
    """Yield lines on a trace: header, sizes, kinds, and how prompts part from their parents."""
    requests = trace.requests
    for name in HEADER_TEXTS:
        if trace.header.get(name):
            yield _line(name, " ".join(str(trace.header[name]).split()))
    yield _line("requests", f"{len(requests):,} over {duration(requests[-1].t - requests[0].t)}")
    yield _line("sessions", f"{len({request.session for request in requests}):,}")
    kinds = Counter(request.kind for request in requests).most_common()
    yield _line("kinds", ", ".join(f"{kind} {number:,}" for kind, number in kinds))
    shared = sum(request.shared for request in requests)
    share = percent(shared / max(1, trace.input_tokens))
    prompts = f"{trace.input_tokens:,} tokens, {shared:,} of them ({share}) shared with a parent"
    yield _line("prompts", prompts)
    yield _line("outputs", f"{sum(request.output for request in requests):,} tokens")
    longest = max(requests, key=lambda request: request.total)
    yield _line("longest", f"{longest.total:,} tokens with output (request {longest.id})")
    parts = Counter(parting(request, requests) for request in requests)
    yield _line("parts", "how each prompt continues its parent")
    for name, number in parts.most_common():
        yield _line("", f"{number:>8,}  {name}")


def _line(name: str, text: str) -> str:
    return f"{name:<10}{text}"


def parting(request: TraceRequest, requests: Sequence[TraceRequest]) -> str:
    """Return in words where a prompt parts from its parent's full sequence."""
    if request.parent is None:
        return "start without a parent"
    parent = requests[request.parent]
    if request.shared == parent.total:
        return "extend the whole of it"
    if request.shared > parent.input:
        return "part in its output"
    if request.shared == parent.input:
        return "part at its prompt's end"
    return "part inside its prompt"


def duration(seconds: float) -> str:
    """Return a time span in its two largest units: `2 h 5 min`, `37 s`."""
    whole = round(seconds)
    for size, unit, smaller, name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if whole >= size:
            return f"{whole // size:,} {unit} {whole % size // smaller} {name}"
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{seconds:g} s"
