"""The stated workloads: small synthetic traces, each the shape of something that goes wrong.

``make(name, seed=…, scale=…)`` builds one. `seed` draws the lengths, `scale` multiplies every
length in tokens; how many requests there are and who continues whom stay the same. With seed 1 and
scale 1.0 they have the shape that the figures in the docs are stated for.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Final

from ninfer_pool.errors import ConfigError
from ninfer_pool.sim.trace import Trace, TraceRequest, make_header

SIDE_LENGTHS: Final = (53, 190, 317, 640)


class _Builder:
    """Collects requests; ids and times count up by themselves, lengths are in scaled tokens."""

    def __init__(self, name: str, seed: int, scale: float) -> None:
        # Seeded by name too, so that workloads of one seed are not correlated.
        self.draw = random.Random(f"{name} {seed}")
        self.requests: list[TraceRequest] = []
        self._scale = scale
        self._now = 0.0

    def tokens(self, count: int) -> int:
        """Scale a length; a length that is not 0 stays at least 1."""
        return max(1, round(count * self._scale)) if count else 0

    def between(self, low: int, high: int) -> int:
        """Draw a length from low to high, both included, and scale it."""
        return self.tokens(self.draw.randint(low, high))

    def add(
        self,
        session: str,
        *,
        new: int,
        output: int,
        parent: TraceRequest | None = None,
        shared: int = 0,
        after: float = 1.0,
        kind: str = "main",
        system: int = 0,
    ) -> TraceRequest:
        """Append a request `after` seconds later: `shared` tokens of `parent`, then `new` ones."""
        self._now = round(self._now + after, 6)
        request = TraceRequest(
            id=len(self.requests),
            t=self._now,
            session=session,
            kind=kind,
            parent=parent.id if parent else None,
            shared=shared,
            input=shared + new,
            output=output,
            boundaries=((system, "system"),) if system else (),
        )
        self.requests.append(request)
        return request

    def again(self, parent: TraceRequest, *, new: int, after: float = 1.0) -> TraceRequest:
        """Append a turn that keeps the parent's prompt, drops its output and adds `new` tokens."""
        system = parent.boundaries[0][0] if parent.boundaries else 0
        return self.add(
            parent.session,
            new=new,
            output=parent.output,
            parent=parent,
            shared=parent.input,
            after=after,
            kind=parent.kind,
            system=system,
        )


def make(name: str, *, seed: int = 1, scale: float = 1.0) -> Trace:
    """Build the workload `name`; the same arguments always give the same trace.

    >>> [(r.session, r.input) for r in make("seed_interleave").requests]
    [('A', 18), ('B', 20), ('A', 18), ('A', 18)]

    Raises:
        ConfigError: no workload has that name, or `scale` is not a finite number above 0.
    """
    if name not in WORKLOADS:
        raise ConfigError(f"workload {name}: unknown; must be one of {', '.join(WORKLOADS)}")
    if not (math.isfinite(scale) and scale > 0):
        raise ConfigError(f"workload {name}, field scale: {scale}; must be finite and above 0")
    build = _Builder(name, seed, scale)
    WORKLOADS[name](build)
    header = make_header(
        name,
        source="stated workload",
        licence="CC0-1.0",
        notes=f"seed {seed} scale {scale}",
    )
    return Trace(name=name, header=header, requests=tuple(build.requests))


def _seed_interleave(build: _Builder) -> None:
    """A, an unrelated B, then A twice more."""
    length, output = build.tokens(18), build.tokens(8)
    first = build.add("A", new=length, output=output)
    build.add("B", new=build.tokens(20), output=output, kind="side")
    build.again(build.again(first, new=0), new=0)


def _seed_title(build: _Builder) -> None:
    """54 turns of an agent with a session-title request before every turn."""
    output, turn = build.tokens(64), None
    for step in range(54):
        title = (190, 317)[step] if step < 2 else min(1800, 64 + 60 * step)
        build.add("title", new=build.tokens(title), output=output, after=6.0, kind="side")
        if turn is None:
            system = build.tokens(1800)
            new = system + build.tokens(290)
            turn = build.add("main", new=new, output=output, after=0.02, system=system)
        else:
            turn = build.again(turn, new=build.between(130, 960), after=0.02)


def _two_pass(build: _Builder) -> None:
    """39 disjoint prefixes of 3,000 to 31,135 tokens, twice in the same order."""
    lengths = [int(3000 * (31135 / 3000) ** (step / 38)) for step in range(39)]
    build.draw.shuffle(lengths)
    output = build.tokens(8)
    passed = [
        build.add(f"p{number}", new=build.tokens(length), output=output)
        for number, length in enumerate(lengths)
    ]
    for request in passed:
        build.again(request, new=0)


def _rounds(build: _Builder) -> None:
    """(prompts x rounds) 1x12, 3x4, 6x2, 10x2."""
    length, output = build.tokens(4000), build.tokens(8)
    for group, (prompts, rounds) in enumerate(((1, 12), (3, 4), (6, 2), (10, 2))):
        names = [f"g{group}p{prompt}" for prompt in range(prompts)]
        latest = [build.add(name, new=length, output=output) for name in names]
        for _ in range(rounds - 1):
            latest = [build.again(request, new=0) for request in latest]


