"""One model on one slab: prefill of a lane, and rounds of drafting and verifying over all lanes.

It depends on neither requests nor the pool. Every round runs lanes × (draft tokens + 1) rows,
padded, whatever is drafted and whichever lanes run: a row's bits never depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ninfer_pool.errors import ModelError
from ninfer_pool.kernels import PAGE_TOKENS
from ninfer_pool.runner.batch import RowBatch
from ninfer_pool.runner.draft import DraftHead
from ninfer_pool.runner.forms import PREFILL, ROWS
from ninfer_pool.runner.graphs import Decoded, Graphs
from ninfer_pool.runner.model import EmbeddingSpan, Model
from ninfer_pool.runner.sampling import Sampler
from ninfer_pool.runner.slab import Slab, SlabLayout

MOST_DRAFTS = 5


@dataclass(slots=True, kw_only=True)
class Turn:
    """One lane's part in a round.

    Args:
        pending: the token sampled last, to be written at ``position``.
        table: int64 page ids.
        most: drafts of this round at most.
        axes: added to a position to give the rotary one, the same on three axes.
        stop: returns how many of the round's new tokens to keep, fewer where they end the request.
        drafts: the proposed tokens, filled by the round.
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

    def fill(self, rows: RowBatch, row: int, *, token: int, ahead: int) -> None:
        """Set a row to ``token`` at ``position + ahead``."""
        position = self.position + ahead
        rows.set(row, token=token, position=position, table=self.table, offset=self.axes)


