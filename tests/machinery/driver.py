"""A pool and a symbolic engine driven together, as an engine's own loop would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ninfer_pool.core.config import PoolConfig
from ninfer_pool.core.identity import Namespace
from ninfer_pool.core.lease import Lease
from ninfer_pool.core.pool import PrefixPool
from ninfer_pool.core.prompt import Prompt
from ninfer_pool.core.results import Explanation
from ninfer_pool.testing.symbolic import SymbolicEngine, audit

SPACE = Namespace(weights="sha256:1", kv_dtype="int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What became of one request."""

    start: int
    prefilled: int
    reuse: str
    exact: bool
    lane: int
    key: str | None
    explanation: Explanation
    needed_bytes: int
    evicted_bytes: int
    victim_max_bytes: int

    @property
    def reason(self) -> str:
        """Why it resumed where it did."""
        return self.explanation.reason


class Driver:
    """Serves prompts; after each, unless told not to, audits every checkpoint and every count.

    >>> driver = Driver(PoolConfig(num_pages=64, page_bytes=16, image_bytes=16, page_tokens=4))
    >>> driver.serve(range(10)).start, driver.serve(range(12)).start
    (0, 10)
    """

    def __init__(
        self, config: PoolConfig, *, namespace: Namespace = SPACE, audits: bool = True
    ) -> None:
        self.pool = PrefixPool(config)
        self.engine = SymbolicEngine(config)
        self.namespace = namespace
        self.audits = audits

    def prompt(self, tokens: Any, **options: Any) -> Prompt:
        """Return a prompt in this driver's namespace; `tokens` any iterable of ids."""
        if isinstance(tokens, Prompt):
            return tokens
        options.setdefault("namespace", self.namespace)
        return Prompt([int(token) for token in tokens], **options)

    def begin(self, tokens: Any, *, boundaries: Any = (), **options: Any) -> Lease | None:
        """Acquire and restore, with what was restored verified."""
        prompt = self.prompt(tokens, boundaries=boundaries)
        lease = self.pool.acquire(prompt, **options)
        if lease is None:
            return None
        assert isinstance(lease, Lease)
        self.engine.bind(lease.lane, prompt)
        self.engine.execute(lease.restore())
        self.engine.verify(lease)
        return lease

    def prefill(self, lease: Lease, *, chunks: int | None = None, publish: bool = False) -> int:
        """Prefill up to ``chunks`` chunks (None: all); return the tokens computed."""
        tokens, done = lease.prompt.tokens, 0
        for number, chunk in enumerate(lease.chunks()):
            if number == chunks:
                break
            part = tokens[chunk.begin : chunk.end]
            lease.advance(part)
            self.engine.prefill(part, lease.pages, chunk.begin, lease.lane)
            if chunk.checkpoint:
                self.engine.execute(lease.checkpoint(chunk.checkpoint, position=chunk.end))
            if publish:
                lease.publish()
            done += len(part)
        return done

    def decode(self, lease: Lease, answer: Sequence[int]) -> None:
        """Decode the given tokens."""
        for token in answer:
            self.engine.step(token, lease.pages, lease.lane)
            lease.advance([token])

    def finish(self, lease: Lease) -> str | None:
        """Take the frontier's checkpoint and commit."""
        position = lease.frontier
        self.engine.execute(lease.checkpoint("frontier", position=position))
        return lease.commit()

    def serve(
        self, tokens: Any, *, answer: Sequence[int] = (), publish: bool = False, **options: Any
    ) -> Served:
        """Serve one request whole and audit the pool; `ask` where it may be refused."""
        served = self.ask(tokens, answer=answer, publish=publish, **options)
        assert served is not None, self.pool.last_refusal
        return served

    def ask(
        self, tokens: Any, *, answer: Sequence[int] = (), publish: bool = False, **options: Any
    ) -> Served | None:
        """Serve one request; None where it is refused."""
        options.setdefault("reserve_tokens", len(answer))
        lease = self.begin(tokens, **options)
        if lease is None:
            self._audit()
            return None
        with lease:
            prefilled = self.prefill(lease, publish=publish)
            self.decode(lease, answer)
            key = self.finish(lease)
        self._audit()
        return Served(
            start=lease.start,
            prefilled=prefilled,
            reuse=lease.reuse,
            exact=lease.exact,
            lane=lease.lane,
            key=key,
            explanation=lease.explanation,
            needed_bytes=lease.needed_bytes,
            evicted_bytes=lease.evicted_bytes,
            victim_max_bytes=lease.victim_max_bytes,
        )

    def _audit(self) -> None:
        if self.audits:
            self.audit()

    def audit(self) -> int:
        """Recount everything and verify every checkpoint's content; return how many there are."""
        self.pool.check()
        return audit(self.pool, self.engine)

    def depth(self, tokens: Any, **options: Any) -> int:
        """Return how deep a prompt could be resumed now. Changes nothing."""
        return self.pool.lookup(self.prompt(tokens, **options)).deepest
