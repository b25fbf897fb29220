"""Where prefill is cut, and where checkpoints are taken: pure functions of structure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ninfer_pool.core.prompt import Boundary, Prompt

NEWEST_ONLY = ("turn", "response", "history")
"""Kinds of which a long prompt declares many; only the last of each is worth an image."""
NEAR_BOUNDARY = 4
"""A junction at most this many tokens after a declared boundary is taken at the boundary."""
BEFORE_END = 512
"""Tokens before an undeclared prompt end where many a next prompt parts from this one."""


class Chunk(NamedTuple):
    """Prefill ``[begin, end)`` in one step; then take a checkpoint of that kind, if any."""

    begin: int
    end: int
    checkpoint: str | None


def canonical_cuts(boundaries: Iterable[Boundary], *, grid: int, min_chunk: int) -> tuple[int, ...]:
    """Return the canonical cuts, not on the grid, of a prompt with these boundaries; ascending.

    A cut is canonical when it can be decided from the tokens before it and the boundaries
    declared at or before it: every multiple of ``grid``, and every declared boundary that is at
    least ``min_chunk`` past the cut before it. O(boundaries).
    """
    cuts: list[int] = []
    for position, _ in boundaries:
        last = max(position // grid * grid, cuts[-1] if cuts else 0)
        if position > last and position - last >= min_chunk:
            cuts.append(position)
    return tuple(cuts)


def plan_chunks(
    prompt: Prompt,
    *,
    start: int,
    cuts: Sequence[int],
    grid: int,
    captures: Iterable[tuple[int, str]],
) -> list[Chunk]:
    """Return the chunks from ``start`` to the prompt's end, cut at the canonical cuts and captures.

    O(chunks + boundaries).
    """
    end = prompt.length
    wanted = dict(captures)
    stops = {position for position in cuts if start < position < end}
    stops.update(range((start // grid + 1) * grid, end, grid))
    stops.update(wanted)
    stops.add(end)
    ends = sorted(position for position in stops if start < position <= end)
    return [
        Chunk(begin, stop, wanted.get(stop))
        for begin, stop in zip([start, *ends[:-1]], ends, strict=True)
    ]


def plan_captures(
    prompt: Prompt,
    *,
    start: int,
    cuts: Sequence[int],
    grid: int,
    worth: int,
    end_logits: bool,
    junctions: Sequence[int],
    exact: bool,
) -> list[tuple[int, str]]:
    """Return ``(position, kind)`` of the checkpoints worth taking past ``start``, prompt end first.

    Always the prompt's end (and one token before it where the image yields no logits), every
    ``system`` boundary, the last of each other declared kind. Where it spares at least ``worth``
    tokens: junctions, and a point shortly before an end that no boundary explains. With ``exact``
    nothing is taken that would add a cut that is not canonical.
    """
    end = prompt.length
    canonical = set(cuts)
    declared = {
        position: kind
        for position, kind in prompt.boundaries
        if position > start and (position in canonical or position % grid == 0 or position == end)
    }
    chosen: dict[int, str] = {}
    if end > start:
        chosen[end] = declared.get(end, "turn")
    newest: dict[str, int] = {}
    for position, kind in declared.items():
        if kind in NEWEST_ONLY:
            newest[kind] = position
        else:
            chosen.setdefault(position, kind)
    for kind, position in newest.items():
        chosen.setdefault(position, kind)
    extra: dict[int, str] = {}
    if not end_logits and end - 1 > start:
        extra[end - 1] = "turn"
    stops = [each for each, _ in prompt.boundaries if each in canonical or each % grid == 0]
    parts = [_moved(junction, stops) for junction in junctions]
    _add_optional(extra, chosen, parts, "junction", start=start, worth=worth)
    if end not in declared:
        _add_optional(extra, chosen, [end - BEFORE_END], "grid", start=start, worth=worth)
    chosen.update(
        (position, kind)
        for position, kind in extra.items()
        if position not in chosen and (not exact or position in canonical or position % grid == 0)
    )
    return [
        (position, kind)
        for position, kind in chosen.items()
        if position <= prompt.shareable and not (prompt.media and prompt.inside_media(position))
    ]


def _moved(junction: int, stops: Iterable[int]) -> int:
    """Return the canonical boundary shortly before a junction, if there is one.

    Two chats that part at a message's end share the token that begins the next one. A cut there
    is not canonical, the boundary's is: what resumes from it stays exact.
    """
    before = max((stop for stop in stops if stop <= junction), default=0)
    return before if junction - before <= NEAR_BOUNDARY and before else junction


def _add_optional(
    extra: dict[int, str],
    chosen: dict[int, str],
    positions: Sequence[int],
    kind: str,
    *,
    start: int,
    worth: int,
) -> None:
    taken = sorted({start, *chosen, *extra})
    for position in sorted(positions):
        before = max((other for other in taken if other <= position), default=0)
        if position > start and position - before >= worth:
            extra.setdefault(position, kind)
            taken.append(position)
