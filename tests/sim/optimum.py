"""The best that any eviction could do on a small trace, by trying every choice on the real pool."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any

from ninfer_pool.core.entry import Checkpoint, Entry, Node
from ninfer_pool.core.policy import Policy
from ninfer_pool.sim.clairvoyant import Mode
from ninfer_pool.sim.replay import Replay
from ninfer_pool.sim.setup import RunPlan, Setup
from ninfer_pool.sim.simulator import foreseeing
from ninfer_pool.sim.tokens import TokenSource
from ninfer_pool.sim.trace import Trace, TraceRequest

Script = tuple[int, ...]


class Scripted(Policy):
    """Offers as first victim what a script says, call by call: the n-th oldest that may go.

    Past the script's end it offers the oldest; `asked` says how many there were at each call.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.asked: list[int] = []
        self._entries: dict[int, Entry] = {}

    def on_insert(self, entry: Entry, tick: int) -> None:
        """Offer one entry more."""
        self._entries[entry.identity] = entry

    def on_remove(self, entry: Entry) -> None:
        """Offer it no more."""
        del self._entries[entry.identity]

    def victims(self, tick: int) -> Iterator[Entry]:
        """Yield the entry that the script says, then the others."""
        by_age = sorted(self._entries)
        entries = sorted(map(self._entries.__getitem__, by_age), key=_protected)
        call = len(self.asked)
        first = self.script[call] if call < len(self.script) else 0
        self.asked.append(max(1, len(entries) - sum(map(_protected, entries))))
        yield entries[first]
        yield from entries[:first] + entries[first + 1 :]

    def state(self) -> Hashable:
        """All that the pool's further answers depend on, but for what the trace tells."""
        roots = {id(root): root for root in map(_root, self._entries.values())}
        paths = [node for root in roots.values() for node in root.subtree()]
        marks = [_mark(mark) for node in paths for mark in node.checkpoints]
        tips = [(_mark(e.tip), e.prompt_tokens) for e in self._entries.values()]
        return tuple(sorted(marks)), tuple(sorted(tips))


def _protected(entry: Entry) -> bool:
    # To offer it first is to offer the next one: the pool passes over it.
    return entry.tip.refs > 0


def _root(entry: Entry) -> Node:
    node = entry.tip.node
    assert node is not None
    while node.parent is not None:
        node = node.parent
    return node


def _mark(mark: Checkpoint) -> tuple[Any, ...]:
    node, position = mark.node, mark.position
    assert node is not None
    # The last token names the sequence: a made-up token occurs at one place of a trace alone.
    while node.start >= position and node.parent is not None:
        node = node.parent
    last = bytes(node.tokens[4 * (position - node.start - 1) :][:4])
    return last, position, mark.kind, mark.superseded, mark.uses > 0, mark.cuts is not None


def optimum(trace: Trace, setup: Setup, plan: RunPlan) -> int:
    """Return the most prompt tokens that any choice of victims lets the pool reuse.

    Request by request it keeps every state that the pool can be in, with the most reused on the
    way to it; from each it tries every choice that the next request leaves.
    """
    source = TokenSource(trace)
    states: dict[Hashable, tuple[int, Script]] = {None: (0, ())}
    for until in range(1, len(trace.requests) + 1):
        found: dict[Hashable, tuple[int, Script]] = {}
        for _, script in states.values():
            for reused, longer, state in _continue(trace, source, setup, plan, script, until):
                if reused > found.get(state, (-1, ()))[0]:
                    found[state] = (reused, longer)
        states = found
    return max(reused for reused, _ in states.values())


def _continue(
    trace: Trace, source: TokenSource, setup: Setup, plan: RunPlan, script: Script, until: int
) -> Iterator[tuple[int, Script, Hashable]]:
    """Yield what each choice for the last request before `until` leads to."""
    branches = [script]
    while branches:
        begun = branches.pop()
        policy = Scripted(begun)
        replay = Replay(trace, source, setup, _with(plan, policy), until=until)
        replay.run()
        whole = begun + (0,) * (len(policy.asked) - len(begun))
        for call in range(len(begun), len(whole)):
            branches += [(*whole[:call], other) for other in range(1, policy.asked[call])]
        yield replay.tally.reused_tokens, whole, policy.state()


def _with(plan: RunPlan, policy: Policy) -> RunPlan:
    return replace(plan, make=lambda: policy)


def foreseen(trace: Trace, setup: Setup, plan: RunPlan, mode: Mode) -> Replay:
    """Replay a trace under a clairvoyant policy."""
    replay = Replay(trace, TokenSource(trace), setup, foreseeing(trace, setup, plan, mode))
    replay.run()
    return replay


def random_trace(seed: int, *, requests: int) -> Trace:
    """Conversations that go on, restart and part, and strangers between them."""
    draw = random.Random(seed)
    made: list[TraceRequest] = []
    for id in range(requests):
        parent = draw.choice(made) if made and draw.random() < 0.75 else None
        shared = 0
        if parent is not None:
            places = (parent.total, parent.total, parent.input, parent.input // 3)
            shared = draw.choice(places)
        made.append(
            TraceRequest(
                id=id,
                t=float(id),
                session=f"s{id if parent is None else parent.session}",
                kind="main",
                parent=None if parent is None else parent.id,
                shared=shared,
                input=shared + draw.randint(1, 2_000 if parent else 30_000),
                output=draw.randint(1, 400),
                boundaries=(((shared // 2), "system"),) if shared > 1 and id % 3 else (),
            )
        )
    return Trace(name=f"random {seed}", requests=tuple(made))
