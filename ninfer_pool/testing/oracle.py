"""What a pool must answer, by brute force over a plain list of checkpoints."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ninfer_pool.core import radix
from ninfer_pool.core.config import PoolConfig
from ninfer_pool.core.identity import Namespace
from ninfer_pool.core.planner import canonical_cuts
from ninfer_pool.core.pool import PrefixPool
from ninfer_pool.core.prompt import Prompt

Cell = tuple[int, bytes]
"""A token and what it carries."""


class OracleCheckpoint(NamedTuple):
    """A checkpoint after ``cells``; ``cuts`` as a `Checkpoint` has them."""

    namespace: Namespace
    cells: tuple[Cell, ...]
    kind: str
    cuts: tuple[int, ...] | None

    @property
    def position(self) -> int:
        """Where it stands."""
        return len(self.cells)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a lookup must find. ``kinds`` and ``reasons``: any of them is right."""

    position: int
    kinds: frozenset[str]
    exact: bool
    matched: int
    reasons: frozenset[str]


def cells_of(prompt: Prompt, tokens: Iterable[int] = ()) -> tuple[Cell, ...]:
    """Return the cells of a prompt and of ``tokens`` generated after it."""
    carried = dict(prompt.attributes)
    values = [*prompt.tokens.tolist(), *tokens]
    return tuple((token, carried.get(at, b"")) for at, token in enumerate(values))


def common(one: tuple[Cell, ...], other: tuple[Cell, ...]) -> int:
    """Return how many leading cells agree."""
    for at, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return at
    return min(len(one), len(other))


class OraclePool:
    """A pool without limits, without an index and without speed. O(everything) a question."""

    def __init__(self, config: PoolConfig) -> None:
        self.config = config
        self.records: list[OracleCheckpoint] = []

    @classmethod
    def of(cls, pool: PrefixPool) -> OraclePool:
        """Return an oracle of just what ``pool`` retains now."""
        oracle = cls(pool.config)
        for namespace, root in pool.state.catalog.roots.items():
            for node in root.subtree():
                for mark in node.checkpoints:
                    tokens = memoryview(radix.tokens_to(node, mark.position)).cast("i").tolist()
                    carried = dict(radix.attributes_to(node, mark.position))
                    cells = tuple((token, carried.get(at, b"")) for at, token in enumerate(tokens))
                    oracle.records.append(OracleCheckpoint(namespace, cells, mark.kind, mark.cuts))
        return oracle

    def commit(self, record: OracleCheckpoint) -> None:
        """Retain a checkpoint: next to one of other cuts, instead of one that is not exact."""
        twins = [old for old in self.records if old[:2] == record[:2]]
        if record.cuts is None:
            if any(twin.cuts is not None for twin in twins):
                return
        elif any(twin.cuts == record.cuts for twin in twins):
            return
        self.records = [r for r in self.records if r not in twins or r.cuts is not None]
        self.records.append(record)

    def keys(self) -> set[tuple[Namespace, tuple[Cell, ...]]]:
        """Return what can be resumed at all."""
        return {record[:2] for record in self.records}

    def predict(self, prompt: Prompt, *, read: bool = True, exact: bool = False) -> Prediction:
        """Return what a lookup of ``prompt`` must find."""
        cells = cells_of(prompt)
        limit = min(len(cells) - (not self.config.end_logits), prompt.shareable)
        own = [record for record in self.records if record.namespace == prompt.namespace]
        walked = max((common(cells, record.cells) for record in own), default=0)
        fits = [r for r in own if r.position <= limit and cells[: r.position] == r.cells]
        judged = [(r.position, self._exact(r, prompt), r.kind) for r in fits if read]
        if exact:
            judged = [item for item in judged if item[1]]
        position, is_exact, _ = max(judged, default=(0, True, ""))
        kinds = {kind for at, good, kind in judged if (at, good) == (position, is_exact)}
        taken = position if position >= self.config.minimum_tokens else 0
        matched = max(min(walked, limit), position)
        return Prediction(
            position=taken,
            kinds=frozenset(kinds if taken else ()),
            exact=is_exact if taken else True,
            matched=matched,
            reasons=self._reasons(prompt, read=read, position=position, walked=walked),
        )

    def _exact(self, record: OracleCheckpoint, prompt: Prompt) -> bool:
        """A cold run of the prompt cuts where this one's computation was cut, and here."""
        config, at = self.config, record.position
        cuts = canonical_cuts(prompt.boundaries, grid=config.grid, min_chunk=config.min_chunk)
        upto = cuts[: bisect_right(cuts, at)]
        return record.cuts == upto and (at % config.grid == 0 or at in upto)

    def _reasons(self, prompt: Prompt, *, read: bool, position: int, walked: int) -> frozenset[str]:
        count = len(prompt)
        limit = min(count - (not self.config.end_logits), prompt.shareable)
        matched = min(walked, limit)
        if not read:
            return frozenset({"opted_out"})
        if 0 < position < self.config.minimum_tokens:
            return frozenset({"below_minimum"})
        if position and position >= matched:
            return frozenset({"hit"})
        named = self._identities(prompt, position=position, walked=walked)
        if named:
            return named
        if not matched:
            return frozenset({"no_entry"})
        far = matched - position >= count - matched
        return frozenset({"no_checkpoint_before" if far else "diverged"})

    def _identities(self, prompt: Prompt, *, position: int, walked: int) -> frozenset[str]:
        """The fields but for which more would have matched."""
        cells = cells_of(prompt)
        own = [record for record in self.records if record.namespace == prompt.namespace]
        for record in own:
            longer = walked < min(len(cells), record.position)
            parts = longer and common(cells, record.cells) == walked
            if parts and cells[walked][0] == record.cells[walked][0]:
                return frozenset(f"identity:{f}" for f in ("media", "positions", "token_types"))
        limit = min(len(cells) - (not self.config.end_logits), prompt.shareable)
        floor = max(position, min(walked, prompt.shareable))
        named = set()
        for record in self.records:
            mine, other = prompt.namespace, record.namespace
            fits = floor < record.position <= limit and record.cells == cells[: record.position]
            if fits and other.salt == mine.salt:
                named.add(f"identity:{mine.first_difference(other)}")
        return frozenset(named)
