"""One seed's world: a pool, an engine that may fail, conversations, and their faults.

Everything that happens is drawn from one `random.Random`, so a seed replays exactly. After each
step everything is recounted and compared: see `World.audit`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ninfer_pool.core import radix
from ninfer_pool.core.config import PoolConfig
from ninfer_pool.core.identity import Namespace
from ninfer_pool.core.lease import Lease, Pending
from ninfer_pool.core.policy import POLICIES, Policy
from ninfer_pool.core.pool import PrefixPool
from ninfer_pool.core.prompt import Prompt, payload_fields
from ninfer_pool.testing.faults import FaultyEngine, OperationFailed
from ninfer_pool.testing.oracle import OraclePool
from ninfer_pool.testing.symbolic import EngineFault, audit
from ninfer_pool.testing.watch import Watch, picture

SPACES = tuple(
    Namespace(weights="a", kv_dtype=kv_dtype, salt=salt)
    for kv_dtype, salt in (("int8", None), ("int8", None), ("int8", "tenant"), ("bf16", None))
)
LEARNS_FROM_ORDER = ("s3fifo",)
"""Policies whose order changes by reading it."""
MOST_TOKENS = 48


@dataclass(slots=True, kw_only=True)
class Talk:
    """A conversation: what its next prompt goes on from."""

    namespace: Namespace
    tokens: list[int]
    ends: list[int] = field(default_factory=list)
    media: list[tuple[int, int, str | None]] = field(default_factory=list)
    shifted: int | None = None
    """From where on one axis of the positions is one further."""
    typed: int | None = None
    """From where on tokens are of another type."""

    def prompt(self, count: int) -> Prompt:
        """Return a prompt of its first ``count`` tokens."""
        options: dict[str, Any] = {}
        if self.shifted is not None:
            axes = np.tile(np.arange(count, dtype=np.int32), (3, 1))
            axes[1, self.shifted :] += 1
            options["positions"] = axes
        if self.typed is not None:
            options["token_types"] = (np.arange(count) >= self.typed).astype(np.int32)
        media = [span for span in self.media if span[1] <= count]
        inside = [at for begin, end, _ in media for at in range(begin + 1, end)]
        ends = [at for at in self.ends if at <= count and at not in inside]
        kinds = ["system", *["turn"] * len(ends)]
        return Prompt(
            self.tokens[:count],
            namespace=self.namespace,
            boundaries=list(zip(ends, kinds, strict=False)),
            media=media,
            **options,
        )


@dataclass(slots=True, kw_only=True)
class Job:
    """A request that runs."""

    lease: Lease
    talk: Talk


def draw_config(source: random.Random) -> PoolConfig:
    """Return a pool of some tens of small pages."""
    choice = source.choice
    return PoolConfig(
        num_pages=source.randint(24, 90),
        page_bytes=16,
        image_bytes=choice((0, 16, 32, 48)),
        page_tokens=4,
        grid=choice((8, 8, 16)),
        lanes=choice((1, 2, 3, 3, 3, 3)),
        max_entries=choice((None, None, 1, 2, 4)),
        policy=choice(sorted(POLICIES)),
        affinity=choice(("prefer", "prefer", "prefer", "strict")),
        end_logits=choice((True, False)),
        min_chunk=choice((0, 0, 3)),
        minimum_tokens=choice((0, 0, 5)),
        ghosts=choice((0, 3, 64)),
    )


class World:
    """A pool with a clock of its own, an engine, and conversations drawn from ``source``."""

    def __init__(self, config: PoolConfig, source: random.Random) -> None:
        self.random = source
        self.now = 0.0
        self.config = config.replace(clock=lambda: self.now)
        self.pool = PrefixPool(self.config)
        self.watch = Watch(self.pool)
        self.engine = FaultyEngine(self.config)
        self.jobs: list[Job] = []
        self.waiting: list[tuple[Talk, Prompt]] = []
        self.stems = [[self.random.randrange(3, 6) for _ in range(20)] for _ in range(2)]
        self.talks: list[Talk] = []

    @classmethod
    def drawn(
        cls, seed: int, *, room: float = 1.0, policy: Callable[[], Policy] | None = None
    ) -> World:
        """Return a seed's world with a share of the drawn pool's pages, ``room``, 0 to 1.

        ``policy``: a factory that replaces the drawn policy.
        """
        source = random.Random(seed)
        config = draw_config(source)
        least = 1 + config.image_pages
        pages = max(least, int(room * config.num_pages))
        retained = max(least, int(pages * source.choice((1, 1, 0.5))))
        config = config.replace(num_pages=pages, retained_bytes=config.page_bytes * retained)
        return cls(config if policy is None else config.replace(policy=policy), source)

    # -- prompts ---------------------------------------------------------------------------

    def pick(self, *values: Any) -> Any:
        """Return one of ``values``."""
        return self.random.choice(values)

    def new_talk(self) -> Talk:
        """Begin a conversation: a stem of others, or a part of it, then tokens of its own."""
        stem = self.pick(*self.stems)[: self.pick(0, 4, 8, 9, 16, 20)]
        tokens = [*stem, *self.some_tokens(9)]
        talk = Talk(namespace=self.pick(*SPACES), tokens=tokens, ends=[len(stem)] if stem else [])
        if self.random.random() < 0.3:
            begin = self.random.randrange(len(tokens))
            end = self.random.randint(begin + 1, len(tokens))
            talk.media = [(begin, end, self.pick("x", "y", "x", None))]
        talk.shifted = self.pick(None, None, None, None, 3)
        talk.typed = self.pick(None, None, None, None, 5)
        self.talks = [*self.talks[-7:], talk]
        return talk

    def some_tokens(self, most: int) -> list[int]:
        """Return one to ``most`` tokens of an alphabet of three."""
        return [self.random.randrange(3) for _ in range(self.random.randint(1, most))]

    def next_prompt(self) -> tuple[Talk, Prompt]:
        """Go on with a conversation, begin one, repeat one, or part from it."""
        new = not self.talks or self.random.random() < 0.3
        talk = self.new_talk() if new else self.pick(*self.talks)
        if len(talk.tokens) > MOST_TOKENS:
            talk.tokens = talk.tokens[: self.random.randint(1, 20)]
            talk.ends, talk.media = [at for at in talk.ends if at <= len(talk.tokens)][:1], []
        count = len(talk.tokens)
        if not new and self.random.random() < 0.25:
            count = self.random.randint(1, count)
        return talk, talk.prompt(count)

    # -- requests --------------------------------------------------------------------------

    def options(self) -> dict[str, Any]:
        """Return options of `PrefixPool.acquire`, each seldom."""
        rare = {
            "read": False,
            "retain": False,
            "pin": True,
            "priority": self.pick(-1, 1),
            "ttl_seconds": self.random.randint(1, 5),
            "lane": 0,
            "near": self.config.lanes - 1,
            "exact": True,
            "claim": True,
            "wait_for_shared": True,
        }
        chosen = {name: value for name, value in rare.items() if self.random.random() < 0.12}
        return {"reserve_tokens": self.random.randint(0, 9), **chosen}

    def acquire(self, prompt: Prompt, **options: Any) -> Lease | Pending | None:
        """Acquire, with the answer compared with brute force where that is certain."""
        asked = {"read": options.get("read", True), "exact": options.get("exact", False)}
        wanted = OraclePool.of(self.pool).predict(prompt, **asked)
        expiring = bool(self.pool.state.catalog.deadlines)
        lease = self.watch.acquire(prompt, **options)
        if isinstance(lease, Lease):
            free = self.config.image_bytes and self.config.affinity == "prefer"
            if free and not expiring and lease.reason != "no_room":
                found = (lease.start, lease.explanation.exact)
                assert found == (wanted.position, wanted.exact), f"{found} instead of {wanted}"
        elif lease is None:
            assert self.pool.last_refusal is not None
        else:
            known = wanted.position if self.config.affinity == "prefer" else 0
            assert known < lease.position <= len(prompt), f"{lease.position}, {wanted} known"
            assert not lease.lease.ended
        return lease

    def restore(self, lease: Lease) -> None:
        """Bring the lane to where the lease starts, and compare its content."""
        self.engine.bind(lease.lane, lease.prompt)
        self.engine.execute(lease.restore())
        self.engine.verify(lease)

    def prefill(self, lease: Lease) -> str:
        """Run the next chunk of the plan and take its checkpoint."""
        chunk = next(iter(lease.chunks()), None)
        if chunk is None:
            return "done"
        self.compute(lease, lease.prompt.tokens[chunk.begin : chunk.end])
        if chunk.checkpoint:
            self.engine.execute(lease.checkpoint(chunk.checkpoint, position=chunk.end))
        return f"to {chunk.end} {chunk.checkpoint}"

    def compute(self, lease: Lease, tokens: Any) -> None:
        """Compute these tokens in the lane, in one call."""
        begin = lease.frontier
        lease.advance(tokens)
        self.engine.prefill(tokens, lease.pages, begin, lease.lane)

    def decode(self, lease: Lease, tokens: Sequence[int]) -> str:
        """Generate tokens, as far as there is room."""
        made = 0
        while lease.frontier >= len(lease.prompt) and made < len(tokens):
            if lease.frontier >= lease.reserved and not self.watch.extend(lease, 1):
                break
            self.compute(lease, [tokens[made]])
            made += 1
        return f"{made} tokens"

    def truncate(self, lease: Lease, back: int) -> str:
        """Take drafts back."""
        shown = [mark.position for mark in lease.taken[: lease.published]]
        position = max([lease.start, *shown, lease.frontier - back])
        lease.truncate(position)
        self.engine.roll_back(lease.lane, position)
        return f"to {position}"

    def walk(self, lease: Lease, steps: int) -> int:
        """Do the first ``steps`` things of a request's life; return how many there were."""
        self.restore(lease)
        done = 1
        while done < steps and self.prefill(lease) != "done":
            done += 1
        rest: list[Callable[[], object]] = [
            lambda: self.decode(lease, [1, 2]),
            lambda: self.truncate(lease, 1),
            lambda: self.watch.extend(lease, 3),
        ]
        for act in rest[: max(0, steps - done)]:
            act()
            done += 1
        return done

    def fail(self, job: Job, operations: int) -> str:
        """Go on with a request until an operation fails; then release the request."""
        self.engine.failing = operations
        try:
            while self.prefill(job.lease) != "done":
                pass
            lease = job.lease
            self.engine.execute(lease.checkpoint("frontier", position=lease.frontier))
        except OperationFailed as failure:
            job.lease.release()
            return str(failure)
        finally:
            self.engine.failing = None
        return "nothing failed"

    # -- judging ---------------------------------------------------------------------------

    def picture(self) -> Any:
        """Return what the future depends on."""
        policy = self.config.policy
        ordered = isinstance(policy, str) and policy not in LEARNS_FROM_ORDER
        return picture(self.pool, order=ordered)

    def audit(self) -> None:
        """Recount everything; compare every checkpoint and every running request's pages with
        what their tokens mean; judge the victims."""
        self.jobs = [job for job in self.jobs if not job.lease.ended]
        self.watch.settle()
        self.pool.check()
        audit(self.pool, self.engine)
        self._check_media()
        for job in self.jobs if self.config.image_bytes else ():
            lease = job.lease
            if self.engine.rows(lease.pages, lease.frontier) != self.engine.chain(lease.lane):
                raise EngineFault(f"lane {lease.lane}'s pages changed under it")

    def _check_media(self) -> None:
        for root in self.pool.state.catalog.roots.values():
            for node in root.subtree():
                for mark in node.checkpoints:
                    for begin, payload in radix.attributes_to(node, mark.position):
                        media = payload_fields(payload).get(ord("M"))
                        length = int.from_bytes(media[:8], "little") if media else 0
                        inside = begin < mark.position < begin + length
                        assert not inside, f"{mark!r} is inside a media span"

    def wind_down(self) -> None:
        """Give everything up; every page must come back."""
        for job in self.jobs:
            job.lease.release()
        for entry in self.pool.entries():
            self.pool.unpin(entry.key)
        self.pool.clear()
        self.audit()
        stats = self.pool.stats()
        assert (stats.retained_bytes, stats.checkpoints, stats.leases) == (0, 0, 0)
        assert stats.pages_free == stats.pages_total, "pages are lost"
