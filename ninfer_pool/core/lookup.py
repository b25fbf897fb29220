"""What of a prompt is retained, and why no more. Nothing here changes anything (G7)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from ninfer_pool.core import radix as index
from ninfer_pool.core.config import PoolConfig
from ninfer_pool.core.entry import Checkpoint
from ninfer_pool.core.ghosts import Ghost
from ninfer_pool.core.hooks import Searchable
from ninfer_pool.core.planner import canonical_cuts
from ninfer_pool.core.prompt import Boundary, Prompt, payload_fields
from ninfer_pool.core.radix import Hop, Path
from ninfer_pool.core.results import Explanation, Match
from ninfer_pool.core.retained import Retained

FEW_TOKENS = 8
"""Tokens that no checkpoint is advised for: all prompts of a template begin alike."""


@dataclass(slots=True, kw_only=True)
class Rules:
    """What a request allows to be resumed."""

    read: bool = True
    exact: bool = False
    now: float | None = None
    """The caller's clock, where entries may expire."""
    lane: int | None = None
    """The only lane whose checkpoints may be resumed, where state cannot move."""


@dataclass(slots=True, kw_only=True)
class Found:
    """The best checkpoint for a prompt, and how far the prompt agrees with anything retained."""

    hops: list[Hop]
    matched: int
    mark: Checkpoint | None = None
    position: int = 0
    exact: bool = True
    kind: str | None = None
    tier: str = "device"


def deepest_resume(config: PoolConfig, prompt: Prompt) -> int:
    """Return the deepest position at which ``prompt`` could be resumed at all."""
    end = len(prompt) if config.end_logits else len(prompt) - 1
    return min(end, prompt.shareable)


def usable(mark: Checkpoint, rules: Rules) -> bool:
    """Say whether a checkpoint has not expired, and may be resumed in the lane asked for."""
    if rules.lane is not None and mark.lane != rules.lane:
        return False
    return mark.expires is None or rules.now is None or mark.expires > rules.now


def find(retained: Searchable, prompt: Prompt, cuts: tuple[int, ...] | None, rules: Rules) -> Found:
    """Return the deepest checkpoint that ``prompt`` may resume, preferring exact ones at a tie.

    ``cuts`` are the prompt's canonical ones; None: do not ask what is exact.
    """
    hops = retained.walk(prompt.namespace, prompt.buffer, prompt.attributes)
    found = Found(hops=hops, matched=min(hops[-1][1], prompt.shareable) if hops else 0)
    if not rules.read or not hops:
        return found
    config = retained.config
    limit = deepest_resume(config, prompt)
    if not config.image_bytes:
        return _find_token(retained, prompt, cuts, rules, found, limit)
    for mark in index.marks_upto(hops, limit):
        if found.mark is not None and mark.position < found.position:
            break
        exact = cuts is None or mark.exact_for(cuts, config.grid, mark.position)
        if usable(mark, rules) and (exact or not rules.exact) and (exact or found.mark is None):
            found.mark, found.position, found.exact = mark, mark.position, exact
            found.kind = mark.kind
            if exact:
                break
    return found


def find_anywhere(
    retained: Retained, prompt: Prompt, cuts: tuple[int, ...] | None, rules: Rules
) -> Found:
    """Return what `find` does, or what lies deeper in a tier below and pays to bring back."""
    best = find(retained, prompt, cuts, rules)
    for tier in retained.tiers if rules.read else ():
        found = find(tier, prompt, cuts, rules)
        deeper = found.mark is not None and found.position > best.position
        if deeper and tier.pays(found.position, above=best.position):
            found.tier = tier.name
            best = found
    return best


def _find_token(
    retained: Searchable,
    prompt: Prompt,
    cuts: tuple[int, ...] | None,
    rules: Rules,
    found: Found,
    limit: int,
) -> Found:
    """Plain attention: any token position below a checkpoint can be resumed."""
    grid = retained.config.grid
    cuts = cuts or ()
    position = _outside_media(prompt, min(limit, found.matched))
    for mark in covering(found.hops, position):
        at = position
        if rules.exact:
            at = _last_exact(mark, cuts, grid, position)
        if at > 0 and usable(mark, rules):
            found.mark, found.position = mark, at
            found.exact = mark.exact_for(cuts, grid, at)
            found.kind = mark.kind if at == mark.position else "junction"
            break
    return found


def _outside_media(prompt: Prompt, position: int) -> int:
    for span in prompt.media:
        if span.begin < position < span.end:
            return span.begin
    return position


