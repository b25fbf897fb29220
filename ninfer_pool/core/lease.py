"""A request's hold on what it reads and writes, from its plan to its commit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from ninfer_pool.core import lifecycle
from ninfer_pool.core.entry import Checkpoint, Table
from ninfer_pool.core.grant import Grant, Wishes
from ninfer_pool.core.ledger import Pages
from ninfer_pool.core.operations import LoadImage, Operation, ResetLane, SaveImage
from ninfer_pool.core.planner import Chunk, plan_chunks
from ninfer_pool.core.prompt import KINDS, Prompt, check_ids, flat_bytes
from ninfer_pool.core.results import Explanation, reuse_of
from ninfer_pool.errors import LeaseError

if TYPE_CHECKING:
    from ninfer_pool.core.pool import PrefixPool


class Guard:
    """Holds the pool's lock for a lease that is still running; else raises `LeaseError`."""

    __slots__ = ("_lease",)

    def __init__(self, lease: Lease) -> None:
        self._lease = lease

    def __enter__(self) -> None:
        self._lease.pool.lock.acquire()
        if self._lease.ended:
            self._lease.pool.lock.release()
            raise LeaseError("lease: it has ended; acquire a new one")

    def __exit__(self, *_: object) -> None:
        self._lease.pool.lock.release()