def _saturate(build: _Builder) -> None:
    """50 strangers, then 3 prompts asked twice, then 5 conversations of 3 turns."""
    output = build.tokens(8)
    for stranger in range(50):
        build.add(f"f{stranger}", new=build.between(2000, 20000), output=output)
    for prompt in range(3):
        first = build.add(f"q{prompt}", new=build.tokens(26300), output=output)
        build.again(first, new=build.tokens(40))
    first_turn, answer = build.tokens(8000), build.tokens(200)
    turns = [build.add(f"c{number}", new=first_turn, output=answer) for number in range(5)]
    for _ in range(2):
        turns = [build.again(turn, new=build.tokens(3000)) for turn in turns]


def _tool_loop(build: _Builder) -> None:
    """60 tool steps of one agent with no user message between."""
    system, output = build.tokens(9000), build.tokens(180)
    new = system + build.tokens(8000) + build.between(200, 900)
    step = build.add("agent", new=new, output=output, kind="tool", system=system)
    for _ in range(59):
        step = build.add(
            "agent",
            new=build.between(200, 900),
            output=output,
            parent=step,
            shared=step.total,
            kind="tool",
            system=system,
        )


def _rotation(build: _Builder) -> None:
    """6 conversations of 55,070 tokens in rotation, 6 rounds."""
    length, output = build.tokens(55070), build.tokens(40)
    turns = [build.add(f"r{number}", new=length, output=output) for number in range(6)]
    for _ in range(5):
        turns = [build.again(turn, new=build.tokens(60)) for turn in turns]


def _fanout(build: _Builder) -> None:
    """12 conversations of 6 turns, started together on one system prompt of 11,500 tokens."""
    system, growth, output = build.tokens(11500), build.tokens(300), build.tokens(120)
    first = build.add("s0", new=system + growth, output=output, after=0.01, system=system)
    turns = [first]
    for number in range(1, 12):
        turns.append(
            build.add(
                f"s{number}",
                new=growth,
                output=output,
                parent=first,
                shared=system,
                after=0.01,
                system=system,
            )
        )
    for _ in range(5):
        turns = [build.again(turn, new=growth) for turn in turns]


def _branches(build: _Builder) -> None:
    """A long base, two branches, five alternations with strangers between, one rewritten tail."""
    output, stranger = build.tokens(30), build.tokens(9000)
    base = build.add("base", new=build.tokens(119648), output=output)
    branches = {
        name: build.add(name, new=build.tokens(200), output=output, parent=base, shared=base.input)
        for name in ("A", "B")
    }
    for _ in range(5):
        for name in ("A", "B"):
            build.add("filler", new=stranger, output=build.tokens(8), kind="side")
            branches[name] = build.again(branches[name], new=build.tokens(300))
    last, tail = branches["A"], build.tokens(150)
    build.add("A", new=tail, output=output, parent=last, shared=last.input - tail)


def _mixed_agents(build: _Builder) -> None:
    """Three long sessions at random, with side calls, sub-agents and compaction."""
    latest: dict[str, TraceRequest | None] = {"A": None, "B": None, "C": None}
    agent: TraceRequest | None = None
    for step in range(110):
        session = build.draw.choice(sorted(latest))
        previous = latest[session]
        if previous is not None and step > 0 and step % 37 == 0:
            latest[session] = _compaction(build, previous)
        else:
            latest[session] = _agent_turn(build, session, previous)
            if build.draw.random() < 0.5:
                new = build.tokens(build.draw.choice(SIDE_LENGTHS))
                build.add("side", new=new, output=build.tokens(24), after=0.01, kind="side")
        if build.draw.random() < 0.03:
            agent = _sub_agent(build, f"sub{step}", agent)


def _agent_turn(build: _Builder, session: str, previous: TraceRequest | None) -> TraceRequest:
    output = build.between(50, 600)
    if previous is None:
        length, system = {"A": (85000, 13000), "B": (60000, 11000), "C": (25000, 6000)}[session]
        system, rest = build.tokens(system), build.tokens(length - system)
        return build.add(session, new=system + rest, output=output, system=system)
    # A fifth of the clients send the answer back without its reasoning: it parts at the prompt end.
    stripped = build.draw.random() < 0.2
    growth = build.between(100, 1500)
    if previous.kind == "compaction":
        growth = build.tokens(60)
    elif stripped:
        growth += previous.output
    return build.add(
        session,
        new=growth,
        output=output,
        parent=previous,
        shared=previous.input if stripped else previous.total,
        system=previous.boundaries[0][0],
    )


def _compaction(build: _Builder, previous: TraceRequest) -> TraceRequest:
    system = previous.boundaries[0][0]
    return build.add(
        previous.session,
        new=build.tokens(4000),
        output=build.tokens(400),
        parent=previous,
        shared=system,
        kind="compaction",
        system=system,
    )


def _sub_agent(build: _Builder, name: str, first: TraceRequest | None) -> TraceRequest:
    """Add a sub-agent on the first one's system prompt; gives the first one back."""
    task, output, system = build.between(200, 3000), build.tokens(300), build.tokens(19800)
    request = build.add(
        name,
        new=task if first else system + task,
        output=output,
        parent=first,
        shared=system if first else 0,
        kind="subagent",
        system=system,
    )
    return first or request


WORKLOADS: Final[dict[str, Callable[[_Builder], None]]] = {
    "seed_interleave": _seed_interleave,
    "seed_title": _seed_title,
    "two_pass": _two_pass,
    "rounds": _rounds,
    "saturate": _saturate,
    "tool_loop": _tool_loop,
    "rotation": _rotation,
    "fanout": _fanout,
    "branches": _branches,
    "mixed_agents": _mixed_agents,
}
