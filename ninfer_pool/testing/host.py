"""A pool and an engine's adapter driven as an engine's own loop would, each step checked.

`Host` admits requests, `Running` is one of them. What the adapter writes is watched, and every
logit is compared with a cold run of the same tokens on an engine of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

import numpy as np

from ninfer_pool.core.lease import Lease
from ninfer_pool.core.operations import LoadImage, Operation, SaveImage
from ninfer_pool.core.planner import canonical_cuts
from ninfer_pool.core.pool import PrefixPool
from ninfer_pool.core.prompt import Prompt
from ninfer_pool.testing.adapter import EngineAdapter, Logits, execute
from ninfer_pool.testing.watched import Watched

TOLERANCE = 1e-3
"""The RMS ratio allowed where the bits may differ and the adapter states no ``tolerance``."""


class ConformanceError(AssertionError):
    """An adapter broke a guarantee. The message names it, its position, and the replay."""


class EngineFailure(RuntimeError):
    """Raised in the engine's place, to see what a failure leaves behind."""


def tolerance_of(engine: EngineAdapter) -> float:
    """Return the RMS ratio that an adapter states where bits may differ."""
    return float(getattr(engine, "tolerance", TOLERANCE))


def axes(prompt: Prompt, positions: Any, begin: int, end: int) -> Any:
    """Return the axes (3, end - begin) of positions that may be past the prompt's end."""
    count = len(prompt)
    if positions is None:
        return np.tile(np.arange(begin, end, dtype=np.int32), (3, 1))
    later = np.arange(1, max(0, end - count) + 1, dtype=np.int32)
    whole = np.concatenate((positions, positions[:, -1:] + later), axis=1)
    return whole[:, begin:end]


