"""Looking a prompt up: the deepest checkpoint that it may resume. Nothing here changes (G7)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, overload

from ninfer_pool.core import radix
from ninfer_pool.core.config import PoolConfig
from ninfer_pool.core.entry import Checkpoint, Node
from ninfer_pool.core.identity import Namespace
from ninfer_pool.core.planner import canonical_cuts
from ninfer_pool.core.prompt import Boundary, Prompt
from ninfer_pool.core.radix import Step
from ninfer_pool.core.results import Match


class Searchable(Protocol):
    """A catalog of the device or of a tier, as a lookup reads it."""

    @property
    def config(self) -> PoolConfig:
        """The pool's."""

    @property
    def roots(self) -> dict[Namespace, Node]:
        """The index: one root per namespace."""


class SearchableTier(Searchable, Protocol):
    """A tier below the device, as a lookup reads it."""

    @property
    def name(self) -> str:
        """``host`` or ``disk``."""

    def cheaper_than_prefill(self, position: int, *, above: int) -> bool:
        """Return whether restoring up to ``position`` is quicker than prefill from ``above``."""


@dataclass(slots=True, kw_only=True)
class LookupFilter:
    """Which checkpoints a request may resume."""

    read: bool = True
    exact: bool = False
    now: float | None = None
    """The caller's clock, where entries may expire."""
    lane: int | None = None
    """The only lane whose checkpoints may be resumed, where state cannot move."""

    def accepts(self, checkpoint: Checkpoint) -> bool:
        """Return whether a checkpoint has not expired and may be resumed in the lane."""
        if self.lane is not None and checkpoint.lane != self.lane:
            return False
        return checkpoint.expires is None or self.now is None or checkpoint.expires > self.now


@dataclass(slots=True, kw_only=True)
class Lookup:
    """The best checkpoint for a prompt, and how far the prompt agrees with anything retained."""

    prompt: Prompt
    cuts: tuple[int, ...] | None
    steps: list[Step]
    """The prompt's path in the index."""
    matched: int = 0
    checkpoint: Checkpoint | None = None
    position: int = 0
    exact: bool = True
    kind: str | None = None
    tier: str = "device"

    def give_up(self) -> None:
        """Resume nothing."""
        self.checkpoint, self.position, self.exact, self.kind = None, 0, True, None


def deepest_resume(config: PoolConfig, prompt: Prompt) -> int:
    """Return the deepest position at which ``prompt`` could be resumed at all."""
    end = prompt.length if config.end_logits else prompt.length - 1
    return min(end, prompt.shareable)


def prompt_cuts(config: PoolConfig, prompt: Prompt) -> tuple[int, ...]:
    """Return the canonical cuts of a prompt in this pool; see `canonical_cuts`."""
    if not prompt.boundaries:
        return ()
    return canonical_cuts(prompt.boundaries, grid=config.grid, min_chunk=config.min_chunk)


def walk_prompt(place: Searchable, prompt: Prompt) -> list[Step]:
    """Return the path of a prompt in an index; empty where its namespace is not there."""
    root = place.roots.get(prompt.namespace)
    return [] if root is None else radix.walk(root, prompt.buffer, prompt.attributes)


def find(
    place: Searchable, prompt: Prompt, cuts: tuple[int, ...] | None, filter: LookupFilter
) -> Lookup:
    """Return the deepest checkpoint that ``prompt`` may resume, preferring exact ones at a tie.

    ``cuts`` are the prompt's canonical ones; None: exactness does not matter.
    """
    steps = walk_prompt(place, prompt)
    lookup = Lookup(prompt=prompt, cuts=cuts, steps=steps)
    if not steps:
        return lookup
    lookup.matched = min(steps[-1][1], prompt.shareable)
    if not filter.read:
        return lookup
    config = place.config
    limit = deepest_resume(config, prompt)
    if not config.image_bytes:
        return _find_token(config, lookup, filter, limit)
    for checkpoint in radix.checkpoints_upto(steps, limit):
        if lookup.checkpoint is not None and checkpoint.position < lookup.position:
            break
        exact = cuts is None or checkpoint.exact_for(cuts, config.grid, checkpoint.position)
        better = exact or lookup.checkpoint is None
        if better and (exact or not filter.exact) and filter.accepts(checkpoint):
            lookup.checkpoint, lookup.position = checkpoint, checkpoint.position
            lookup.exact, lookup.kind = exact, checkpoint.kind
            if exact:
                break
    return lookup


def find_anywhere(
    place: Searchable,
    tiers: Sequence[SearchableTier],
    prompt: Prompt,
    cuts: tuple[int, ...] | None,
    filter: LookupFilter,
) -> Lookup:
    """Return the result of `find`, or a deeper one in a tier that is cheaper than prefill."""
    best = find(place, prompt, cuts, filter)
    for tier in tiers if filter.read else ():
        found = find(tier, prompt, cuts, filter)
        deeper = found.checkpoint is not None and found.position > best.position
        if deeper and tier.cheaper_than_prefill(found.position, above=best.position):
            found.tier = tier.name
            best = found
    return best


