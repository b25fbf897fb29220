"""Measure each operation of the pool at each size next to its floor.

python benchmarks/core.py [--tiny | --large] [--json FILE]
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice, product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import conversations
from benchmarks.common.command import BenchmarkParser, progress
from benchmarks.common.conversations import SHAPES, Conversations
from benchmarks.common.peer_trees import Peer, available_peers
from benchmarks.common.probes import PROBES, Target, evictions, probe, repeated, then_new, turns
from benchmarks.common.report import CoreReport
from benchmarks.common.timing import Action, Case, Floor, Row, measure

TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreScale:
    """How much is measured.

    Args:
        tokens, entries: the sizes; every pair of them whose stored tokens take at most
            `world_bytes` is measured, in both shapes.
        conversations: how many are looked up in turn, so that the nearest cache does not hold
            all their bytes; then half of them are committed to and the others evicted.
        repeats: calls of an operation that changes nothing.
        marks, forks: checkpoints, and branches of one path, at each of `long_tokens`.
        peer_tokens: the most stored tokens of a case in which the peers are measured.
        memory_entries, memory_tokens: the pool whose bytes per token are measured.
    """

    tokens: tuple[int, ...] = (2_048, 16_384, 65_536, 200_000)
    entries: tuple[int, ...] = (1, 64, 4_096)
    world_bytes: int = 400_000_000
    conversations: int = 64
    repeats: int = 256
    marks: int = 100_000
    forks: int = 1_000
    long_tokens: tuple[int, ...] = (16_384, 200_000)
    peer_tokens: int = 2_000_000
    memory_entries: int = 64
    memory_tokens: int = 16_384


DEFAULT = CoreScale()
LARGE = CoreScale(world_bytes=1 << 40, peer_tokens=16_000_000)
TINY = CoreScale(
    tokens=(1_024,), entries=(1, 8), repeats=5, conversations=3, marks=64, forks=8,
    long_tokens=(1_024,), memory_entries=2, memory_tokens=1_024,
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Measure at the chosen scale, print the table, write the JSON."""
    parser = core_parser(__doc__)
    args = parser.parse_args(argv)
    with parser.checked(args):
        run(args.scale).publish(args.json)


def core_parser(description: str | None) -> BenchmarkParser:
    """Options of the benchmarks that measure the pool's own operations."""
    parser = BenchmarkParser(description)
    size = parser.add_mutually_exclusive_group()
    for name, scale in (("--tiny", TINY), ("--large", LARGE)):
        size.add_argument(
            name, dest="scale", action="store_const", const=scale, default=DEFAULT,
            help="few and small cases, in seconds" if scale is TINY else "with cases of a gigabyte",
        )  # fmt: skip
    return parser


def run(scale: CoreScale, *, with_peers: bool = True) -> CoreReport:
    """Measure everything of a scale; each answer is checked before its call is timed.

    Raises:
        AssertionError: the pool gave a wrong answer; nothing is reported then.
    """
    found, missing = available_peers() if with_peers else ([], [])
    results: list[Row] = []
    beside: list[Row] = []
    for plan in plans(scale):
        progress(f"{plan.shape}, {plan.tokens:,} tokens, {plan.entries:,} entries")
        results += pool_rows(plan, scale)
        if plan.stored_tokens <= scale.peer_tokens:
            for peer in found:
                beside += peer_rows(plan, peer, scale)
    results += long_rows(scale)
    memory = bytes_per_token(entries=scale.memory_entries, tokens=scale.memory_tokens)
    progress("")
    return CoreReport(results=results, peers=beside, missing=missing, bytes_per_token=memory)


def plans(scale: CoreScale) -> Iterator[Conversations]:
    """Yield every size and shape of a scale that stores no more than it may."""
    for tokens in scale.tokens:
        for entries in scale.entries:
            for shape in SHAPES:
                plan = Conversations(shape=shape, tokens=tokens, entries=entries)
                if plan.stored_tokens * TOKEN_BYTES <= scale.world_bytes:
                    yield plan


def pool_rows(plan: Conversations, scale: CoreScale) -> list[Row]:
    """Measure lookups, explain, a turn's commit and an eviction of several conversations."""
    asked = targets(plan, count=scale.conversations)
    rows = lookup_rows(asked, repeats=scale.repeats)
    half = len(asked) // 2
    rows.append(measure(case(plan, "commit", "turn"), turns(asked[:half])))
    rows.append(measure(case(plan, "evict", "entry"), evictions(asked[half:])))
    return rows