class Cold:
    """Runs prompts from nothing, in one lane and on pages of its own; remembers the logits."""

    def __init__(self, engine: EngineAdapter) -> None:
        self.engine = engine
        self.known: dict[Any, dict[int, Logits]] = {}

    def run(
        self,
        prompt: Prompt,
        answer: Sequence[int] = (),
        *,
        positions: Any = None,
        extra: Sequence[int] = (),
        lane: int = 0,
        table: Any = None,
    ) -> dict[int, Logits]:
        """Return the logits after each cut of the prompt and each token of the answer.

        ``extra`` are cuts next to the canonical ones; ``table`` None: the slab's last pages.
        """
        raw = None if positions is None else positions.tobytes()
        known = (bytes(prompt.buffer), prompt.boundaries, tuple(answer), raw, tuple(extra), lane)
        if table is None and known in self.known:
            return self.known[known]
        count = -(-(len(prompt) + len(answer)) // self.engine.config.page_tokens)
        pages = np.arange(self.engine.config.num_pages, dtype=np.int32)[::-1][:count].copy()
        made = self._run(prompt, answer, positions, extra, lane, pages if table is None else table)
        self.known[known] = made
        return made

    def _run(
        self, prompt: Prompt, answer: Any, positions: Any, extra: Any, lane: int, table: Any
    ) -> dict[int, Logits]:
        config, count = self.engine.config, len(prompt)
        cuts = canonical_cuts(prompt.boundaries, grid=config.grid, min_chunk=0)
        inside = {*cuts, *(cut for cut in extra if 0 < cut < count)}
        ends = sorted({*inside, *range(config.grid, count, config.grid), count})
        made: dict[int, Logits] = {}
        self.engine.reset(lane)
        for begin, end in zip([0, *ends[:-1]], ends, strict=True):
            along = self.options(axes(prompt, positions, begin, end), lane, begin, table)
            made[end] = np.array(self.engine.prefill(prompt.tokens[begin:end], **along))
        for at, token in enumerate(answer, count):
            along = self.options(axes(prompt, positions, at, at + 1), lane, at, table)
            made[at + 1] = np.array(self.engine.decode(token, **along))
        return made

    def options(self, positions: Any, lane: int, begin: int, table: Any) -> dict[str, Any]:
        """Return the options of a call next to its tokens."""
        along: dict[str, Any] = {"lane": lane, "begin": begin, "table": table}
        if getattr(self.engine, "takes_positions", False):
            along["positions"] = positions
        return along

    def after(self, token: int, begin: int, *, lane: int, table: Sequence[int]) -> Logits:
        """Decode one token where a lane stands."""
        at = np.full((3, 1), begin, dtype=np.int32)
        pages = np.array(table, dtype=np.int32)
        return np.array(self.engine.decode(token, **self.options(at, lane, begin, pages)))


def compare(hot: Logits, cold: Logits, *, tolerance: float) -> str | None:
    """Return how ``hot`` differs from ``cold`` by more than an RMS ratio; None: it does not.

    Tolerance 0 means every bit. Else the greedy choice must be the same, too, unless the best
    two are closer than the tolerance.
    """
    mine, wanted = np.asarray(hot, dtype=np.float64), np.asarray(cold, dtype=np.float64)
    if np.array_equal(hot, cold):
        return None
    if not np.isfinite(mine).all():
        return "logits are not finite numbers: bytes were read that were never written"
    scale = float(np.sqrt((wanted**2).mean())) or 1.0
    ratio = float(np.sqrt(((mine - wanted) ** 2).mean())) / scale
    if ratio > tolerance or not tolerance:
        allowed = f"at most {tolerance:g} is allowed" if tolerance else "not one bit is allowed"
        return f"logits differ by an RMS ratio of {ratio:.3g}, {allowed}"
    best, chosen = int(wanted.argmax()), int(mine.argmax())
    if wanted[best] - wanted[chosen] > 2 * tolerance * scale * np.sqrt(len(wanted)):
        return f"the greedy choice is token {chosen} and not {best}"
    return None


class Host:
    """One pool over one engine.

    Args:
        engine: the adapter. cold: runs of its like from nothing.
        about: the guarantee that is being tested, and how to replay: for messages.
        tolerance: the RMS ratio allowed where bits may differ; None: the adapter's.
        changes: of the pool's config; a pool may be smaller than its engine.
    """

    def __init__(
        self,
        engine: EngineAdapter,
        cold: Cold,
        *,
        about: str,
        tolerance: float | None = None,
        **changes: Any,
    ) -> None:
        self.raw = engine
        self.tolerance = tolerance_of(engine) if tolerance is None else tolerance
        self.cold = cold
        self.about = about
        self.config = engine.config.replace(
            **{
                "minimum_tokens": 0,
                "min_chunk": 0,
                "max_entries": None,
                "retained_bytes": None,
                **changes,
            }
        )
        self.pool = PrefixPool(self.config)
        self.engine = Watched(engine, self.pool, self.fail)
        self.running: list[Running] = []

    def fail(self, what: str) -> NoReturn:
        """Raise with the finding and the guarantee under test."""
        raise ConformanceError(f"{self.about}\n  {what}")

    def poison(self) -> None:
        """Make free pages unusable, where the adapter can."""
        fill = getattr(self.raw, "poison_page", None)
        if fill is not None:
            free = self.pool.state.ledger.free_pages().tolist()
            self.engine.forget(free)
            for page in free:
                fill(page)

    def begin(
        self,
        tokens: Sequence[int],
        *,
        positions: Any = None,
        namespace: Any = None,
        boundaries: Any = (),
        **options: Any,
    ) -> Running | None:
        """Acquire, without restoring yet; None: no room or no lane."""
        self.poison()
        prompt = Prompt(
            list(tokens),
            namespace=namespace or self.raw.namespace,
            boundaries=boundaries,
            positions=positions,
        )
        lease = self.pool.acquire(prompt, **options)
        if lease is None:
            return None
        assert isinstance(lease, Lease)
        self.running.append(Running(self, lease, positions))
        return self.running[-1]

    def admit(self, tokens: Sequence[int], *, start: int | None = None, **options: Any) -> Running:
        """As `begin`, for a request that must be admitted, and resumed at ``start`` if given."""
        running = self.begin(tokens, **options)
        if running is None:
            self.fail(f"refused: {self.pool.last_refusal}")
        if start is not None and running.lease.start != start:
            why = running.lease.explanation
            running.cancel()
            self.fail(f"resumed at {running.lease.start}, not at {start}: {why}")
        return running

    def serve(
        self,
        tokens: Sequence[int],
        *,
        answer: Sequence[int] = (),
        start: int | None = None,
        **options: Any,
    ) -> Running:
        """Serve one request whole; it must be resumed at ``start``, where that is given."""
        running = self.admit(tokens, start=start, **options)
        with running:
            running.restore()
            while running.step():
                pass
            running.decode(answer)
            running.finish()
        return running

    def audit(self) -> None:
        """Recount the pool and look at every page that is held."""
        try:
            self.pool.check()
        except AssertionError as error:
            self.fail(f"the pool's counts: {error}")
        self.engine.look("nothing at all", ())


class Running:
    """One request that runs in a lane. Leaving its block without `finish` cancels it."""

    def __init__(self, host: Host, lease: Lease, positions: Any) -> None:
        self.host = host
        self.lease = lease
        self.positions = positions
        self.answer: list[int] = []
        self.seen: dict[int, Logits] = {}
        self.image: tuple[int, tuple[int, ...]] = (0, ())
        """Where the last image that was saved or loaded stands, and its pages."""

    def __enter__(self) -> Running:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if not self.lease.ended:
            self.lease.release()
        self.host.running.remove(self)

    @property
    def tokens(self) -> list[int]:
        """The prompt and the generated tokens."""
        return [*self.lease.prompt.tokens.tolist(), *self.answer]

    def restore(self) -> None:
        """Bring the lane to where it resumes; quarantine what it resumes from if that fails."""
        lease = self.lease
        try:
            self.execute(lease.restore())
        except EngineFailure:
            lease.quarantine()
            raise
        if lease.start and self.host.config.end_logits:
            self.seen[lease.start] = self.host.engine.tail_logits(lease.lane)

    def step(self) -> bool:
        """Prefill one chunk and take its checkpoint; False: the prompt is done."""
        lease = self.lease
        chunk = next(iter(lease.chunks()), None)
        if chunk is None:
            return False
        tokens = lease.prompt.tokens[chunk.begin : chunk.end]
        self.compute(self.host.engine.prefill, tokens, tokens)
        if chunk.checkpoint:
            self.execute(lease.checkpoint(chunk.checkpoint, position=chunk.end))
        return True

    def execute(self, operations: Sequence[Operation]) -> None:
        """Have the engine carry them out, and remember where its image is."""
        execute(self.host.engine, operations)
        for operation in operations:
            if isinstance(operation, SaveImage | LoadImage):
                self.image = self.lease.frontier, operation.pages

    def compute(self, call: Callable[..., Logits], argument: Any, tokens: Any) -> None:
        """Advance past tokens and have the engine compute them."""
        lease, begin = self.lease, self.lease.frontier
        lease.advance(tokens)
        options: dict[str, Any] = {"lane": lease.lane, "begin": begin, "table": lease.pages}
        if getattr(self.host.raw, "takes_positions", False):
            options["positions"] = axes(lease.prompt, self.positions, begin, lease.frontier)
        self.seen[lease.frontier] = call(argument, **options)

    def decode(self, answer: Sequence[int]) -> bool:
        """Decode the given tokens, with more room asked for where needed; False: no room."""
        for token in answer:
            if self.lease.frontier >= self.lease.reserved and not self.lease.extend(1):
                return False
            self.compute(self.host.engine.decode, token, [token])
            self.answer.append(token)
        return True

    def draft(self, drafts: Sequence[int], *, accepted: int) -> bool:
        """Decode drafts and take all but the first ``accepted`` back; False: no room for it.

        The prompt must have been prefilled whole.
        """
        engine, lease, begin = self.host.engine, self.lease, self.lease.frontier
        roll_back = getattr(self.host.raw, "roll_back", None)
        by_image = roll_back is None and self.host.config.image_bytes
        if by_image:
            self.execute(lease.checkpoint("frontier", position=begin))
        if (by_image and self.image[0] != begin) or not self.decode(drafts):
            return False
        keep = begin if by_image else begin + accepted
        lease.truncate(keep)
        self.forget(keep)
        if by_image:
            engine.load_image(lease.lane, self.image[1])
            return self.decode(drafts[:accepted])
        if roll_back is not None:
            engine.roll_back(lease.lane, keep)
        return True

    def forget(self, position: int) -> None:
        """Discard all logits past ``position``."""
        del self.answer[position - len(self.lease.prompt) :]
        self.seen = {at: logits for at, logits in self.seen.items() if at <= position}

    def finish(self) -> str | None:
        """Take the frontier's checkpoint, commit, and compare all that was computed."""
        lease = self.lease
        self.execute(lease.checkpoint("frontier", position=lease.frontier))
        key = lease.commit()
        self.verify()
        self.host.audit()
        return key

    def cancel(self) -> None:
        """Give the request up."""
        with self:
            pass

    def verify(self) -> None:
        """Compare every logit with a cold run: bit by bit where the plan is exact."""
        lease = self.lease
        exact = {
            at for at in self.seen if lease.resumed_exact and (lease.planned or at == lease.start)
        }
        others = self.seen.keys() - exact
        self._compare(exact, extra=(), tolerance=0.0)
        if others:
            inside = sorted(at for at in others if at < len(lease.prompt))
            self._compare(others, extra=inside, tolerance=self.host.tolerance)

    def _compare(self, places: Collection[int], *, extra: Sequence[int], tolerance: float) -> None:
        lease, host = self.lease, self.host
        cold = host.cold.run(lease.prompt, self.answer, positions=self.positions, extra=extra)
        for at in sorted(cold.keys() & places):
            wrong = compare(self.seen[at], cold[at], tolerance=tolerance)
            if wrong:
                where = f"resumed at {lease.start} ({lease.reuse}) in lane {lease.lane}"
                host.fail(f"after {at} of {len(self.tokens)} tokens, {where}: {wrong}")