class Executor:
    """Runs a model's forward passes over the pages and lanes of a slab, laid out by `layout_of`."""

    def __init__(self, model: Model, slab: Slab, *, draft_tokens: int = 0) -> None:
        self.model = model
        self.slab = slab
        self.draft_tokens = draft_tokens
        self._caches = slab.caches[: model.config.num_attention_layers]
        self._draft = model.draft_head if draft_tokens else None
        self._draft_cache = slab.caches[-1]
        # Experts are chosen on the host, which a graph cannot record.
        graphs = model.device.type == "cuda" and model.config.experts is None
        self._decode = Graphs(self._step) if graphs else self._step
        self.proposals: Callable[[Turn], list[int]] = lambda turn: turn.drafts
        """Returns the drafts to verify in place of the head's, at most as many: for tests."""

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
        """Run one chunk of one lane from position ``begin`` on; return its output (T, hidden).

        ``tokens`` int64 (T,), ``table`` int64 page ids, ``positions`` int64 (3, T), the three
        rotary axes; ``spans`` as `Model.embed` takes them.
        """
        x = self.model.embed(tokens, spans=spans)
        slots = slots_of(table, begin, begin + len(tokens))
        hidden = self.model.prefill(
            x,
            positions=positions,
            lane=self.slab.state(lane),
            cache=self._caches,
            table=table,
            begin=begin,
            slots=slots,
        )
        first = DraftHead.FIRST if begin == 0 else 0
        if self._draft is not None and first < len(tokens):
            before = torch.cat((self.slab.tails[lane][None], hidden[:-1]))
            self._draft.write(
                x[first:],
                before[first:],
                positions=positions[:, first:],
                cache=self._draft_cache,
                slots=slots[first:],
                form=PREFILL,
            )
        self.slab.tails[lane] = hidden[-1]
        return hidden

    @torch.inference_mode()
    def tail_logits(self, lane: int) -> torch.Tensor:
        """Return the fp32 logits (vocab,) of the token after the lane's last position."""
        return self.model.logits(self.slab.tails[lane].clone()[None])[0]

    # -- rounds ----------------------------------------------------------------------------

    @torch.inference_mode()
    def round(self, turns: Sequence[Turn]) -> list[list[int]]:
        """Draft, verify and keep for each turn; return each turn's new tokens, one or more.

        With n new tokens a lane has written the pending one and the first n - 1 of them; the
        last is the new pending one. State, tail and draft KV are those at ``position`` + n.
        """
        if self._draft is not None:
            self._propose(turns, self._draft)
        hidden, after = self._decode(self._rows(turns))
        logits = self.model.logits(hidden)
        made = [self._verify(turn, logits[turn.lane]) for turn in turns]
        after.keep(
            self.slab.states,
            [(turn.lane, len(new) - 1) for turn, new in zip(turns, made, strict=True)],
        )
        if self._draft is not None and any(len(new) > 1 for new in made):
            self._rewrite(turns, made, hidden, self._draft)
        for turn, new in zip(turns, made, strict=True):
            self.slab.tails[turn.lane] = hidden[turn.lane, len(new) - 1]
        return made

    def _verify(self, turn: Turn, logits: torch.Tensor) -> list[int]:
        new = turn.sampler.accept(logits[: len(turn.drafts) + 1], turn.drafts)
        return new[: max(1, turn.stop(new))]

    def _rows(self, turns: Sequence[Turn]) -> RowBatch:
        steps = self.draft_tokens + 1
        rows = self._padding(turns, steps)
        for turn in turns:
            for step, token in enumerate([turn.pending, *turn.drafts]):
                turn.fill(rows, turn.lane * steps + step, token=token, ahead=step)
        return rows

    def _padding(self, turns: Sequence[Turn], steps: int) -> RowBatch:
        """Return ``steps`` rows of padding per lane, wide enough for every turn's table."""
        width = max((len(turn.table) for turn in turns), default=1)
        return RowBatch.empty(self.slab.lanes * steps, width, self.slab.device)

    def _step(self, rows: RowBatch) -> Decoded:
        x = self.model.embed(rows.tokens)
        return self.model.decode(x, rows, state=self.slab.states, cache=self._caches)

    def _propose(self, turns: Sequence[Turn], head: DraftHead) -> None:
        """Draft with the head, one token per pass, each pass one row per lane.

        The first pass writes the pending token's slot from the model's own output. The slots
        that later passes write are valid only until `_rewrite`.
        """
        hidden = self.slab.tails.clone()
        for number in range(self.draft_tokens):
            going = [turn for turn in turns if number == 0 or number < turn.most]
            rows = self._padding(turns, 1)
            for turn in going:
                token = turn.drafts[-1] if turn.drafts else turn.pending
                turn.fill(rows, turn.lane, token=token, ahead=number)
            embeddings = self.model.embed(rows.tokens)
            hidden = head.decode(embeddings, hidden, rows, cache=self._draft_cache)
            logits = self.model.logits(hidden)
            for turn in going:
                if number < turn.most:
                    turn.drafts.append(turn.sampler.draft(logits[turn.lane], turn.drafts))
        for turn in turns:
            turn.drafts = list(self.proposals(turn))[: turn.most]

    def _rewrite(
        self,
        turns: Sequence[Turn],
        made: Sequence[list[int]],
        hidden: torch.Tensor,
        head: DraftHead,
    ) -> None:
        """Write the accepted drafts' slots again, from the model's output in place of the head's.

        ``hidden`` (lanes, draft tokens + 1, hidden) is the model's output in this round.
        """
        steps = self.draft_tokens
        rows = self._padding(turns, steps)
        for turn, new in zip(turns, made, strict=True):
            for step, token in enumerate(new[:-1]):
                turn.fill(rows, turn.lane * steps + step, token=token, ahead=1 + step)
        head.write(
            self.model.embed(rows.tokens),
            hidden[:, :-1].flatten(0, 1),
            positions=rows.positions,
            cache=self._draft_cache,
            slots=rows.slots,
            form=ROWS,
        )


def slots_of(table: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Return the slots, page × 64 + offset, of the positions [begin, end) of a table."""
    at = torch.arange(begin, end, device=table.device)
    return table[at // PAGE_TOKENS] * PAGE_TOKENS + at % PAGE_TOKENS


def layout_of(model: Model, *, kv_dtype: str, draft_tokens: int) -> SlabLayout:
    """Return the layout of this model's pages and images.

    Raises:
        ModelError: a draft window that this model cannot serve.
        ConfigError: as `SlabLayout` does.
    """
    if type(draft_tokens) is not int or not 0 <= draft_tokens <= MOST_DRAFTS:
        raise ModelError(f"draft_tokens: {draft_tokens!r}; needs an int of 0 to {MOST_DRAFTS}")
    if draft_tokens and model.draft_head is None:
        raise ModelError(f"draft_tokens: {draft_tokens}; this model has no draft head, needs 0")
    draft_layers = int(draft_tokens > 0)
    return SlabLayout(model.config, dtype=model.dtype, kv_dtype=kv_dtype, draft_layers=draft_layers)