class Lease:
    """One running request. Made by `PrefixPool.acquire`; use it as a context manager.

    Leaving the block without `commit` gives everything back: the pool is as it was, save that
    what was evicted to admit the request stays evicted and what was published stays (G6).
    After its end every method raises `LeaseError`.
    """

    def __init__(self, pool: PrefixPool, prompt: Prompt, wishes: Wishes, grant: Grant) -> None:
        self.pool = pool
        self._prompt = prompt
        self._generated = bytearray()
        self._canonical = grant.exact
        self._open = True
        self._reused = grant.start
        self.wishes = wishes
        self.grant = grant
        self.taken: list[Checkpoint] = []
        """Checkpoints taken, ascending; the first `published` are visible to others already."""
        self.published = 0
        self.reserved = len(prompt) + grant.reserve_tokens
        """Positions that there is room for."""
        self.doubt: str | None = None
        """Why nothing of this lease will be retained, if so."""
        self.frontier = grant.start
        """Tokens that have KV and state, by what the engine has told."""
        self.key: str | None = None
        """The key of what was committed."""
        self.retained = 0
        """How deep the deepest checkpoint lies that it left; 0: it left none."""

    # -- what was granted ------------------------------------------------------------------

    @property
    def prompt(self) -> Prompt:
        """The request's prompt."""
        return self._prompt

    @property
    def lane(self) -> int:
        """The lane that this request runs in."""
        return self.grant.lane

    @property
    def pages(self) -> Pages:
        """The lane's row of the page table: int32 ids, position p lies in ``pages[p // 64]``."""
        return self.grant.table

    @property
    def start(self) -> int:
        """Tokens reused: the position resumed from."""
        return self._reused

    @property
    def reuse(self) -> str:
        """``full_reset``, ``append_frontier`` or ``restore_<kind>_checkpoint``."""
        return reuse_of(self.explanation.kind if self.start else None)

    @property
    def exact(self) -> bool:
        """What was resumed, and what `chunks` computes, has the bits of a cold run by the plan."""
        return self.grant.exact and (self.grant.planned or not self.start)

    @property
    def explanation(self) -> Explanation:
        """Why it resumed where it did, as `PrefixPool.explain` told at admission."""
        return self.grant.explanation

    @property
    def reason(self) -> str:
        """The explanation's reason."""
        return self.grant.explanation.reason

    @property
    def claimed(self) -> bool:
        """The entry is being continued in place, without a copy of its last page."""
        return self.grant.claimed

    @property
    def ended(self) -> bool:
        """Committed, left or failed."""
        return not self._open

    @property
    def needed_bytes(self) -> int:
        """Bytes that this request's admission and commit needed so far (G2)."""
        return self.grant.bill.needed * self.pool.config.page_bytes

    @property
    def evicted_bytes(self) -> int:
        """Bytes that became free for it."""
        return self.grant.bill.evicted * self.pool.config.page_bytes

    @property
    def victim_max_bytes(self) -> int:
        """The largest single victim among them."""
        return self.grant.bill.largest * self.pool.config.page_bytes

    @property
    def planned_captures(self) -> list[tuple[int, str]]:
        """``(position, kind)`` of the checkpoints that `chunks` will ask for, ascending."""
        return sorted(self.grant.captures)

    # -- what the life cycle asks ----------------------------------------------------------

    @property
    def essential(self) -> int:
        """The position without which the same prompt asked again would not hit (G3)."""
        end = len(self._prompt)
        planned = [position for position, _ in self.grant.captures]
        return end if self.pool.config.end_logits or end - 1 not in planned else end - 1

    @property
    def essential_ahead(self) -> bool:
        """The essential checkpoint is still to come: one image stays reserved for it."""
        planned = [position for position, _ in self.grant.captures]
        return self.frontier < self.essential and self.essential in planned

    @property
    def unpublished(self) -> list[Checkpoint]:
        """Checkpoints taken that nobody else can see yet."""
        return self.taken[self.published :]

    def has_checkpoint(self, position: int) -> bool:
        """Say whether one was taken there, or resumed from."""
        source = self.grant.source
        resumed = source is not None and source.position == position == self.start
        return resumed or bool(self.taken and self.taken[-1].position == position)

    def parts(self, begin: int, end: int) -> list[memoryview]:
        """Return the token bytes ``[begin, end)``, the prompt's and the generated ones apart."""
        inside = len(self._prompt)
        mine = self._prompt.buffer[4 * begin : 4 * min(end, inside)]
        made = memoryview(self._generated)[4 * max(begin - inside, 0) : 4 * max(end - inside, 0)]
        return [mine, made]

    def close(self) -> None:
        """Let nothing more be done with it."""
        self._open = False

    # -- what the engine does --------------------------------------------------------------

    def restore(self) -> list[Operation]:
        """Return the operations that bring the lane to `start`; `ResetLane` alone for 0."""
        with Guard(self):
            source = self.grant.source
            if source is None:
                return [ResetLane(self.lane)]
            operations: list[Operation] = list(self.grant.copies)
            if source.image >= 0:
                operations.append(LoadImage(self._image_pages(source.image), self.lane))
            return operations

    def chunks(self) -> Iterator[Chunk]:
        """Yield the prefill steps from the frontier to the prompt's end; none on a full hit."""
        grid = self.pool.config.grid
        cuts, captures = self.grant.cuts, self.grant.captures
        if self.frontier < len(self._prompt):
            yield from plan_chunks(
                self._prompt, start=self.frontier, cuts=cuts, grid=grid, captures=captures
            )

    def advance(self, tokens: Any) -> None:
        """Tell that the lane takes these int32 tokens next; the frontier moves past them.

        Raises:
            LeaseError: tokens that are not the prompt's, or past the reserve. Nothing changed.
        """
        raw = flat_bytes(tokens, "tokens")
        with Guard(self):
            begin, end = self.frontier, self.frontier + len(raw) // 4
            if end > self.reserved:
                raise LeaseError(
                    f"advance: to {end}; {self.reserved} positions are reserved, see extend()"
                )
            inside = max(0, min(end, len(self._prompt)) - begin)
            check_ids(raw[4 * inside :], "tokens")  # those of the prompt were checked with it
            if inside:
                self._check_prompt(raw[: 4 * inside], begin)
                self._follow_cuts(begin, begin + inside)
            self._generated += raw[4 * inside :]
            self.frontier = end

    def _check_prompt(self, raw: memoryview, begin: int) -> None:
        mine = self._prompt.buffer[4 * begin : 4 * begin + len(raw)]
        if mine.tobytes() != raw.tobytes():  # a copy and memcmp: views compare item by item
            one, other = (np.frombuffer(each, dtype=np.int32) for each in (mine, raw))
            at = begin + int((one != other).argmax())
            raise LeaseError(f"advance: the token at {at} is not the prompt's")

    def _follow_cuts(self, begin: int, end: int) -> None:
        grid, cuts = self.pool.config.grid, self.grant.cuts
        later = cuts[bisect_right(cuts, begin) :][:1]
        stop = min((begin // grid + 1) * grid, *later, len(self._prompt))
        self._canonical = self._canonical and end == stop

    def extend(self, tokens: int) -> bool:
        """Reserve room for ``tokens`` more; False where there is none, with nothing changed.

        Raises:
            LeaseError: not an int of 0 or more.
        """
        if type(tokens) is not int or tokens < 0:
            raise LeaseError(f"extend: {tokens!r}; needs an int of 0 or more")
        with Guard(self):
            return lifecycle.extend(self.pool, self, tokens)

    def truncate(self, position: int) -> None:
        """Back over tokens that were not accepted: the frontier is ``position`` again.

        Checkpoints past it are dropped. The engine rolls its own state back.

        Raises:
            LeaseError: not between what was resumed or published and the frontier.
        """
        with Guard(self):
            published = [mark.position for mark in self.taken[: self.published]]
            least = max([self.start, *published])
            if type(position) is not int or not least <= position <= self.frontier:
                raise LeaseError(
                    f"truncate: {position!r}; needs an int of {least} to {self.frontier}"
                )
            prompt_tokens = len(self._prompt)
            del self._generated[4 * max(position - prompt_tokens, 0) :]
            if position < min(self.frontier, prompt_tokens):
                self._canonical = False
            self.frontier = position
            while self.taken and self.taken[-1].position > position:
                image = self.taken.pop().image
                if image >= 0:
                    self.grant.spare.append(image)

    def checkpoint(self, kind: str, *, position: int) -> list[Operation]:
        """Take a checkpoint at the frontier; return the operations that write it.

        ``position`` is where the engine says its state stands. Where that is not the frontier
        nothing of this lease is retained any more, what it resumed from is quarantined, and it
        is counted. A checkpoint that does not fit is skipped and counted, never a reason to fail
        (G8); so is one inside a media span, or where there is one already.

        Raises:
            LeaseError: an unknown kind.
        """
        if kind not in KINDS:
            raise LeaseError(f"kind: {kind!r}; needs one of {', '.join(KINDS)}")
        with Guard(self):
            if position != self.frontier:
                why = f"checkpoint at {position}, frontier {self.frontier}"
                lifecycle.distrust(self.pool, self, why)
            if self.doubt is not None or not self.wishes.retain:
                return []
            image = lifecycle.capture(self.pool, self)
            if image is None:
                return []
            self.taken.append(self._make(kind, image))
            return [SaveImage(self.lane, self._image_pages(image))] if image >= 0 else []

    def _image_pages(self, image: int) -> tuple[int, ...]:
        return tuple(self.pool.retained.ledger.pages_of_image(image).tolist())

    def _make(self, kind: str, image: int) -> Checkpoint:
        position, cuts, config = self.frontier, self.grant.cuts, self.pool.config
        size = config.page_tokens
        on_cut = not config.image_bytes or position % config.grid == 0 or position in cuts
        exact = self._canonical and on_cut and position <= len(self._prompt)
        return Checkpoint(
            position=position,
            kind=kind,
            cuts=cuts[: bisect_right(cuts, position)] if exact else None,
            table=Table(self.pages),
            tail=int(self.pages[position // size]) if position % size else -1,
            image=image,
            lane=self.lane,
            tick=0,
        )

    def publish(self) -> None:
        """Make the checkpoints taken so far visible to others before the commit.

        Call it once their operations have been carried out (G11). Without effect where nothing
        is to be retained, or where something else would have to go first (G2): then they are
        seen from the commit on.
        """
        with Guard(self):
            lifecycle.publish(self.pool, self)

    def commit(self, *, position: int | None = None) -> str | None:
        """Retain what was taken up to the accepted frontier and end the lease.

        ``position``, if stated, must be the frontier (see `checkpoint`). Returns the key of the
        sequence retained, or None where nothing was: not asked for, in doubt, or no room.
        """
        with Guard(self):
            return lifecycle.commit(self.pool, self, position)

    def quarantine(self) -> None:
        """Tell that restoring failed: what was resumed is never offered again; the lease ends."""
        with Guard(self):
            lifecycle.quarantine(self.pool, self)

    def release(self) -> None:
        """Give everything back without a commit; nothing happens if the lease has ended."""
        with suppress(LeaseError), Guard(self):
            lifecycle.end(self.pool, self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