def _last_exact(mark: Checkpoint, cuts: tuple[int, ...], grid: int, position: int) -> int:
    stops = {position // grid * grid, *cuts[: bisect_right(cuts, position)]}
    return next((s for s in sorted(stops, reverse=True) if mark.exact_for(cuts, grid, s)), 0)


def covering(hops: Sequence[Hop], position: int) -> Iterator[Checkpoint]:
    """Yield checkpoints whose KV covers ``[0, position)`` of the way of ``hops``."""
    if position <= 0:
        return
    path = next(path for path, upto in hops if position <= upto)
    yield from path.marks[bisect_left(path.positions, position) :]
    for child in path.children():
        if child.start >= position:
            for below in child.subtree():
                yield from below.marks


class Matches(Sequence[Match]):
    """The positions where a prompt can be resumed, ascending; worked out when first read.

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
        token: Found | None = None,
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
            rules = Rules(now=self._now)
            best: dict[int, Match] = {}
            for marks, count in self._runs:
                for mark in marks[:count]:
                    exact = mark.exact_for(cuts, config.grid, mark.position)
                    known = best.get(mark.position)
                    if usable(mark, rules) and (known is None or (exact and not known.exact)):
                        best[mark.position] = _match(config, mark, exact=exact)
            token = self._token
            if token is not None and token.position and token.position not in best:
                best[token.position] = _token_match(config, token)
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


def lookup(retained: Retained, prompt: Prompt, now: float | None) -> Matches:
    """Return where ``prompt`` can be resumed. O(matched bytes); what is listed is found later.

    The prompt remembers the answer for as long as the index stays as it is.
    """
    seen: tuple[Retained, int, Matches] | None = prompt.seen
    if seen is not None and seen[0] is retained and seen[1] == retained.version and now is None:
        return seen[2]
    matches = _look(retained, prompt, now)
    if now is None:
        prompt.seen = (retained, retained.version, matches)
    return matches


def _look(retained: Retained, prompt: Prompt, now: float | None) -> Matches:
    config = retained.config
    root = retained.roots.get(prompt.namespace)
    if root is None and not retained.tiers:
        return Matches(config, prompt.boundaries, [], 0)
    hops = index.walk(root, prompt.buffer, prompt.attributes) if root is not None else []
    for tier in retained.tiers:
        hops = hops + tier.walk(prompt.namespace, prompt.buffer, prompt.attributes)
    limit = deepest_resume(config, prompt)
    runs = []
    deepest = 0
    for path, upto in hops:
        positions = path.positions
        count = bisect_right(positions, upto if upto < limit else limit) if positions else 0
        if count:
            runs.append((path.marks, count))
            if positions[count - 1] > deepest:
                deepest = positions[count - 1]
    if now is None and config.image_bytes:
        return Matches(config, prompt.boundaries, runs, deepest)
    cuts = None
    if not config.image_bytes:
        cuts = canonical_cuts(prompt.boundaries, grid=config.grid, min_chunk=config.min_chunk)
    found = find_anywhere(retained, prompt, cuts, Rules(now=now))
    token = None if config.image_bytes else found
    return Matches(config, prompt.boundaries, runs, found.position, now=now, token=token)


def _match(config: PoolConfig, mark: Checkpoint, *, exact: bool) -> Match:
    pages = -(-mark.position // config.page_tokens) + config.image_pages
    return Match(mark.position, mark.kind, exact, pages * config.page_bytes)


def _token_match(config: PoolConfig, found: Found) -> Match:
    """Plain attention: a match between checkpoints."""
    size = -(-found.position // config.page_tokens) * config.page_bytes
    return Match(found.position, found.kind or "junction", found.exact, size)


def explain(retained: Retained, prompt: Prompt, found: Found, rules: Rules) -> Explanation:
    """Return why ``prompt`` hits as deep as ``found`` and no deeper. Never across a salt.

    O(matched bytes), times the namespaces of the same salt where nothing matched.
    """
    config = retained.config
    limit = deepest_resume(config, prompt)
    matched = min(found.matched, limit)
    resumable = found.position
    ghost = _ghost(retained, prompt, above=max(matched, resumable), limit=limit)
    if not rules.read:
        reason = "opted_out"
    elif resumable and resumable < config.minimum_tokens:
        reason, resumable = "below_minimum", 0
    elif ghost is not None:
        reason = "quarantined" if ghost.cause == "quarantined" else "evicted"
        matched = ghost.position
    elif resumable >= matched and resumable:
        reason = "hit"
    elif (field := _other_identity(retained, prompt, found, resumable)) is not None:
        reason = f"identity:{field}"
    elif matched == 0:
        reason = "no_entry"
    elif matched - resumable >= len(prompt) - matched:
        reason = "no_checkpoint_before"
    else:
        reason = "diverged"
    diverged = _diverged_at(found, prompt)
    return Explanation(
        reason=reason,
        tokens=len(prompt),
        matched=max(matched, resumable),
        resumable=resumable,
        lost=max(matched, resumable) - resumable,
        diverged_at=diverged,
        kind=found.kind if resumable else None,
        exact=found.exact if resumable else True,
        tier=found.tier if resumable else None,
        evicted_tick=ghost.tick if ghost and ghost.cause == reason == "evicted" else None,
        used_tick=ghost.used if ghost and ghost.cause == reason == "evicted" else None,
        helps=tuple(_helps(config, reason, matched, resumable, diverged, ghost)),
    )


def _ghost(retained: Retained, prompt: Prompt, *, above: int, limit: int) -> Ghost | None:
    if above >= limit or not len(retained.ghosts):
        return None
    return retained.ghosts.deepest(
        prompt.namespace, prompt.buffer, prompt.attributes, above=above, limit=limit
    )


def _diverged_at(found: Found, prompt: Prompt) -> int | None:
    """The position where the prompt parts from a retained sequence that has another token there."""
    if not found.hops:
        return None
    path, upto = found.hops[-1]
    goes_on = upto < path.end or bool(path.forks and upto in path.forks)
    return upto if goes_on and upto < len(prompt) else None


def _other_identity(retained: Retained, prompt: Prompt, found: Found, resumable: int) -> str | None:
    """Return the field but for which more would have matched, under the same salt."""
    if found.hops:
        path, upto = found.hops[-1]
        attribute = _attribute_parting(path, upto, prompt)
        if attribute is not None:
            return attribute
    for namespace, root in retained.roots.items():
        if namespace.salt == prompt.namespace.salt and namespace != prompt.namespace:
            hops = index.walk(root, prompt.buffer, prompt.attributes)
            if _depth(retained.config, hops, prompt) > max(resumable, found.matched):
                return prompt.namespace.first_difference(namespace)
    return None


def _depth(config: PoolConfig, hops: list[Hop], prompt: Prompt) -> int:
    """Return how deep a way could be resumed, were the namespace the prompt's."""
    limit = deepest_resume(config, prompt)
    if config.image_bytes:
        mark = next(index.marks_upto(hops, limit), None)
        return mark.position if mark is not None else 0
    position = min(limit, hops[-1][1]) if hops else 0
    return position if any(True for _ in covering(hops, position)) else 0


_FIELDS = dict(zip(b"MQPT", ("media", "positions", "positions", "token_types"), strict=True))


def _attribute_parting(path: Path, upto: int, prompt: Prompt) -> str | None:
    """Name what parts the prompt from ``path`` at ``upto`` where the tokens agree, else None."""
    mine = dict(prompt.attributes).get(upto, b"")
    offset = 4 * (upto - path.start)
    token = prompt.buffer[4 * upto : 4 * upto + 4].tobytes()
    others = []
    if upto < path.end and path.label[offset : offset + 4] == token:
        others.append(dict(path.attributes).get(upto, b""))
    others += [key[4:] for key in (path.forks or {}).get(upto, ()) if key[:4] == token]
    if not others:
        return None
    one, two = payload_fields(mine), payload_fields(others[0])
    return next(_FIELDS[tag] for tag in b"MQPT" if one.get(tag) != two.get(tag))


def _helps(
    config: PoolConfig,
    reason: str,
    matched: int,
    resumable: int,
    diverged: int | None,
    ghost: Ghost | None,
) -> Iterator[str]:
    if reason in ("diverged", "no_checkpoint_before") and matched - resumable > FEW_TOKENS:
        yield f"a checkpoint at {matched} would spare {matched - resumable} tokens more"
    if diverged and reason != "hit":  # at 0 it is another prompt altogether
        yield f"the same token at {diverged} as before (something in the prompt changes there)"
    if ghost is not None and ghost.cause == "evicted":
        pages = -(-ghost.position // config.page_tokens) + config.image_pages
        yield f"{pages * config.page_bytes} bytes more, so that {ghost.position} tokens stay"
    if reason.startswith("identity:"):
        yield f"the same {reason.partition(':')[2]} as the retained entry's"
    if ghost is not None and ghost.cause == "expired":
        yield "a longer ttl_seconds"
    if reason == "below_minimum":
        yield f"minimum_tokens below {config.minimum_tokens}"