def targets(plan: Conversations, *, count: int) -> list[Target]:
    """Return up to `count` conversations, evenly spread over a filled pool.

    Of pools with one entry there are as many as conversations, so that the number of entries is
    all that differs: the bytes read are as far apart at 1 entry as at 4,096.
    """
    if plan.entries == 1:
        return [(conversations.filled(plan), 0) for _ in range(count)]
    world = conversations.filled(plan)
    count = min(count, plan.entries)
    return [(world, index * plan.entries // count) for index in range(count)]


def long_rows(scale: CoreScale) -> list[Row]:
    """Measure lookups of paths with very many checkpoints, and with very many branches."""
    rows = []
    for tokens in scale.long_tokens:
        progress(f"{scale.marks:,} checkpoints, {tokens:,} tokens")
        marked = conversations.marked(tokens=tokens, marks=scale.marks)
        rows += lookup_rows([(marked, 0)] * scale.conversations, repeats=scale.repeats)
        progress(f"{scale.forks:,} branches, {tokens:,} tokens")
        forked = conversations.forked(tokens=tokens, forks=scale.forks)
        rows += lookup_rows([(forked, 0)] * scale.conversations, repeats=scale.repeats)
    return rows


def lookup_rows(asked: Sequence[Target], *, repeats: int) -> list[Row]:
    """Measure the operations that change nothing: lookup of each probe, explain of a branch."""
    plan = asked[0][0].plan
    return [
        measure(case(plan, op, name), repeated(asked, op=op, name=name, repeats=repeats))
        for op, name in (*product(("lookup", "first_lookup"), PROBES), ("explain", "branch"))
    ]


def peer_rows(plan: Conversations, peer: Peer, scale: CoreScale) -> list[Row]:
    """Measure the same of another structure, which must find every stored token."""
    label = f"{peer.name} {peer.version}"
    peer.build([plan.path(index) for index in range(plan.entries)])
    count = scale.conversations
    rows = [
        measure(case(plan, "first_lookup", name), islice(cycle(pairs), scale.repeats), peer=label)
        for name, pairs in ((name, _peer_lookups(plan, peer, name, count)) for name in PROBES)
    ]
    rows.append(measure(case(plan, "commit", "turn"), _peer_turns(plan, peer, count), peer=label))
    floor = Floor(plan.path(0), stored=plan.path(0).tobytes())
    evicting = [(peer.evict, floor)] * min(count, -(-plan.entries // 2))
    rows.append(measure(case(plan, "evict", "entry"), evicting, peer=label))
    return rows


def _peer_lookups(
    plan: Conversations, peer: Peer, name: str, count: int
) -> list[tuple[Action, Floor]]:
    pairs: list[tuple[Action, Floor]] = []
    for number in range(count):
        asked = probe(plan, number * plan.entries // count, name=name)
        prompt = peer.prompt(asked.tokens)
        found = peer.lookup(prompt) if not pairs else asked.matched  # one is slow enough
        if found != asked.matched:
            raise AssertionError(f"{peer.name} {peer.version}: {found} of {asked.matched} tokens")
        pairs.append((partial(peer.lookup, prompt), Floor(asked.tokens, stored=asked.stored)))
    return pairs


def _peer_turns(plan: Conversations, peer: Peer, count: int) -> Iterator[tuple[Action, Floor]]:
    fresh = plan.entries == 1  # one entry can grow by one turn only once
    for index in range(count if fresh else min(count, plan.entries)):
        path = plan.path(0 if fresh else index)
        if fresh:
            peer.build([path])
        longer = then_new(path, conversations.TURN_TOKENS)
        floor = Floor(longer[: -conversations.ANSWER_TOKENS], stored=path.tobytes())
        yield partial(peer.commit, peer.prompt(longer)), floor


def case(plan: Conversations, op: str, probe: str) -> Case:
    """Return the name of one row."""
    return Case(op=op, probe=probe, shape=plan.shape, tokens=plan.tokens, entries=plan.entries)


def bytes_per_token(*, entries: int, tokens: int) -> float:
    """Return the Python memory of a pool of agent conversations, per retained token."""
    plan = Conversations(shape="agent", tokens=tokens, entries=entries)
    conversations.filled(plan)  # objects made once per process do not count
    gc.collect()
    tracemalloc.start()
    try:
        world = conversations.filled(plan)
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
        assert len(world.keys) == entries
    finally:
        tracemalloc.stop()
    return round(held / plan.stored_tokens, 3)


if __name__ == "__main__":
    main()
