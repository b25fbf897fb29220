"""A seeded simulation with fault injection: `simulate` replays a seed exactly.

Each seed draws a pool. It also draws which kinds of action are frequent, rare or absent (swarm
weights), and lives through them three times, with less and less room.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ninfer_pool.core.lease import Lease
from ninfer_pool.core.policy import Policy
from ninfer_pool.testing.faults import OperationFailed
from ninfer_pool.testing.world import Job, World

ROOMS = (1.0, 0.5, 0.2)
"""Shares of the drawn pool: the budget shrinks."""
STEPS = 60
WEIGHTS = (0, 1, 1, 3, 8)
"""How frequent a kind of action can be; 0: it never happens under this seed."""

Action = Callable[[World], str]


class SimulationFailed(Exception):
    """A seed that broke a guarantee; its cause is the finding."""

    def __init__(self, seed: int, *, room: float, step: int, steps: int, log: list[str]) -> None:
        super().__init__(f"seed {seed} failed at step {step} with {room:g} of its room")
        self.seed = seed
        self.room = room
        self.step = step
        self.steps = steps
        self.log = log
        """All steps so far, one line each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What one seed went through."""

    seed: int
    steps: int
    victims: int
    actions: Counter[str]
    digest: str
    """Of all that happened: two runs of a seed have the same."""


# -- actions: each changes the world and returns a line -----------------------------------


def ask(world: World) -> str:
    """A request comes; now and then its restore fails."""
    if world.waiting and world.random.random() < 0.5:
        talk, prompt = world.waiting.pop(0)
    else:
        talk, prompt = world.next_prompt()
    lease = world.acquire(prompt, **world.options())
    if not isinstance(lease, Lease):
        if lease is not None:
            world.waiting = [*world.waiting[-3:], (talk, prompt)]
        return f"{len(prompt)} tokens: {'no' if lease is None else 'wait'}"
    world.jobs.append(Job(lease=lease, talk=talk))
    if world.random.random() < 0.05:
        world.engine.failing = world.random.randrange(3)
    try:
        world.restore(lease)
    except OperationFailed as failure:
        world.pick(lease.quarantine, lease.release)()
        return str(failure)
    finally:
        world.engine.failing = None
    return f"{len(prompt)} tokens from {lease.start} ({lease.reason}) in lane {lease.lane}"


def hog(world: World) -> str:
    """A request that takes much of the room for a while."""
    talk, prompt = world.next_prompt()
    room = world.pool.freeable_bytes // 16 * 4
    lease = world.acquire(prompt, reserve_tokens=max(0, room // 2 - len(prompt)))
    if not isinstance(lease, Lease):
        return "no"
    world.jobs.append(Job(lease=lease, talk=talk))
    world.restore(lease)
    return f"{len(lease.pages)} pages"


def rehearse(world: World) -> str:
    """Cancel one request at every step: what no victim paid for leaves the pool as it was."""
    _, prompt = world.next_prompt()
    for steps in range(1, 12):
        before, count = world.picture(), world.watch.count
        expiring = bool(world.pool.state.catalog.deadlines)
        lease = world.acquire(prompt, reserve_tokens=4)
        if not isinstance(lease, Lease):
            return "no"
        done = world.walk(lease, steps)
        lease.release()
        if world.watch.count == count and not expiring:
            assert world.picture() == before, f"cancelled after {steps} steps: not as before (G6)"
        world.audit()
        if done < steps:
            break
    return f"{steps} steps"


def read(world: World) -> str:
    """Looking and explaining change nothing (G7)."""
    _, prompt = world.next_prompt()
    before = world.picture()
    deepest, why = world.pool.lookup(prompt).deepest, world.pool.explain(prompt)
    world.pool.find(world.pool.key(prompt))
    assert world.picture() == before, "reading changed something (G7)"
    return f"{deepest} {why.reason}"


def wait(world: World) -> str:
    """Time passes."""
    world.now += world.random.randint(1, 4)
    return f"until {world.now:g}"


def clear(world: World) -> str:
    """All goes that nothing protects."""
    return str(world.pool.clear())


def verb(name: str) -> Action:
    """Return the action that pins, unpins, releases or evicts some entry."""

    def act(world: World) -> str:
        entries = world.pool.entries()
        if not entries:
            return str(getattr(world.pool, name)("unknown"))
        entry = world.pick(*entries)
        done = getattr(world.pool, name)(entry.key)
        assert not (name == "evict" and entry.pinned and done), "a pinned entry went (G4)"
        return f"{entry.key[:8]} {done}"

    return act


# -- actions on a running request ----------------------------------------------------------------

Step = Callable[[World, Job], str]


def odd_prefill(world: World, job: Job) -> str:
    """A piece that no plan cuts."""
    lease = job.lease
    tokens = lease.prompt.tokens[lease.frontier :][: world.random.randint(1, 5)]
    if len(tokens):
        world.compute(lease, tokens)
    return f"to {lease.frontier}"


def checkpoint(world: World, job: Job) -> str:
    """A checkpoint wherever the request stands."""
    lease, kind = job.lease, world.pick("frontier", "turn", "system", "junction")
    operations = lease.checkpoint(kind, position=lease.frontier) if lease.frontier else []
    world.engine.execute(operations)
    return f"{kind} at {lease.frontier}: {len(operations)}"


def publish(world: World, job: Job) -> str:
    """Others see what it has taken; nothing goes for that (G2)."""
    count = world.watch.count
    job.lease.publish()
    assert world.watch.count == count, "a publish cost a victim (G2)"
    return str(job.lease.published)


def commit(world: World, job: Job) -> str:
    """It ends well, and its conversation goes on from there."""
    lease, talk = job.lease, job.talk
    while world.prefill(lease) != "done":
        pass
    answer = world.some_tokens(5)
    world.decode(lease, answer)
    made = answer[: max(0, lease.frontier - len(lease.prompt))]
    world.engine.execute(lease.checkpoint("frontier", position=lease.frontier))
    key = lease.commit()
    if lease.prompt.tokens.tolist() == talk.tokens:
        talk.ends = sorted({*talk.ends, len(talk.tokens)})
        talk.tokens = [*talk.tokens, *made, *world.some_tokens(5)]
    return f"{lease.retained} as {key and key[:8]}"


def commit_now(world: World, job: Job) -> str:
    """It ends where it stands."""
    key = job.lease.commit()
    return str(key and key[:8])


def cancel(world: World, job: Job) -> str:
    """It is given up."""
    job.lease.release()
    return f"at {job.lease.frontier}"


def lie(world: World, job: Job) -> str:
    """The engine's position is not the pool's: nothing of the request is retained (G5)."""
    lease, off = job.lease, world.pick(-1, 1)
    count, fresh = world.pool.stats().counters.position_mismatches, lease.doubt is None
    if world.random.random() < 0.5:
        assert lease.commit(position=lease.frontier + off) is None
    else:
        assert lease.checkpoint("turn", position=lease.frontier + off) == []
    assert world.pool.stats().counters.position_mismatches == count + fresh
    return f"by {off}"


def quarantine(world: World, job: Job) -> str:
    """What it resumed from turned out bad."""
    job.lease.quarantine()
    return f"from {job.lease.start}"


STEPS_OF_A_REQUEST: dict[str, Step] = {
    "prefill": lambda world, job: world.prefill(job.lease),
    "odd prefill": odd_prefill,
    "decode": lambda world, job: world.decode(job.lease, world.some_tokens(4)),
    "truncate": lambda world, job: world.truncate(job.lease, world.random.randint(1, 5)),
    "extend": lambda world, job: str(world.watch.extend(job.lease, world.random.randint(0, 9))),
    "checkpoint": checkpoint,
    "publish": publish,
    "commit": commit,
    "commit now": commit_now,
    "cancel": cancel,
    "fail": lambda world, job: world.fail(job, world.random.randrange(5)),
    "lie": lie,
    "quarantine": quarantine,
}
ACTIONS: dict[str, Action] = {
    "ask": ask,
    "hog": hog,
    "rehearse": rehearse,
    "read": read,
    "wait": wait,
    "clear": clear,
    **{name: verb(name) for name in ("pin", "unpin", "release", "evict")},
}
ALWAYS = ("ask", "prefill", "commit")


# -- running ---------------------------------------------------------------------------------


def draw_weights(source: random.Random) -> dict[str, int]:
    """Return how frequent each kind of action is under a seed; some never happen."""
    weights = {name: source.choice(WEIGHTS) for name in (*ACTIONS, *STEPS_OF_A_REQUEST)}
    for name in ("clear", "quarantine", "lie"):
        weights[name] = min(weights[name], 1)
    return weights | {name: max(4, weights[name]) for name in ALWAYS}


def act(world: World, name: str) -> str:
    """Do one thing; a step of a request where none runs is a new request instead."""
    if name in ACTIONS:
        return ACTIONS[name](world)
    if not world.jobs:
        return ask(world)
    return STEPS_OF_A_REQUEST[name](world, world.pick(*world.jobs))


def simulate(seed: int, *, steps: int = STEPS, policy: Callable[[], Policy] | None = None) -> Life:
    """Live through a seed; the same seed does the same thing again.

    ``policy``: a factory that replaces the seed's own policy.

    Raises:
        SimulationFailed: its cause is the finding.
    """
    digest = hashlib.blake2b(digest_size=8)
    actions: Counter[str] = Counter()
    victims = 0
    for room in ROOMS:
        log: list[str] = []
        try:
            world = World.drawn(seed, room=room, policy=policy)
            weights = draw_weights(world.random)
            for _ in range(steps):
                (name,) = world.random.choices(list(weights), list(weights.values()))
                log.append(f"{len(log)} {name}")
                log[-1] += f": {act(world, name)}"
                world.audit()
                actions[name] += 1
            log.append(f"{len(log)} wind down")
            world.wind_down()
        except Exception as error:
            step = len(log) - 1
            raise SimulationFailed(seed, room=room, step=step, steps=steps, log=log) from error
        victims += world.watch.count
        events = [(e.kind, e.entry, e.key, e.positions, e.bytes) for e in world.pool.events()]
        digest.update("\n".join([*log, repr(events)]).encode())
    return Life(
        seed=seed,
        steps=steps * len(ROOMS),
        victims=victims,
        actions=actions,
        digest=digest.hexdigest(),
    )


def lives(
    seeds: Iterable[int], *, minutes: float | None = None, steps: int = STEPS
) -> Iterator[Life]:
    """Live through seeds until the time is up; raises as `simulate` does, at the first failure."""
    until = None if minutes is None else time.monotonic() + 60 * minutes
    for seed in seeds:
        if until is not None and time.monotonic() >= until:
            return
        yield simulate(seed, steps=steps)
