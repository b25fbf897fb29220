"""Toy engines, each wrong in one subtle way, to show that the proof kit finds them.

Every one of them serves a first prompt right. `BROKEN` says of each which named test of
`conformance` fails on it, and within how many random workloads it is found without that test.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ninfer_pool.core.identity import Namespace
from ninfer_pool.core.ledger import Pages
from ninfer_pool.testing.adapter import Logits, Tokens
from ninfer_pool.testing.toy import IMAGE_BYTES, ROW, WIDTH, Array, Axes, State, ToyEngine


class Remembers:
    """A place for what a wrong engine keeps beside its lanes and pages."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.kept: dict[int, Any] = {}


class StateOfASibling(Remembers, ToyEngine):
    """Remembers images by their first page, and is not told when that is written anew."""

    def load_image(self, lane: int, pages: Sequence[int]) -> None:
        super().load_image(lane, pages)
        known = self.kept.setdefault(pages[0], self.lanes[lane])
        self.lanes[lane] = State.of(known.flat())


class OffByOne(ToyEngine):
    """Counts a lane's positions itself, and starts one too early after a restore."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.shift = [0] * self.config.lanes

    def load_image(self, lane: int, pages: Sequence[int]) -> None:
        super().load_image(lane, pages)
        self.shift[lane] = 1

    def reset(self, lane: int) -> None:
        super().reset(lane)
        self.shift[lane] = 0

    def step(self, lane: int, token: int, at: int, table: Pages, axes: Axes) -> None:
        super().step(lane, token, at, table, axes - np.int32(self.shift[lane]))


class SharedPageWritten(ToyEngine):
    """Writes the last row before its first one again, wherever that lies."""

    def prefill(
        self, tokens: Tokens, *, lane: int, begin: int, table: Pages, positions: Any = None
    ) -> Logits:
        if begin:
            row = self.read(lane, begin, table)[-1]
            self.write(lane, begin - 1, table, row * np.float32(1 + 1e-6))
        return super().prefill(tokens, lane=lane, begin=begin, table=table, positions=positions)


class HiddenTailForgotten(ToyEngine):
    """The image lacks the hidden tail, from which the next draft row is made."""

    def load_image(self, lane: int, pages: Sequence[int]) -> None:
        super().load_image(lane, pages)
        self.lanes[lane].tail = np.zeros(WIDTH, dtype=np.float32)


class ConvolutionForgotten(ToyEngine):
    """The image lacks the convolution's columns."""

    def load_image(self, lane: int, pages: Sequence[int]) -> None:
        super().load_image(lane, pages)
        self.lanes[lane].columns = np.zeros((2, WIDTH), dtype=np.float32)


class ImageRounded(ToyEngine):
    """Keeps images in half precision: near enough, but not the bits that it calls exact."""

    tolerance = 0.05

    def load_image(self, lane: int, pages: Sequence[int]) -> None:
        super().load_image(lane, pages)
        rounded = self.lanes[lane].flat().astype(np.float16).astype(np.float32)
        self.lanes[lane] = State.of(rounded)


class TruncateThatLies(ToyEngine):
    """Rolls back nothing: the state has seen the rejected drafts."""

    def roll_back(self, lane: int, position: int) -> None:
        return


class TruncateOneShort(ToyEngine):
    """Rolls back to one token past what was accepted."""

    def roll_back(self, lane: int, position: int) -> None:
        super().roll_back(lane, position + 1)


class RollsBackToAnother(ToyEngine):
    """A load leaves what the lane's last request would roll back to."""

    def load_image(self, lane: int, pages: Sequence[int]) -> None:
        past = self.past[lane]
        super().load_image(lane, pages)
        self.past[lane] = past


class PositionAxisDropped(ToyEngine):
    """After a restore the second rotary axis is taken to be the first."""

    def prefill(
        self, tokens: Tokens, *, lane: int, begin: int, table: Pages, positions: Any = None
    ) -> Logits:
        if begin and positions is not None:
            positions = positions[[0, 0, 2]]
        return super().prefill(tokens, lane=lane, begin=begin, table=table, positions=positions)


