"""A small hybrid model in numpy, and the adapter for it: some 30 lines of its own each.

One linear-attention layer has two decays and a convolution over three tokens, one attention
layer rotary positions. A row of draft KV depends on the hidden tail before it, and logits depend
on all of them. Every token is computed by itself, so prefill and decode give
the same bits however they are cut: `ToyEngine.tolerance` is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ninfer_pool.core.config import PoolConfig
from ninfer_pool.core.identity import Namespace
from ninfer_pool.core.ledger import Pages
from ninfer_pool.testing.adapter import Logits, Tokens

Array = npt.NDArray[np.float32]
Axes = npt.NDArray[np.int32]
"""Positions on the three rotary axes, of shape (3,)."""
WIDTH = 8
ROW = 3 * WIDTH
"""Floats of one position in a page: key, value, draft."""
DECAYS = np.array([0.95, 0.6], dtype=np.float32)[:, None, None]
REMEMBERED = 16
"""How many tokens `ToyEngine.roll_back` can go back."""


@dataclass(slots=True)
class State:
    """All that a lane continues from, except its pages."""

    recurrent: Array
    """(2, WIDTH, WIDTH)"""
    columns: Array
    """(2, WIDTH): the last two inputs, for the convolution."""
    tail: Array
    """(WIDTH,): the hidden state after the last token."""

    @classmethod
    def empty(cls) -> State:
        """Return the state of an empty sequence."""
        return cls.of(np.zeros(2 * WIDTH * WIDTH + 3 * WIDTH, dtype=np.float32))

    @classmethod
    def of(cls, flat: Array) -> State:
        """Return the state that `flat` wrote."""
        recurrent, columns, tail = np.split(flat, [2 * WIDTH**2, 2 * WIDTH**2 + 2 * WIDTH])
        return cls(recurrent.reshape(2, WIDTH, WIDTH), columns.reshape(2, WIDTH), tail)

    def flat(self) -> Array:
        """Return all of it as one array."""
        return np.concatenate((self.recurrent.ravel(), self.columns.ravel(), self.tail))


IMAGE_BYTES = State.empty().flat().nbytes


class ToyModel:
    """Weights, and one token's step. The same seed gives the same model.

    Args:
        seed: of the weights. vocab: how many tokens there are. recurrent: False: plain attention.
    """

    def __init__(self, seed: int, *, vocab: int, recurrent: bool) -> None:
        rng = np.random.default_rng(seed)

        def weights(*shape: int) -> Array:
            return rng.normal(0, 1.2 / np.sqrt(WIDTH), shape).astype(np.float32)

        self.recurrent = recurrent
        self.embedding = weights(vocab, WIDTH) * np.float32(3)
        self.linear, self.attention = weights(3, WIDTH, WIDTH), weights(3, WIDTH, WIDTH)
        self.draft, self.head = weights(2, WIDTH, WIDTH), weights(WIDTH, vocab)
        self.turn = (0.9 ** np.arange(3 * WIDTH // 2)).reshape(3, -1)

    def mix(self, token: int, state: State) -> tuple[Array, Array]:
        """Take a token through the recurrent layer; return its embedding and the output."""
        x = self.embedding[token]
        if not self.recurrent:
            return x, x
        c = x + np.float32(0.5) * state.columns[1] + np.float32(0.3) * state.columns[0]
        q, k, v = np.tanh(c @ self.linear)
        state.columns = np.stack((state.columns[1], x))
        state.recurrent = DECAYS * state.recurrent + np.outer(k, v)
        return x, x + (q @ state.recurrent).sum(axis=0)

    def row(self, x: Array, y: Array, tail: Array, axes: Axes) -> Array:
        """Return what the token's row of its page holds. The draft part needs the tail before."""
        before = tail @ self.draft[0] if self.recurrent else 0
        draft = np.tanh(before + x @ self.draft[1])
        key = self.rotate(y @ self.attention[0], axes)
        return np.concatenate((key, y @ self.attention[1], draft)).astype(np.float32)

    def attend(self, y: Array, rows: Array, axes: Axes) -> Array:
        """Return the hidden state after a token, from its rows (n, ROW), its own the last."""
        query = self.rotate(y @ self.attention[2], axes)
        scores = np.float32(0.05) * (rows[:, :WIDTH] * query).sum(axis=1)
        weight = np.exp(scores - scores.max())
        mixed = (rows[:, WIDTH:] * (weight / weight.sum())[:, None]).sum(axis=0)
        hidden: Array = np.tanh(y + mixed[:WIDTH] + mixed[WIDTH:])
        return hidden

    def rotate(self, x: Array, axes: Axes) -> Array:
        """Turn the pairs of ``x`` by the three axes' positions."""
        angle = axes @ self.turn
        cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        a, b = x[: WIDTH // 2], x[WIDTH // 2 :]
        return np.concatenate((a * cos - b * sin, a * sin + b * cos))


class ToyEngine:
    """The adapter of a `ToyModel`: KV in pages, the state in images, both plain bytes.

    Args:
        num_pages, lanes, page_tokens, grid: as in `PoolConfig`.
        recurrent: False: plain attention, without images.
        end_logits: the image's tail may be asked for logits.
        seed: of the weights; they are part of the namespace.

    >>> engine = ToyEngine(num_pages=8)
    >>> logits = engine.prefill(np.array([3, 1], dtype=np.int32), lane=0, begin=0, table=[5])
    >>> logits.shape, engine.config.image_pages
    ((13,), 2)
    """

    takes_positions = True
    tolerance = 0.0
    vocab_size = 13

    def __init__(
        self,
        *,
        num_pages: int = 64,
        lanes: int = 2,
        page_tokens: int = 4,
        grid: int = 8,
        recurrent: bool = True,
        end_logits: bool = True,
        seed: int = 0,
    ) -> None:
        self.model = ToyModel(seed, vocab=self.vocab_size, recurrent=recurrent)
        self.config = PoolConfig(
            num_pages=num_pages,
            page_bytes=page_tokens * ROW * 4,
            image_bytes=IMAGE_BYTES if recurrent else 0,
            lanes=lanes,
            page_tokens=page_tokens,
            grid=grid,
            end_logits=end_logits and recurrent,
        )
        self.namespace = Namespace(weights=f"toy:{seed}:{recurrent}", kv_dtype="float32")
        self.slab = np.zeros((num_pages, self.config.page_bytes), dtype=np.uint8)
        self.rows = self.slab.view(np.float32).reshape(num_pages, page_tokens, ROW)
        self.lanes = [State.empty() for _ in range(lanes)]
        self.past: list[dict[int, State]] = [{} for _ in range(lanes)]
        """What each lane's state was at the last positions, for drafts."""

    # -- computing -------------------------------------------------------------------------

    def prefill(
        self, tokens: Tokens, *, lane: int, begin: int, table: Pages, positions: Any = None
    ) -> Logits:
        """See `EngineAdapter`; positions int32 (3, n), None: the tokens' indices on each axis."""
        if positions is None:
            positions = np.tile(np.arange(begin, begin + len(tokens), dtype=np.int32), (3, 1))
        for index, token in enumerate(tokens):
            self.step(lane, int(token), begin + index, table, positions[:, index])
        return self.tail_logits(lane)

    def decode(
        self, token: int, *, lane: int, begin: int, table: Pages, positions: Any = None
    ) -> Logits:
        """See `EngineAdapter`."""
        tokens = np.array([token], dtype=np.int32)
        return self.prefill(tokens, lane=lane, begin=begin, table=table, positions=positions)

    def step(self, lane: int, token: int, at: int, table: Pages, axes: Axes) -> None:
        """Compute one token."""
        state = self.lanes[lane]
        self.remember(lane, at)
        x, y = self.model.mix(token, state)
        self.write(lane, at, table, self.model.row(x, y, state.tail, axes))
        state.tail = self.model.attend(y, self.read(lane, at + 1, table), axes)

    def write(self, lane: int, at: int, table: Pages, row: Array) -> None:
        """Write the row of one position."""
        page, slot = divmod(at, self.config.page_tokens)
        self.rows[table[page], slot] = row

    def read(self, lane: int, count: int, table: Pages) -> Array:
        """Return the rows (count, ROW) of the positions before ``count``."""
        pages = -(-count // self.config.page_tokens)
        rows: Array = self.rows[table[:pages]].reshape(-1, ROW)[:count]
        return rows

    def tail_logits(self, lane: int) -> Logits:
        """Return the next token's logits by the lane's hidden tail."""
        logits: Logits = self.lanes[lane].tail @ self.model.head
        return logits

    # -- state -----------------------------------------------------------------------------

    def remember(self, lane: int, at: int) -> None:
        """Keep the state at ``at``, for a while, so that drafts can be taken back."""
        past = self.past[lane]
        past[at] = State.of(self.lanes[lane].flat())
        past.pop(at - REMEMBERED, None)

    def roll_back(self, lane: int, position: int) -> None:
        """Take the lane's state back to ``position``; nothing where it stands there already."""
        if position in self.past[lane]:
            self.lanes[lane] = self.past[lane][position]
            self.past[lane] = {at: s for at, s in self.past[lane].items() if at < position}

    def reset(self, lane: int) -> None:
        """Empty the lane's state."""
        self.lanes[lane] = State.empty()
        self.past[lane] = {}

    def save_image(self, lane: int, pages: Sequence[int]) -> None:
        """Write the lane's state to pages."""
        raw = self.lanes[lane].flat().view(np.uint8)
        whole = np.zeros((len(pages), self.config.page_bytes), dtype=np.uint8)
        whole.ravel()[: len(raw)] = raw
        self.slab[list(pages)] = whole

    def load_image(self, lane: int, pages: Sequence[int]) -> None:
        """Replace the lane's state by an image."""
        raw = self.slab[list(pages)].ravel()[:IMAGE_BYTES]
        self.lanes[lane] = State.of(raw.view(np.float32))
        self.past[lane] = {}

    # -- pages -----------------------------------------------------------------------------

    def copy_page(self, source: int, target: int) -> None:
        """Copy all bytes of a page."""
        self.slab[target] = self.slab[source]

    def read_page(self, page: int) -> bytes:
        """Return the bytes of a page."""
        return bytes(self.slab[page])

    def poison_page(self, page: int) -> None:
        """Fill a page with NaN."""
        self.slab[page] = 0xFF
