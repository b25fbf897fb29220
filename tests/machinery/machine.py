"""The stateful machine: any sequence of calls, with every answer, count and victim judged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ninfer_pool.core.config import PoolConfig
from ninfer_pool.core.lease import Lease, Pending
from ninfer_pool.core.policy import Policy
from ninfer_pool.core.pool import PrefixPool
from ninfer_pool.core.prompt import Prompt
from ninfer_pool.testing.oracle import OraclePool
from ninfer_pool.testing.symbolic import SymbolicEngine, audit
from ninfer_pool.testing.watch import Watch
from tests.machinery import strategies

OPTIONS = st.fixed_dictionaries(
    {"reserve_tokens": st.integers(0, 9)},
    optional={
        "read": st.booleans(),
        "retain": st.booleans(),
        "pin": st.booleans(),
        "priority": st.integers(-1, 1),
        "ttl_seconds": st.integers(1, 5),
        "lane": st.integers(0, 0),
        "exact": st.booleans(),
        "claim": st.booleans(),
        "wait_for_shared": st.booleans(),
    },
)
PICK = st.integers(0, 2)


class PoolMachine(RuleBasedStateMachine):
    """Several lanes at once against the symbolic engine; the oracle is asked at each lookup.

    After each step everything is recounted, every checkpoint's content is compared with what its
    tokens mean, and each victim must have been legal, next in order and needed. Subclass it, or
    see `pool_machine`:

    >>> class Mine(PoolMachine):
    ...     policy = "gdsf"
    >>> TestMine = Mine.TestCase
    """

    config: ClassVar[PoolConfig | None] = None
    """The pool's, with the machine's own clock; None: drawn anew for each run."""
    policy: ClassVar[Any] = None
    """A name or a factory, instead of the config's; a plain function as a `staticmethod`."""
    roomy: ClassVar[bool] = False
    """The drawn config has room for everything: then nothing may ever go (G1)."""

    @initialize(data=st.data())
    def setup(self, data: st.DataObject) -> None:
        """Make the pool and the engine."""
        self.now = 0.0
        config = self.config
        if config is None:
            config = data.draw(strategies.configs(tight=not self.roomy))
        changes: dict[str, Any] = {"clock": lambda: self.now}
        if self.policy is not None:
            changes["policy"] = self.policy
        config = config.replace(**changes)
        self.pool = PrefixPool(config)
        self.watch = Watch(self.pool)
        self.engine = SymbolicEngine(config)
        self.leases: list[Lease] = []
        self.kept: set[Any] = set()
        self.removed = False

    def lease(self, pick: int) -> Lease:
        """One of the leases that run."""
        return self.leases[pick % len(self.leases)]

    def forget_ended(self) -> None:
        """Keep the leases that run."""
        self.leases = [lease for lease in self.leases if not lease.ended]

    # -- asking ----------------------------------------------------------------------------

    @rule(prompt=strategies.prompts())
    def lookup(self, prompt: Prompt) -> None:
        """A lookup finds what brute force finds, in order."""
        matches = self.pool.lookup(prompt)
        positions = [match.position for match in matches]
        assert positions == sorted(set(positions))
        if self.pool.state.catalog.deadlines:
            return
        wanted = OraclePool.of(self.pool).predict(prompt)
        if self.pool.config.image_bytes and wanted.position:
            last = matches[-1]
            assert (last.position, last.exact) == (wanted.position, wanted.exact)
            assert last.kind in wanted.kinds
            assert last.position == matches.deepest

    @rule(prompt=strategies.prompts(), read=st.booleans(), exact=st.booleans())
    def explain(self, prompt: Prompt, read: bool, exact: bool) -> None:  # noqa: FBT001
        """An explanation agrees with brute force."""
        config = self.pool.config
        if (
            self.pool.state.catalog.deadlines
            or not config.image_bytes
            or len(self.pool.state.ghosts)
        ):
            return
        seen = self.pool.explain(prompt, read=read, exact=exact)
        wanted = OraclePool.of(self.pool).predict(prompt, read=read, exact=exact)
        assert (seen.resumable, seen.exact) == (wanted.position, wanted.exact)
        assert seen.reason in wanted.reasons
        assert seen.matched == wanted.matched
        assert seen.lost == seen.matched - seen.resumable

    # -- requests --------------------------------------------------------------------------

    @rule(prompt=strategies.prompts(), options=OPTIONS)
    def acquire(self, prompt: Prompt, options: dict[str, Any]) -> None:
        """A hit restores what the prompt means, in the deepest place that brute force knows."""
        self.acquire_now(prompt, options)

    def acquire_now(self, prompt: Prompt, options: dict[str, Any]) -> None:
        """See `acquire`."""
        expiring = bool(self.pool.state.catalog.deadlines)
        self.removed |= expiring
        asked = {"read": options.get("read", True), "exact": options.get("exact", False)}
        wanted = OraclePool.of(self.pool).predict(prompt, **asked)
        lease = self.watch.acquire(prompt, **options)
        if lease is None:
            assert self.pool.last_refusal is not None
            return
        if isinstance(lease, Pending):
            known = wanted.position if self.pool.config.affinity == "prefer" else 0
            assert known < lease.position <= len(prompt)
            assert lease.lease in self.leases
            return
        self.leases.append(lease)
        self.engine.bind(lease.lane, prompt)
        self.engine.execute(lease.restore())
        self.engine.verify(lease)
        simple = self.pool.config.image_bytes and self.pool.config.affinity == "prefer"
        if simple and not expiring and lease.reason != "no_room":
            found = (lease.start, lease.explanation.exact)
            assert found == (wanted.position, wanted.exact)

    @rule(
        pick=st.integers(0, 99),
        back=st.integers(0, 6),
        more=st.lists(strategies.TOKENS, max_size=5),
        options=OPTIONS,
        whole=st.booleans(),
    )
    def follow_up(
        self,
        pick: int,
        back: int,
        more: list[int],
        options: dict[str, Any],
        whole: bool,  # noqa: FBT001
    ) -> None:
        """A request that goes on from what is retained, or parts from it near its end."""
        plain = [r for r in OraclePool.of(self.pool).records if not any(c[1] for c in r.cells)]
        if not plain:
            return
        record = plain[pick % len(plain)]
        tokens = [token for token, _ in record.cells][: max(1, record.position - back)]
        prompt = Prompt([*tokens, *more], namespace=record.namespace)
        self.acquire_now(prompt, dict(options))
        if whole:
            self.finish_now(prompt, more)

    @rule(prompts=st.lists(strategies.prompts(), min_size=1, max_size=5), options=OPTIONS)
    def rush(self, prompts: list[Prompt], options: dict[str, Any]) -> None:
        """Whole requests one after the other, so that there is too little room soon."""
        for prompt in prompts:
            self.acquire_now(prompt, dict(options))
            self.finish_now(prompt, [])

    def finish_now(self, prompt: Prompt, answer: list[int]) -> None:
        """Prefill, decode and commit the request that was admitted last, if it is this one."""
        if not self.leases or self.leases[-1].prompt is not prompt:
            return
        lease = self.leases[-1]
        self.prefill_now(lease, steps=9)
        for token in answer:
            if lease.frontier < lease.reserved or self.watch.extend(lease, 1):
                self.write(lease, token)
        self.engine.execute(lease.checkpoint("frontier", position=lease.frontier))
        lease.commit()
        self.watch.settle()
        self.forget_ended()

    @precondition(lambda self: self.leases)
    @rule(pick=PICK, steps=st.integers(1, 4))
    def prefill(self, pick: int, steps: int) -> None:
        """Chunks as planned, each with its checkpoint."""
        self.prefill_now(self.lease(pick), steps=steps)

    def prefill_now(self, lease: Lease, *, steps: int) -> None:
        """See `prefill`."""
        for _ in range(steps):
            chunk = next(iter(lease.chunks()), None)
            if chunk is None:
                return
            tokens = lease.prompt.tokens[chunk.begin : chunk.end]
            lease.advance(tokens)
            self.engine.prefill(tokens, lease.pages, chunk.begin, lease.lane)
            if chunk.checkpoint:
                self.engine.execute(lease.checkpoint(chunk.checkpoint, position=chunk.end))

    @precondition(lambda self: self.leases)
    @rule(pick=PICK, count=st.integers(1, 3))
    def prefill_part(self, pick: int, count: int) -> None:
        """A piece that no plan cuts."""
        lease = self.lease(pick)
        tokens = lease.prompt.tokens[lease.frontier : lease.frontier + count]
        if len(tokens):
            begin = lease.frontier
            lease.advance(tokens)
            self.engine.prefill(tokens, lease.pages, begin, lease.lane)

    @precondition(lambda self: self.leases)
    @rule(pick=PICK, tokens=st.lists(strategies.TOKENS, min_size=1, max_size=4))
    def decode(self, pick: int, tokens: list[int]) -> None:
        """Generated tokens, as far as the reserve goes."""
        lease = self.lease(pick)
        if lease.frontier < len(lease.prompt):
            return
        if not self.pool.config.image_bytes and self.engine.position(lease.lane) < lease.frontier:
            return
        for token in tokens:
            if lease.frontier < lease.reserved or self.watch.extend(lease, 1):
                self.write(lease, token)

    def write(self, lease: Lease, token: int) -> None:
        """Decode one token."""
        begin = lease.frontier
        lease.advance([token])
        self.engine.prefill([token], lease.pages, begin, lease.lane)

    @precondition(lambda self: self.leases)
    @rule(pick=PICK, kind=st.sampled_from(("frontier", "turn", "system", "junction")))
    def checkpoint(self, pick: int, kind: str) -> None:
        """A checkpoint wherever the lease stands."""
        lease = self.lease(pick)
        if lease.frontier:
            self.engine.execute(lease.checkpoint(kind, position=lease.frontier))

    @precondition(lambda self: self.leases)
    @rule(pick=PICK, back=st.integers(1, 5))
    def truncate(self, pick: int, back: int) -> None:
        """Rejected drafts."""
        lease = self.lease(pick)
        shown = [mark.position for mark in lease.taken[: lease.published]]
        position = max([lease.start, *shown, lease.frontier - back])
        lease.truncate(position)
        self.engine.roll_back(lease.lane, position)

    @precondition(lambda self: self.leases)
    @rule(pick=PICK, tokens=st.integers(0, 9))
    def extend(self, pick: int, tokens: int) -> None:
        """More room, or a no that changes nothing."""
        lease = self.lease(pick)
        before = lease.reserved
        done = self.watch.extend(lease, tokens)
        assert lease.reserved == before + tokens * done

    @precondition(lambda self: self.leases)
    @rule(pick=PICK)
    def publish(self, pick: int) -> None:
        """What was taken so far is seen by others."""
        self.lease(pick).publish()

    @precondition(lambda self: self.leases)
    @rule(pick=PICK, frontier=st.booleans())
    def commit(self, pick: int, frontier: bool) -> None:  # noqa: FBT001
        """The end of a request."""
        lease = self.lease(pick)
        if frontier and lease.frontier:
            self.engine.execute(lease.checkpoint("frontier", position=lease.frontier))
        key = lease.commit()
        if key is not None and lease.options.pin:
            assert all(entry.pinned for entry in self.pool.find(key))
        self.forget_ended()

    @precondition(lambda self: self.leases)
    @rule(pick=PICK)
    def abort(self, pick: int) -> None:
        """A request that is given up."""
        with self.lease(pick):
            pass
        self.forget_ended()

    @precondition(lambda self: self.leases)
    @rule(pick=PICK, off=st.sampled_from((-1, 1)), at_commit=st.booleans())
    def wrong_position(self, pick: int, off: int, at_commit: bool) -> None:  # noqa: FBT001
        """The engine's position is not the pool's: nothing of the lease is retained."""
        lease = self.lease(pick)
        count = self.pool.stats().counters.position_mismatches
        fresh = lease.doubt is None
        if at_commit:
            assert lease.commit(position=lease.frontier + off) is None
        else:
            assert lease.checkpoint("turn", position=lease.frontier + off) == []
        assert self.pool.stats().counters.position_mismatches == count + fresh
        self.removed = True
        self.forget_ended()

    @precondition(lambda self: self.leases)
    @rule(pick=PICK)
    def quarantine(self, pick: int) -> None:
        """A restore that failed."""
        self.lease(pick).quarantine()
        self.removed = True
        self.forget_ended()

    # -- verbs -----------------------------------------------------------------------------

    @rule(pick=PICK, verb=st.sampled_from(("pin", "unpin", "release", "evict")))
    def verb(self, pick: int, verb: str) -> None:
        """Verbs that take a key act on the one entry that it names."""
        entries = self.pool.entries()
        if not entries:
            assert not getattr(self.pool, verb)("unknown")
            return
        entry = entries[pick % len(entries)]
        protected = entry.pinned
        done = getattr(self.pool, verb)(entry.key)
        if verb == "evict":
            assert not (protected and done)
            self.removed |= done

    @rule()
    def clear(self) -> None:
        """Everything that nothing protects goes."""
        self.pool.clear()
        self.removed = True
        assert self.leases or all(entry.pinned for entry in self.pool.entries())

    @rule(seconds=st.integers(1, 3))
    def wait(self, seconds: int) -> None:
        """Time passes."""
        self.now += seconds

    @invariant()
    def everything_adds_up(self) -> None:
        """Counts, budget, and the content of every checkpoint."""
        if not hasattr(self, "pool"):
            return
        self.watch.settle()
        self.pool.check()
        audit(self.pool, self.engine)
        if self.roomy:
            now = OraclePool.of(self.pool).keys()
            assert self.removed or self.kept <= now, "a checkpoint went though there was room (G1)"
            self.kept, self.removed = now, False

    def teardown(self) -> None:
        """When all leases are given up and all pins taken off, every page comes back."""
        if not hasattr(self, "pool"):
            return
        for lease in self.leases:
            lease.release()
        for entry in self.pool.entries():
            self.pool.unpin(entry.key)
        self.pool.clear()
        self.pool.check()
        stats = self.pool.stats()
        assert (stats.retained_bytes, stats.checkpoints, stats.leases) == (0, 0, 0)
        assert stats.pages_free == stats.pages_total
        assert not self.pool.state.catalog.roots


def pool_machine(
    *,
    config: PoolConfig | None = None,
    policy: str | Callable[[], Policy] | None = None,
    roomy: bool = False,
) -> type[PoolMachine]:
    """Return a `PoolMachine` for one config or policy; see its attributes.

    Run it with `hypothesis.stateful.run_state_machine_as_test`, or collect its ``TestCase``.
    """
    chosen = staticmethod(policy) if callable(policy) else policy
    return type("Machine", (PoolMachine,), {"config": config, "policy": chosen, "roomy": roomy})
