"""What `ninfer-pool trace info` tells about a trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ninfer_pool.sim.report import percent
from ninfer_pool.sim.trace import Request, Trace

HEADER_FIELDS = ("name", "source", "licence", "notes")


def trace_info(trace: Trace) -> Iterator[str]:
    """Lines on what a trace holds: header, sizes, kinds, and how prompts part from parents."""
    requests = trace.requests
    for name in HEADER_FIELDS:
        if trace.header.get(name):
            yield _line(name, " ".join(str(trace.header[name]).split()))
    yield _line("requests", f"{len(requests):,} over {duration(requests[-1].t - requests[0].t)}")
    yield _line("sessions", f"{len({request.session for request in requests}):,}")
    kinds = Counter(request.kind for request in requests).most_common()
    yield _line("kinds", ", ".join(f"{kind} {number:,}" for kind, number in kinds))
    yield _line("prompts", _prompts(trace))
    yield _line("outputs", f"{sum(request.output for request in requests):,} tokens")
    longest = max(requests, key=lambda request: request.total)
    yield _line("longest", f"{longest.total:,} tokens with output (request {longest.id})")
    parts = Counter(parting(request, requests) for request in requests)
    yield _line("parts", "how each prompt goes on from its parent")
    for name, number in parts.most_common():
        yield _line("", f"{number:>8,}  {name}")


def _line(name: str, text: str) -> str:
    return f"{name:<10}{text}"


def _prompts(trace: Trace) -> str:
    shared = sum(request.shared for request in trace.requests)
    share = percent(shared / max(1, trace.input_tokens))
    return f"{trace.input_tokens:,} tokens, {shared:,} of them ({share}) shared with a parent"


def parting(request: Request, requests: Sequence[Request]) -> str:
    """Where on its parent's full sequence the prompt of `request` parts from it."""
    if request.parent is None:
        return "start anew, without a parent"
    parent = requests[request.parent]
    if request.shared == parent.total:
        return "extend the whole of it"
    if request.shared > parent.input:
        return "part in its output"
    if request.shared == parent.input:
        return "part at its prompt's end"
    return "part inside its prompt"


def duration(seconds: float) -> str:
    """A time span in its two largest units: `2 h 5 min`, `37 s`."""
    whole = round(seconds)
    for size, unit, smaller, name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if whole >= size:
            return f"{whole // size:,} {unit} {whole % size // smaller} {name}"
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{seconds:g} s"
