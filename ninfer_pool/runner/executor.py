"""One model on one store: prefill of a lane, and rounds of drafting and verifying over all lanes.

Knows nothing of requests or of the pool. Every round runs lanes x (draft tokens + 1) rows,
padded, whatever is drafted and whoever is running, so that a row's bits never depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ninfer_pool.errors import ModelError
from ninfer_pool.kernels import PAGE_TOKENS
from ninfer_pool.runner.draft import DraftHead
from ninfer_pool.runner.graphs import Decoded, Graphs, RowBatch
from ninfer_pool.runner.model import EmbeddingSpan, Model
from ninfer_pool.runner.sampling import Sampler
from ninfer_pool.runner.slab import Sizes, Slab, SlabLayout

MOST_DRAFTS = 5


@dataclass(slots=True, kw_only=True)
class Turn:
    """What one lane does in a round.

    ``pending`` is the token sampled last, to be written at ``position``; ``most`` bounds the
    drafts; ``axes`` is added to a position to give its rotary one (the same on three axes).
    ``stop`` says after how many of the round's new tokens to stop, if they end the request.
    """

    lane: int
    pending: int
    position: int
    table: torch.Tensor
    sampler: Sampler
    most: int
    axes: int = 0
    stop: Callable[[Sequence[int]], int] = len
    drafts: list[int] = field(default_factory=list)


class Executor:
    """Runs a model's forward passes over a store's pages and lanes, laid out by `layout_of`."""

    def __init__(self, model: Model, store: Slab, *, draft_tokens: int = 0) -> None:
        self.model = model
        self.store = store
        self.draft_tokens = draft_tokens
        layers = model.config.num_attention_layers
        self._caches = store.caches[:layers]
        self._draft: DraftHead | None = model.draft_head if draft_tokens else None
        self._draft_cache = store.caches[layers] if draft_tokens else None
        # Experts are chosen on the host, which a graph cannot record.
        graphs = model.device.type == "cuda" and model.config.experts is None
        self._decode = Graphs(self._step) if graphs else self._step
        self.proposals: Callable[[Turn], list[int]] = lambda turn: turn.drafts
        """What to verify instead of the head's drafts, at most as many: for tests."""

    # -- prefill ---------------------------------------------------------------------------

    @torch.inference_mode()
    def prefill(
        self,
        lane: int,
        tokens: torch.Tensor,
        *,
        begin: int,
        table: torch.Tensor,
        positions: torch.Tensor,
        spans: Sequence[EmbeddingSpan] = (),
    ) -> torch.Tensor:
        """Run one chunk of one lane that stands at ``begin``; return its output (T, hidden).

        tokens int64 (T,), table int64 page ids, positions int64 (3, T); spans as `Model.embed`.
        """
        x = self.model.embed(tokens, spans=spans)
        slots = slots_of(table, begin, begin + len(tokens))
        hidden = self.model.prefill(
            x,
            positions=positions,
            lane=self.store.state(lane),
            cache=self._caches,
            table=table,
            begin=begin,
            slots=slots,
        )
        if self._draft is not None and self._draft_cache is not None:
            before = torch.cat((self.store.tails[lane][None], hidden[:-1]))
            first = int(begin == 0)  # slot 0 has no output before it
            if first < len(tokens):
                self._draft.write(
                    x[first:],
                    before[first:],
                    positions=positions[:, first:],
                    cache=self._draft_cache,
                    slots=slots[first:],
                )
        self.store.tails[lane] = hidden[-1]
        return hidden

    @torch.inference_mode()
    def tail_logits(self, lane: int) -> torch.Tensor:
        """Return the fp32 logits (vocab,) of what follows the lane's last position."""
        return self.model.logits(self.store.tails[lane].clone()[None])[0]

    # -- rounds ----------------------------------------------------------------------------

    @torch.inference_mode()
    def round(self, turns: Sequence[Turn]) -> list[list[int]]:
        """Draft, verify and keep for each turn; return each turn's new tokens, one or more.

        With n new tokens a lane has written the pending one and the first n - 1 of them; the
        last is the new pending one. State, tail and draft KV stand at ``position`` + n.
        """
        if self._draft is not None:
            self._propose(turns)
        hidden, after = self._decode(self._rows(turns))
        logits = self.model.logits(hidden)
        made = [self._verify(turn, logits[turn.lane]) for turn in turns]
        after.keep(
            self.store.states,
            [(turn.lane, len(new) - 1) for turn, new in zip(turns, made, strict=True)],
        )
        if any(len(new) > 1 for new in made):
            self._rewrite(turns, made, hidden)
        for turn, new in zip(turns, made, strict=True):
            self.store.tails[turn.lane] = hidden[turn.lane, len(new) - 1]
        return made

    def _verify(self, turn: Turn, logits: torch.Tensor) -> list[int]:
        new = turn.sampler.accept(logits[: len(turn.drafts) + 1], turn.drafts)
        return new[: max(1, turn.stop(new))]

    def _rows(self, turns: Sequence[Turn]) -> RowBatch:
        steps = self.draft_tokens + 1
        rows = RowBatch.empty(self.store.lanes * steps, _width(turns), self.store.device)
        for turn in turns:
            for step, token in enumerate([turn.pending, *turn.drafts]):
                _put(
                    rows, turn.lane * steps + step, turn, token=token, position=turn.position + step
                )
        return rows

    def _step(self, rows: RowBatch) -> Decoded:
        lanes = (self.store.lanes, -1)
        return self.model.decode(
            torch.unflatten(self.model.embed(rows.tokens), 0, lanes),
            positions=torch.unflatten(rows.positions, 1, lanes),
            state=self.store.states,
            cache=self._caches,
            tables=rows.tables,
            lengths=rows.lengths,
            slots=rows.slots,
        )

    def _propose(self, turns: Sequence[Turn]) -> None:
        """Let the head draft, a token a pass, each pass one row a lane.

        The first pass writes the pending token's slot from the model's own output; what later
        passes write stands only until `_rewrite`.
        """
        assert self._draft is not None
        assert self._draft_cache is not None
        hidden = self.store.tails.clone()
        for number in range(self.draft_tokens):
            going = [turn for turn in turns if number == 0 or number < turn.most]
            rows = RowBatch.empty(self.store.lanes, _width(turns), self.store.device)
            for turn in going:
                token = turn.drafts[-1] if turn.drafts else turn.pending
                _put(rows, turn.lane, turn, token=token, position=turn.position + number)
            hidden = self._draft.decode(
                self.model.embed(rows.tokens),
                hidden,
                positions=rows.positions,
                cache=self._draft_cache,
                tables=rows.tables,
                lengths=rows.lengths,
                slots=rows.slots,
            )
            logits = self.model.logits(hidden)
            for turn in going:
                if number < turn.most:
                    turn.drafts.append(turn.sampler.draft(logits[turn.lane], turn.drafts))
        for turn in turns:
            turn.drafts = list(self.proposals(turn))[: turn.most]

    def _rewrite(
        self, turns: Sequence[Turn], made: Sequence[list[int]], hidden: torch.Tensor
    ) -> None:
        """Write the accepted drafts' slots anew, from the model's output and not the head's."""
        assert self._draft is not None
        assert self._draft_cache is not None
        steps = self.draft_tokens
        rows = RowBatch.empty(self.store.lanes * steps, _width(turns), self.store.device)
        for turn, new in zip(turns, made, strict=True):
            for step, token in enumerate(new[:-1]):
                _put(
                    rows,
                    turn.lane * steps + step,
                    turn,
                    token=token,
                    position=turn.position + 1 + step,
                )
        self._draft.write_rows(
            self.model.embed(rows.tokens),
            hidden[:, :-1].flatten(0, 1),
            positions=rows.positions,
            cache=self._draft_cache,
            slots=rows.slots,
        )


