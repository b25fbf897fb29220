"""Traces made for tests: lines to break, and a Hypothesis strategy for whole valid ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from ninfer_pool.sim.trace import BOUNDARY_KINDS, Trace, TraceRequest, make_header

DATA = Path(__file__).parents[1] / "data"


def line(**changes: Any) -> dict[str, Any]:
    """One valid first request, with changes; a value of `...` takes the field away."""
    record: dict[str, Any] = {
        "id": 0,
        "t": 1.0,
        "session": "a",
        "kind": "main",
        "parent": None,
        "shared": 0,
        "input": 100,
        "output": 10,
    }
    record.update(changes)
    return {name: value for name, value in record.items() if value is not ...}


def text(*records: object, header: object = None) -> str:
    """A trace file's text from its header and requests."""
    first = header or make_header("made", source="a test", licence="CC0-1.0", notes="")
    return "".join(json.dumps(record) + "\n" for record in (first, *records))


@st.composite
def requests(draw: st.DrawFn, *, most: int = 8, longest: int = 12) -> tuple[TraceRequest, ...]:
    """Valid requests that share, branch, repeat and stop at every kind of place."""
    made: list[TraceRequest] = []
    now = 0.0
    for id in range(draw(st.integers(1, most))):
        parent = draw(st.none() | st.sampled_from(made)) if made else None
        shared = draw(st.integers(0, parent.total)) if parent else 0
        length = max(1, shared + draw(st.integers(0, longest)))
        now += draw(st.sampled_from([0.0, 0.25, 1.0]))
        media = draw(_media(length))
        made.append(
            TraceRequest(
                id=id,
                t=now,
                session=draw(st.text(max_size=3)),
                kind=draw(st.sampled_from(["main", "side", "tool"])),
                parent=parent.id if parent else None,
                shared=shared,
                input=length,
                output=draw(st.integers(0, longest)),
                boundaries=draw(_boundaries(length, media)),
                salt=draw(st.none() | st.text(min_size=1, max_size=2)),
                retain=draw(st.booleans()),
                media=media,
            )
        )
    return tuple(made)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """A whole valid trace."""
    header = make_header("made", source="Hypothesis", licence="CC0-1.0", notes=draw(st.text()))
    return Trace(name="made", header=header, requests=draw(requests()))


@st.composite
def _media(draw: st.DrawFn, length: int) -> tuple[tuple[int, int, str], ...]:
    cuts = draw(st.lists(st.integers(0, length), max_size=6, unique=True))
    cuts.sort()
    pairs = zip(cuts[::2], cuts[1::2], strict=False)
    return tuple((begin, end, draw(st.text(min_size=1, max_size=2))) for begin, end in pairs)


@st.composite
def _boundaries(
    draw: st.DrawFn, length: int, media: tuple[tuple[int, int, str], ...]
) -> tuple[tuple[int, str], ...]:
    positions = sorted(draw(st.lists(st.integers(1, length), max_size=3)))
    return tuple(
        (position, draw(st.sampled_from(BOUNDARY_KINDS)))
        for position in positions
        if not any(begin < position < end for begin, end, _ in media)
    )
