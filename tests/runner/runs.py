"""Runs a model over pages of its own, as a runner would, for tests that need no store."""

from __future__ import annotations

import itertools

import torch

from ninfer_pool.kernels import PAGE_TOKENS, KVPages
from ninfer_pool.runner.batch import RowBatch
from ninfer_pool.runner.model import Model
from ninfer_pool.runner.slab import LaneState


def nan_pages(model: Model, num_pages: int, *, dtype: torch.dtype | None = None) -> KVPages:
    """Return one layer's pages, filled with NaN: what was never written may reach nothing."""
    config = model.config
    shape = (num_pages, config.num_key_value_heads, PAGE_TOKENS, config.head_dim)
    k, v = (torch.full(shape, torch.nan, dtype=dtype or model.dtype) for _ in "kv")
    return KVPages(k=k.to(model.device), v=v.to(model.device))


def empty_state(model: Model, lanes: int) -> LaneState:
    """Return the state of lanes before their first token: zeros."""
    config, device = model.config, model.device
    recurrent = torch.zeros(lanes, *config.recurrent_shape, device=device)
    conv = torch.zeros(lanes, *config.conv_shape, dtype=model.dtype, device=device)
    return LaneState(recurrent=recurrent, conv=conv)


def text_positions(begin: int, end: int) -> torch.Tensor:
    """Return the three axes' positions (3, T) of text at [begin, end)."""
    return torch.arange(begin, end).expand(3, -1)


class Run:
    """One lane of one model, with pages for ``max_tokens`` in a shuffled order."""

    def __init__(self, model: Model, *, max_tokens: int = 512, seed: int = 0) -> None:
        pages = -(-max_tokens // PAGE_TOKENS)
        order = torch.randperm(pages + 2, generator=torch.Generator().manual_seed(seed))
        self.model = model
        self.table = order[:pages]
        self.cache = [nan_pages(model, pages + 2) for _ in range(model.config.num_attention_layers)]
        self.draft_cache = nan_pages(model, pages + 2)
        self.state = empty_state(model, 1)
        self.frontier = 0

    def lane(self) -> LaneState:
        """Return the state without its batch."""
        return LaneState(recurrent=self.state.recurrent[0], conv=self.state.conv[0])

    def slots(self, begin: int, end: int) -> torch.Tensor:
        """Return the slots of the positions [begin, end)."""
        positions = torch.arange(begin, end)
        return self.table[positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS

    def rows(self, begin: int, end: int) -> RowBatch:
        """Return one row for each of the positions [begin, end)."""
        return RowBatch(
            tokens=torch.zeros(end - begin, dtype=torch.int64),
            positions=text_positions(begin, end),
            tables=self.table.expand(end - begin, -1),
            lengths=torch.arange(begin + 1, end + 1),
            slots=self.slots(begin, end),
        )

    def prefill(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Run embeddings (T, hidden) from the frontier as one chunk and return the output."""
        begin, end = self.frontier, self.frontier + len(x)
        hidden = self.model.prefill(
            x,
            positions=text_positions(begin, end) if positions is None else positions,
            lane=self.lane(),
            cache=self.cache,
            table=self.table,
            begin=begin,
            slots=self.slots(begin, end),
        )
        self.frontier = end
        return hidden

    def prompt(self, tokens: torch.Tensor, *, cuts: tuple[int, ...] = ()) -> torch.Tensor:
        """Prefill tokens (T,), cut into chunks at ``cuts``, and return all the output."""
        edges = [0, *(cut for cut in cuts if cut < len(tokens)), len(tokens)]
        pairs = itertools.pairwise(edges)
        return torch.cat([self.prefill(self.model.embed(tokens[a:b])) for a, b in pairs])

    def decode(self, tokens: torch.Tensor) -> torch.Tensor:
        """Run tokens (S,) as one decode call, keep the last state, return the output."""
        steps = len(tokens)
        begin, end = self.frontier, self.frontier + steps
        hidden, after = self.model.decode(
            self.model.embed(tokens), self.rows(begin, end), state=self.state, cache=self.cache
        )
        after.keep(self.state, [(0, steps - 1)])
        self.frontier = end
        return hidden[0]

    def fork(self, *, seed: int = 1) -> Run:
        """Return a run that stands where this one does, with copies in pages of another order."""
        other = Run(self.model, max_tokens=len(self.table) * PAGE_TOKENS, seed=seed)
        used = -(-self.frontier // PAGE_TOKENS)
        source, target = self.table[:used], other.table[:used]
        ours, theirs = [*self.cache, self.draft_cache], [*other.cache, other.draft_cache]
        for mine, copy in zip(ours, theirs, strict=True):
            copy.k[target], copy.v[target] = mine.k[source], mine.v[source]
        other.state.recurrent.copy_(self.state.recurrent)
        other.state.conv.copy_(self.state.conv)
        other.frontier = self.frontier
        return other