def _put(rows: RowBatch, row: int, turn: Turn, *, token: int, position: int) -> None:
    rows.tokens[row] = token
    rows.positions[:, row] = position + turn.axes
    rows.tables[row, : len(turn.table)] = turn.table
    rows.lengths[row] = position + 1
    page, offset = divmod(position, PAGE_TOKENS)
    rows.slots[row] = turn.table[page] * PAGE_TOKENS + offset


def _width(turns: Sequence[Turn]) -> int:
    return max((len(turn.table) for turn in turns), default=1)


def slots_of(table: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Return the slots, page x 64 + offset, of the positions [begin, end) of a table."""
    at = torch.arange(begin, end, device=table.device)
    return table[at // PAGE_TOKENS] * PAGE_TOKENS + at % PAGE_TOKENS


def _check_drafts(model: Model, draft_tokens: int) -> None:
    """Say no to a draft window that this model cannot serve."""
    if type(draft_tokens) is not int or not 0 <= draft_tokens <= MOST_DRAFTS:
        raise ModelError(f"draft_tokens: {draft_tokens!r}; needs an int of 0 to {MOST_DRAFTS}")
    if draft_tokens and model.draft_head is None:
        raise ModelError(f"draft_tokens: {draft_tokens}; this model has no draft head, needs 0")


def layout_of(model: Model, *, kv_dtype: str, draft_tokens: int) -> SlabLayout:
    """Return what pages and images of this model hold.

    Raises:
        ModelError: drafting asked of a model without a draft head, or more than it may be.
        ConfigError: as `SlabLayout` does.
    """
    _check_drafts(model, draft_tokens)
    config = model.config
    sizes = Sizes(
        attention_layers=config.num_attention_layers + bool(draft_tokens),
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        recurrent_shape=config.recurrent_shape,
        conv_shape=config.conv_shape,
        hidden=config.hidden_size,
        dtype=model.dtype,
    )
    return SlabLayout(sizes, kv_dtype=kv_dtype)
