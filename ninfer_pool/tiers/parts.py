"""What a tier stores: logical parts of payload, and the whole entries that they make up.

A part is identified by the object, not by where it lies: the same `Run` may lie in host memory,
on disk, in both or in neither (then it has to be written again). So whoever knows which parts a
sequence is made of knows what need not be written once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, TypeVar

from ninfer_pool.core.config import PoolConfig
from ninfer_pool.core.entry import Checkpoint, Entry
from ninfer_pool.core.identity import Attribute, Namespace


class Run:
    """The KV rows of token positions ``[begin, end)`` of one computation.

    A sequence that parts from another inside a run is made of its beginning; so a run that lies
    in a tier knows its own ``tokens``, int32. One that lies on the device alone need not yet.
    """

    __slots__ = ("_tokens", "begin", "end")

    def __init__(self, begin: int, end: int, tokens: bytes | None = None) -> None:
        self.begin = begin
        self.end = end
        self._tokens = tokens

    @property
    def tokens(self) -> bytes:
        """int32, of all its positions; once it was stored."""
        assert self._tokens is not None, f"{self}: its tokens were never told"
        return self._tokens

    def learn(self, sequence: bytes) -> None:
        """Take the tokens from those of a sequence that goes through all of the run."""
        if self._tokens is None:
            self._tokens = sequence[4 * self.begin : 4 * self.end]

    def __repr__(self) -> str:
        return f"Run({self.begin}, {self.end})"


class Stretch:
    """Runs from ``begin`` to ``end``, of ``most`` tokens at most, cut at the edges of pages.

    They are named when somebody asks, once for all who are made of it: a request that goes on
    from here need not, however long it is.
    """

    __slots__ = ("_runs", "begin", "edge", "end", "most")

    def __init__(self, begin: int, end: int, *, most: int, page_tokens: int) -> None:
        self.begin = begin
        self.end = end
        self.edge = begin // page_tokens * page_tokens
        self.most = most
        self._runs: tuple[Run, ...] = ()

    @property
    def runs(self) -> tuple[Run, ...]:
        """The runs. O(runs), the first time."""
        if not self._runs:
            cuts = range(self.edge + self.most, self.end, self.most)
            bounds = [self.begin, *cuts, self.end]
            self._runs = tuple(map(Run, bounds, bounds[1:]))
        return self._runs


class Image:
    """One complete continuation state."""

    __slots__ = ()


Part: TypeAlias = Run | Image
Piece: TypeAlias = Run | Stretch
"""What covers positions: a run, or several that have no name yet."""


def pages_in(part: Part, config: PoolConfig) -> int:
    """Return how many pages a part touches."""
    if isinstance(part, Run):
        return -(-part.end // config.page_tokens) - part.begin // config.page_tokens
    return config.image_pages


class Stored:
    """What one checkpoint is made of: the runs that cover ``[0, position)``, and its image.

    Runs ascend by their begin; each counts up to where the next begins, the last up to the
    checkpoint. ``image`` is None with plain attention.
    """

    __slots__ = ("__weakref__", "_runs", "image", "pieces")

    def __init__(self, pieces: Sequence[Piece], image: Image | None) -> None:
        self.pieces = tuple(pieces)
        self.image = image
        self._runs: tuple[Run, ...] = ()

    @property
    def runs(self) -> tuple[Run, ...]:
        """The runs of all pieces. O(runs), the first time."""
        if not self._runs:
            self._runs = named(self.pieces)
        return self._runs

    def parts(self) -> Iterator[Part]:
        """Yield every part."""
        yield from self.runs
        if self.image is not None:
            yield self.image


@dataclass(slots=True, kw_only=True)
class DraftMark:
    """A checkpoint that is to be stored."""

    position: int
    kind: str
    cuts: tuple[int, ...] | None
    expires: float | None
    lane: int
    tick: int
    uses: int
    superseded: bool
    stored: Stored


@dataclass(slots=True, kw_only=True)
class Draft:
    """A whole entry that is to be stored: its tip's sequence and every checkpoint on the way."""

    namespace: Namespace
    key: str
    tokens: bytes
    """int32, up to the tip."""
    attributes: list[Attribute]
    prompt_tokens: int
    priority: int
    released: bool
    hits: int
    gap: int
    created: int
    used: int
    marks: list[DraftMark]
    """Ascending; the last is the tip."""
    cancelled: bool = field(default=False)
    """What it was made of has been deleted since."""

    def parts(self) -> dict[Part, None]:
        """Return every part once, in order."""
        return all_parts(mark.stored for mark in self.marks)


