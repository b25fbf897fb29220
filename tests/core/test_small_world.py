"""Every sequence of up to six calls in a world of three prompts, two lanes and four pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ninfer_pool import Lease, Namespace, PoolConfig, PrefixPool, Prompt
from ninfer_pool.testing.symbolic import SymbolicEngine, audit

SPACE = Namespace(weights="w", kv_dtype="k")
PROMPTS = ([1], [1, 2], [3])
CONFIG = PoolConfig(
    num_pages=4, page_bytes=8, image_bytes=8, page_tokens=1, lanes=2, grid=4, max_entries=2
)
CALLS = 6


class World:
    """A pool, an engine, and at most one lease a lane."""

    def __init__(self) -> None:
        self.pool = PrefixPool(CONFIG)
        self.engine = SymbolicEngine(CONFIG)
        self.leases: list[Lease | None] = [None, None]

    def begin(self, lane: int, which: int) -> bool:
        """Acquire, restore and prefill; False where the lane is taken."""
        if self.leases[lane] is not None:
            return False
        prompt = Prompt(PROMPTS[which], namespace=SPACE)
        lease = self.pool.acquire(prompt, lane=lane)
        if not isinstance(lease, Lease):
            return lease is None
        self.leases[lane] = lease
        self.engine.bind(lane, prompt)
        self.engine.execute(lease.restore())
        self.engine.verify(lease)
        for chunk in lease.chunks():
            tokens = prompt.tokens[chunk.begin : chunk.end]
            lease.advance(tokens)
            self.engine.prefill(tokens, lease.pages, chunk.begin, lane)
            if chunk.checkpoint:
                self.engine.execute(lease.checkpoint(chunk.checkpoint, position=chunk.end))
        return True

    def end(self, lane: int, how: str) -> bool:
        """Commit or abort; False where nothing runs in the lane."""
        lease = self.leases[lane]
        if lease is None:
            return False
        getattr(lease, how)()
        self.leases[lane] = None
        return True

    def answer(self, lane: int) -> bool:
        """Decode a token, where there is room, and commit the frontier."""
        lease = self.leases[lane]
        if lease is None or not lease.extend(1):
            return False
        lease.advance([2])
        self.engine.step(2, lease.pages, lane)
        self.engine.execute(lease.checkpoint("frontier", position=lease.frontier))
        return self.end(lane, "commit")

    def publish(self, lane: int) -> bool:
        """Show what was taken; False where there is nothing to show."""
        lease = self.leases[lane]
        if lease is None or not lease.unpublished:
            return False
        lease.publish()
        return True

    def clear(self) -> bool:
        """Remove what may go."""
        return bool(self.pool.clear())

    def key(self) -> Any:
        """All that the future depends on, so that equal states are followed once."""
        state = self.pool.state
        order = tuple(
            (entry.key, entry.prompt_tokens, entry.lane)
            for entry in state.catalog.order.victims(state.tick)
        )
        marks = tuple(
            (m.position, m.kind, m.superseded, m.refs, m.lane, m.uses, *state.units_of(m).tolist())
            for root in state.catalog.roots.values()
            for node in root.subtree()
            for m in node.checkpoints
        )
        running = tuple(
            lease and (lease.lane, lease.prompt.tokens.tobytes(), lease.start, lease.published)
            for lease in self.leases
        )
        return order, marks, running, tuple(state.free_lanes)


LANES = range(2)
ALPHABET: dict[str, Callable[[World], bool]] = {
    **{
        f"begin {which} in lane {lane}": partial(World.begin, lane=lane, which=which)
        for lane in LANES
        for which in range(3)
    },
    **{
        f"{how} in lane {lane}": partial(World.end, lane=lane, how=how)
        for lane in LANES
        for how in ("commit", "release")
    },
    **{f"answer in lane {lane}": partial(World.answer, lane=lane) for lane in LANES},
    **{f"publish in lane {lane}": partial(World.publish, lane=lane) for lane in LANES},
    "clear": World.clear,
}


def replay(names: tuple[str, ...]) -> World | None:
    """Make all calls; None where the last one does not apply."""
    world = World()
    applies = True
    for name in names:
        applies = ALPHABET[name](world)
    return world if applies else None


def sequences() -> Iterator[tuple[int, tuple[str, ...]]]:
    """Every sequence that applies, with how many longer ones reach the same state first."""
    level: dict[Any, tuple[tuple[str, ...], int]] = {None: ((), 1)}
    for _ in range(CALLS):
        following: dict[Any, tuple[tuple[str, ...], int]] = {}
        for names, ways in level.values():
            for name in ALPHABET:
                longer = (*names, name)
                world = replay(longer)
                if world is None:
                    continue
                world.pool.check()
                audit(world.pool, world.engine)
                state = world.key()
                first, count = following.get(state, (longer, 0))
                following[state] = (first, count + ways)
                yield ways, longer
        level = following


def test_every_sequence_of_six_calls_keeps_every_count_and_every_byte() -> None:
    """Sequences that lead to equal states are followed on once and counted all."""
    runs = total = deepest = 0
    for ways, names in sequences():
        runs += 1
        total += ways
        deepest = max(deepest, len(names))
    print(f"{total} sequences of up to {CALLS} calls, {runs} of them run")
    assert deepest == CALLS
    assert total > 50_000