def _find_token(config: PoolConfig, lookup: Lookup, filter: LookupFilter, limit: int) -> Lookup:
    """Plain attention: any token position below a checkpoint can be resumed."""
    grid, cuts = config.grid, lookup.cuts or ()
    position = _outside_media(lookup.prompt, min(limit, lookup.matched))
    for checkpoint in radix.covering(lookup.steps, position):
        at = position
        if filter.exact:
            at = _last_exact(checkpoint, cuts, grid, position)
        if at > 0 and filter.accepts(checkpoint):
            lookup.checkpoint, lookup.position = checkpoint, at
            lookup.exact = checkpoint.exact_for(cuts, grid, at)
            lookup.kind = checkpoint.kind if at == checkpoint.position else "junction"
            break
    return lookup


def _outside_media(prompt: Prompt, position: int) -> int:
    for span in prompt.media:
        if span.begin < position < span.end:
            return span.begin
    return position


def _last_exact(checkpoint: Checkpoint, cuts: tuple[int, ...], grid: int, position: int) -> int:
    stops = {position // grid * grid, *cuts[: bisect_right(cuts, position)]}
    ordered = sorted(stops, reverse=True)
    return next((stop for stop in ordered if checkpoint.exact_for(cuts, grid, stop)), 0)


def shared_tokens(prompt: Prompt, other: Prompt) -> int:
    """Return how many leading tokens two prompts share, attributes included. O(matched)."""
    if prompt.namespace != other.namespace:
        return 0
    node = Node(
        parent=None, start=0, tokens=bytearray(other.buffer), attributes=list(other.attributes)
    )
    upto = radix.walk(node, prompt.buffer, prompt.attributes)[-1][1]
    return min(upto, prompt.shareable, other.shareable)


class Matches(Sequence[Match]):
    """The positions where a prompt can be resumed, ascending; computed when first read.

    It stays as it was when `PrefixPool.lookup` returned, whatever happens to the pool.
    """

    __slots__ = ("_boundaries", "_config", "_items", "_now", "_runs", "_token", "deepest")

    def __init__(
        self,
        config: PoolConfig,
        boundaries: Sequence[Boundary],
        runs: list[tuple[list[Checkpoint], int]],
        deepest: int,
        *,
        now: float | None = None,
        token: Lookup | None = None,
    ) -> None:
        self.deepest = deepest
        """The deepest position that can be resumed; 0 for none."""
        self._runs = runs
        self._boundaries = boundaries
        self._config = config
        self._now = now
        self._token = token
        self._items: list[Match] | None = None

    def _all(self) -> list[Match]:
        if self._items is None:
            config = self._config
            cuts = canonical_cuts(self._boundaries, grid=config.grid, min_chunk=config.min_chunk)
            filter = LookupFilter(now=self._now)
            best: dict[int, Match] = {}
            for checkpoints, count in self._runs:
                for checkpoint in checkpoints[:count]:
                    position = checkpoint.position
                    exact = checkpoint.exact_for(cuts, config.grid, position)
                    known = best.get(position)
                    better = known is None or (exact and not known.exact)
                    if better and filter.accepts(checkpoint):
                        best[position] = _match(config, position, checkpoint.kind, exact=exact)
            token = self._token
            if token is not None and token.position and token.position not in best:
                kind, at = token.kind or "junction", token.position
                best[at] = _match(config, at, kind, exact=token.exact)
            self._items = [best[position] for position in sorted(best)]
        return self._items

    def __len__(self) -> int:
        return len(self._all())

    @overload
    def __getitem__(self, index: int) -> Match: ...
    @overload
    def __getitem__(self, index: slice) -> list[Match]: ...
    def __getitem__(self, index: int | slice) -> Match | list[Match]:
        return self._all()[index]

    def __iter__(self) -> Iterator[Match]:
        return iter(self._all())

    def __bool__(self) -> bool:
        return self.deepest > 0

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (Matches, list, tuple)):
            return self._all() == list(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._all())


def _match(config: PoolConfig, position: int, kind: str, *, exact: bool) -> Match:
    """Return a match with its bytes; a plain attention model has no image."""
    pages = -(-position // config.page_tokens) + config.image_pages
    return Match(position, kind, exact, pages * config.page_bytes)


def matches(
    place: Searchable, tiers: Sequence[SearchableTier], prompt: Prompt, *, now: float | None
) -> Matches:
    """Return where ``prompt`` can be resumed. O(matched bytes); the list is computed later."""
    config = place.config
    steps = walk_prompt(place, prompt)
    for tier in tiers:
        steps = steps + walk_prompt(tier, prompt)
    if not steps:
        return Matches(config, prompt.boundaries, [], 0)
    limit = deepest_resume(config, prompt)
    runs = []
    deepest = 0
    for node, upto in steps:
        positions = node.positions
        count = bisect_right(positions, upto if upto < limit else limit) if positions else 0
        if count:
            runs.append((node.checkpoints, count))
            if positions[count - 1] > deepest:
                deepest = positions[count - 1]
    if now is None and config.image_bytes:
        return Matches(config, prompt.boundaries, runs, deepest)
    cuts = None if config.image_bytes else prompt_cuts(config, prompt)
    found = find_anywhere(place, tiers, prompt, cuts, LookupFilter(now=now))
    token = None if config.image_bytes else found
    return Matches(config, prompt.boundaries, runs, found.position, now=now, token=token)