def all_parts(stored: Iterable[Stored]) -> dict[Part, None]:
    """Return the parts of several checkpoints, each once, in order."""
    found: dict[Part, None] = {}
    for each in stored:
        found.update(dict.fromkeys(each.runs))
        if each.image is not None:
            found[each.image] = None
    return found


class Kept(Checkpoint):
    """A checkpoint in a tier below the device."""

    __slots__ = ("record",)

    def __init__(self, mark: DraftMark, record: Record) -> None:
        super().__init__(
            position=mark.position,
            kind=mark.kind,
            cuts=mark.cuts,
            table=None,  # type: ignore[arg-type]
            tail=-1,
            image=-1,
            lane=mark.lane,
            tick=mark.tick,
        )
        self.expires = mark.expires
        self.uses = mark.uses
        self.superseded = mark.superseded
        self.stored = mark.stored
        self.record = record


def draft_mark_of(mark: Checkpoint, *, spare: bool) -> DraftMark:
    """Return a checkpoint, of the device or a tier, as one that is to be stored."""
    return DraftMark(
        position=mark.position,
        kind=mark.kind,
        cuts=mark.cuts,
        expires=mark.expires,
        lane=mark.lane,
        tick=mark.tick,
        uses=mark.uses,
        superseded=spare,
        stored=mark.stored,
    )


def draft_of_entry(
    entry: Entry, marks: Iterable[Checkpoint], *, tokens: bytes, attributes: list[Attribute]
) -> Draft:
    """Return an entry, of the device or a tier, as one that a tier may store."""
    return Draft(
        namespace=entry.namespace,
        key=entry.key,
        tokens=tokens,
        attributes=attributes,
        prompt_tokens=entry.prompt_tokens,
        priority=entry.priority,
        released=entry.released,
        hits=entry.hits,
        gap=entry.gap,
        created=entry.created,
        used=entry.used,
        marks=[draft_mark_of(mark, spare=mark.superseded) for mark in marks],
    )


class Record:
    """A whole entry in a tier."""

    __slots__ = ("attributes", "entry", "marks", "name", "parts", "pinned")

    entry: Entry

    def __init__(self) -> None:
        self.marks: list[Kept] = []
        """Ascending; the last is the tip."""
        self.parts: dict[Part, None] = {}
        self.name: str | None = None
        """What the medium calls it."""
        self.pinned = False
        self.attributes: list[Attribute] = []

    @property
    def tip(self) -> Kept:
        """Its deepest checkpoint."""
        return self.marks[-1]

    @property
    def tokens(self) -> int:
        """The position of its tip."""
        return self.marks[-1].position


def covering_end(runs: Sequence[Run], index: int, position: int) -> int:
    """Return up to where the run at ``index`` counts for a checkpoint at ``position``."""
    return runs[index + 1].begin if index + 1 < len(runs) else position


def clipped(runs: Sequence[Run], position: int) -> tuple[Run, ...]:
    """Return those runs that a checkpoint at ``position`` on their way is made of."""
    return tuple(run for run in runs if run.begin < position)


def named(pieces: Iterable[Piece]) -> tuple[Run, ...]:
    """Return the runs of pieces."""
    found: list[Run] = []
    for piece in pieces:
        found += piece.runs if isinstance(piece, Stretch) else [piece]
    return tuple(found)


def cut(pieces: Iterable[Piece], position: int) -> tuple[Piece, ...]:
    """Return those pieces that a checkpoint at ``position`` on their way is made of; see
    `clipped`. Names no run but of a stretch that goes on past it."""
    found: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, Stretch) and piece.begin < position < piece.end:
            found += clipped(piece.runs, position)
        elif piece.begin < position:
            found.append(piece)
    return tuple(found)


class _Marked(Protocol):
    cuts: tuple[int, ...] | None
    position: int
    kind: str
    superseded: bool


M = TypeVar("M", bound=_Marked)


def without_spares(marks: Sequence[M]) -> list[M]:
    """Return an entry's checkpoints (ascending) that every tier keeps.

    Of the superseded ones only the newest where a request began: asked again, or with another
    answer, it resumes there.
    """
    typed = [mark for mark in marks[:-1] if mark.kind not in ("frontier", "grid")]
    newest = typed[-1] if typed else None
    return [mark for mark in marks if not mark.superseded or mark in (newest, marks[-1])]


def one_each(marks: Sequence[M]) -> list[M]:
    """Return of an entry's checkpoints (ascending) one at each position: the tip, an exact one
    before others, the last of equals."""
    best: dict[int, M] = {}
    for mark in marks[:-1]:
        known = best.get(mark.position)
        if known is None or known.cuts is None or mark.cuts is not None:
            best[mark.position] = mark
    best[marks[-1].position] = marks[-1]
    return list(best.values())