class StalePage(Remembers, ToyEngine):
    """Keeps whole pages that it has read, and does not see that they were recycled."""

    def read(self, lane: int, count: int, table: Pages) -> Array:
        size = self.config.page_tokens
        rows = super().read(lane, count, table).copy()
        for index, page in enumerate(table[: count // size].tolist()):
            part = rows[index * size : (index + 1) * size]
            part[:] = self.kept.setdefault(page, part.copy())
        return rows


class PublishBeforeWrite(Remembers, ToyEngine):
    """Writes an image when its lane is next used, not when it is asked to."""

    def save_image(self, lane: int, pages: Sequence[int]) -> None:
        self.flush(lane)
        self.kept[lane] = tuple(pages)

    def flush(self, lane: int) -> None:
        """Write what is due."""
        if lane in self.kept:
            super().save_image(lane, self.kept.pop(lane))

    def step(self, lane: int, token: int, at: int, table: Pages, axes: Axes) -> None:
        self.flush(lane)
        super().step(lane, token, at, table, axes)

    def load_image(self, lane: int, pages: Sequence[int]) -> None:
        self.flush(lane)
        super().load_image(lane, pages)

    def reset(self, lane: int) -> None:
        self.flush(lane)
        super().reset(lane)


class ImageOfTheWrongLane(ToyEngine):
    """Saves the state of the lane that computed last."""

    last = 0

    def step(self, lane: int, token: int, at: int, table: Pages, axes: Axes) -> None:
        super().step(lane, token, at, table, axes)
        self.last = lane

    def save_image(self, lane: int, pages: Sequence[int]) -> None:
        super().save_image(self.last, pages)


class PartialImage(ToyEngine):
    """Writes all pages of an image but the last."""

    def save_image(self, lane: int, pages: Sequence[int]) -> None:
        last = self.slab[pages[-1]].copy()
        super().save_image(lane, pages)
        self.slab[pages[-1]] = last


class HalfACopy(ToyEngine):
    """Copies the first half of a page."""

    def copy_page(self, source: int, target: int) -> None:
        half = self.config.page_bytes // 2
        self.slab[target, :half] = self.slab[source, :half]


class ResetThatKeeps(ToyEngine):
    """Resets the recurrent state and the tail, and keeps the convolution's columns."""

    def reset(self, lane: int) -> None:
        columns = self.lanes[lane].columns
        super().reset(lane)
        self.lanes[lane].columns = columns


class OnePageEarly(ToyEngine):
    """A row that begins a page goes to the end of the page before, too."""

    def write(self, lane: int, at: int, table: Pages, row: Array) -> None:
        super().write(lane, at, table, row)
        if at and at % self.config.page_tokens == 0:
            super().write(lane, at - 1, table, row)


class DecodeIgnoresTheTail(Remembers, ToyEngine):
    """Decodes from the tail of its own last token, not from the one that was restored."""

    def reset(self, lane: int) -> None:
        super().reset(lane)
        self.kept.pop(lane, None)

    def step(self, lane: int, token: int, at: int, table: Pages, axes: Axes) -> None:
        self.lanes[lane].tail = self.kept.get(lane, self.lanes[lane].tail)
        super().step(lane, token, at, table, axes)
        self.kept[lane] = self.lanes[lane].tail

    def roll_back(self, lane: int, position: int) -> None:
        super().roll_back(lane, position)
        self.kept[lane] = self.lanes[lane].tail


class LoadTakesTheImage(ToyEngine):
    """Moves an image to the lane instead of copying it."""

    def load_image(self, lane: int, pages: Sequence[int]) -> None:
        super().load_image(lane, pages)
        self.slab[list(pages)] = 0


class LoadAliasesTheImage(Remembers, ToyEngine):
    """The lane's tail is the image's own bytes: the lane goes on writing them."""

    def load_image(self, lane: int, pages: Sequence[int]) -> None:
        super().load_image(lane, pages)
        at = (IMAGE_BYTES - 4 * WIDTH) % self.config.page_bytes
        self.kept[lane] = self.slab[pages[-1], at : at + 4 * WIDTH].view(np.float32)

    def reset(self, lane: int) -> None:
        super().reset(lane)
        self.kept.pop(lane, None)

    def step(self, lane: int, token: int, at: int, table: Pages, axes: Axes) -> None:
        super().step(lane, token, at, table, axes)
        if lane in self.kept:
            self.kept[lane][:] = self.lanes[lane].tail


class PlainLaneKeepsItsRows(Remembers, ToyEngine):
    """Plain attention: takes a lane's own copy of its rows for the request's where there are as
    many. Nothing tells a plain engine that its lane was given to another request."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes, recurrent=False)

    def read(self, lane: int, count: int, table: Pages) -> Array:
        rows = super().read(lane, count, table)
        if count > 1 and len(self.kept.get(lane, ())) == count - 1:
            rows = np.concatenate((self.kept[lane], rows[-1:]))
        self.kept[lane] = rows.copy()
        return rows


class NamespacesMixed(ToyEngine):
    """Names its model alone, whatever its weights are."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.namespace = Namespace(weights="toy", kv_dtype="float32")


class NamespaceOfItsOwn(ToyEngine):
    """Puts the instance into its name, so that nothing is ever shared."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.namespace = Namespace(weights=f"toy:{id(self)}", kv_dtype="float32")


class DraftRowShortByOne(Remembers, ToyEngine):
    """The draft part of a call's last row is left to the next call, which is another's at times."""

    def prefill(
        self, tokens: Tokens, *, lane: int, begin: int, table: Pages, positions: Any = None
    ) -> Logits:
        if begin and self.kept.get(lane, (0,))[0] == begin:
            self.write(lane, begin - 1, table, self.kept[lane][1])
        made = super().prefill(tokens, lane=lane, begin=begin, table=table, positions=positions)
        last = begin + len(tokens)
        row = self.read(lane, last, table)[-1].copy()
        self.kept[lane] = (last, row.copy())
        row[2 * WIDTH :] = 0
        self.write(lane, last - 1, table, row)
        return made


class TableRemembered(Remembers, ToyEngine):
    """Keeps the page table that a lane's request began with; it may grow."""

    def prefill(
        self, tokens: Tokens, *, lane: int, begin: int, table: Pages, positions: Any = None
    ) -> Logits:
        known = self.kept.setdefault(lane, np.array(table))
        table = np.concatenate((known, np.asarray(table)[len(known) :])).astype(np.int32)
        self.kept[lane] = table
        return super().prefill(tokens, lane=lane, begin=begin, table=table, positions=positions)

    def reset(self, lane: int) -> None:
        super().reset(lane)
        self.kept.pop(lane, None)


class LanesShareAColumn(ToyEngine):
    """One buffer for the convolution's older column, for all lanes."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.shared = np.zeros(WIDTH, dtype=np.float32)

    def step(self, lane: int, token: int, at: int, table: Pages, axes: Axes) -> None:
        if at > 1 and self.past[lane]:
            self.lanes[lane].columns[0] = self.shared
        super().step(lane, token, at, table, axes)
        self.shared = self.lanes[lane].columns[0].copy()


class PagesInOrderOfTheirNumbers(ToyEngine):
    """Reads a lane's whole pages in the slab's order: the same sum, with other bits."""

    def read(self, lane: int, count: int, table: Pages) -> Array:
        whole = count // self.config.page_tokens
        order = np.concatenate((np.sort(table[:whole]), table[whole:]))
        return super().read(lane, count, order)


class WholePagesRead(ToyEngine):
    """Attends to its last page's rows to the end, written or not."""

    def read(self, lane: int, count: int, table: Pages) -> Array:
        rows = self.rows[table[: -(-count // self.config.page_tokens)]].reshape(-1, ROW)
        seen: Array = rows[:count] + np.float32(1e-3) * rows[count - 1 :].mean(axis=0)
        return seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A broken engine and what finds it."""

    make: type[ToyEngine]
    test: str
    """Part of the name of a test that fails on it."""
    examples: int | None
    """Random workloads within which one fails; None: that is not asked of them."""


BROKEN = (
    Broken(make=StateOfASibling, test="recycled_pages_keep", examples=200),
    Broken(make=OffByOne, test="frontier", examples=10),
    Broken(make=SharedPageWritten, test="page_edge", examples=10),
    Broken(make=HiddenTailForgotten, test="page_edge", examples=10),
    Broken(make=ConvolutionForgotten, test="page_edge", examples=10),
    Broken(make=ImageRounded, test="page_edge", examples=100),
    Broken(make=TruncateThatLies, test="drafts", examples=20),
    Broken(make=TruncateOneShort, test="drafts", examples=20),
    Broken(make=RollsBackToAnother, test="drafts", examples=None),
    Broken(make=PositionAxisDropped, test="positions", examples=10),
    Broken(make=StalePage, test="recycled_pages_keep", examples=20),
    Broken(make=PublishBeforeWrite, test="published", examples=40),
    Broken(make=ImageOfTheWrongLane, test="interleaved", examples=20),
    Broken(make=PartialImage, test="copied_whole", examples=10),
    Broken(make=HalfACopy, test="copied_whole", examples=30),
    Broken(make=ResetThatKeeps, test="cold_run", examples=10),
    Broken(make=OnePageEarly, test="page_edge", examples=10),
    Broken(make=DecodeIgnoresTheTail, test="many_turns", examples=10),
    Broken(make=LoadTakesTheImage, test="copied_whole", examples=10),
    Broken(make=LoadAliasesTheImage, test="page_edge", examples=10),
    Broken(make=DraftRowShortByOne, test="frontier", examples=10),
    Broken(make=TableRemembered, test="many_turns", examples=10),
    Broken(make=LanesShareAColumn, test="interleaved", examples=10),
    Broken(make=PagesInOrderOfTheirNumbers, test="forks", examples=50),
    Broken(make=WholePagesRead, test="free_and_recycled", examples=10),
    Broken(make=PlainLaneKeepsItsRows, test="last_request", examples=200),
    Broken(make=NamespacesMixed, test="identity_is_named", examples=None),
    Broken(make=NamespaceOfItsOwn, test="identity_is_named", examples=None),
)
