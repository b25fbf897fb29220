"""A row of a decode step has the same bits wherever it lies and whatever lies beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ninfer_pool.kernels import PAGE_TOKENS, KVPages
from ninfer_pool.runner.batch import RowBatch
from ninfer_pool.runner.forms import ROWS
from ninfer_pool.runner.model import Model, Steps
from ninfer_pool.runner.slab import LaneState
from tests.runner.models import random_model
from tests.runner.runs import empty_state, nan_pages

PAGES = 4
"""Pages a lane."""

SHAPES: dict[str, dict[str, Any]] = {
    "even": {},
    "odd": {
        "hidden_size": 60,
        "intermediate_size": 100,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 3,
        "linear_value_head_dim": 20,
    },
    "experts": {
        "model_type": "qwen3_5_moe_text",
        "num_experts": 9,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56,
    },
}


@dataclass
class Lanes:
    """B lanes of random content in one set of pages."""

    cache: list[KVPages]
    tables: torch.Tensor
    frontiers: torch.Tensor
    state: LaneState
    x: torch.Tensor

    def select(self, order: torch.Tensor) -> Lanes:
        """The lanes in another order."""
        recurrent, conv = self.state.recurrent[order], self.state.conv[order]
        state = LaneState(recurrent=recurrent, conv=conv)
        return Lanes(self.cache, self.tables[order], self.frontiers[order], state, self.x[order])


def random_lanes(model: Model, lanes: int, steps: int, seed: int) -> Lanes:
    generator = torch.Generator().manual_seed(seed)
    pages, state = lanes * PAGES + 1, empty_state(model, lanes)
    cache = [nan_pages(model, pages) for _ in range(model.config.num_attention_layers)]
    for tensor in (state.recurrent, state.conv, *(x for one in cache for x in (one.k, one.v))):
        tensor.normal_(generator=generator)
    tables = torch.randperm(pages, generator=generator)[: lanes * PAGES].view(lanes, PAGES)
    frontiers = torch.randint(1, PAGES * PAGE_TOKENS - steps, (lanes,), generator=generator)
    x = torch.randn(lanes, steps, model.config.hidden_size, generator=generator)
    return Lanes(cache, tables, frontiers, state, x.to(model.dtype))


def decode(model: Model, lanes: Lanes) -> tuple[torch.Tensor, Steps]:
    """Run all steps of all lanes; return logits (B, S, vocab) and the states."""
    steps = lanes.x.shape[1]
    positions = lanes.frontiers[:, None] + torch.arange(steps)
    tables, rows = lanes.tables.repeat_interleave(steps, 0), positions.flatten()
    pages = tables.gather(1, (rows // PAGE_TOKENS)[:, None]).squeeze(1)
    hidden, states = model.decode(
        lanes.x.flatten(0, 1),
        RowBatch(
            tokens=torch.zeros_like(rows),
            positions=rows.expand(3, -1),
            tables=tables,
            lengths=rows + 1,
            slots=pages * PAGE_TOKENS + rows % PAGE_TOKENS,
        ),
        state=lanes.state,
        cache=lanes.cache,
    )
    return model.logits(hidden), states


def same(
    left: tuple[torch.Tensor, Steps], i: int, right: tuple[torch.Tensor, Steps], j: int
) -> bool:
    """Whether lane i of one result has the bits of lane j of the other."""
    pairs = [(left[0], right[0])]
    for a, b in zip(left[1], right[1], strict=True):
        pairs += zip(a, b, strict=True)
    return all(torch.equal(a[i], b[j]) for a, b in pairs)


@pytest.mark.parametrize(("lanes", "steps"), [(2, 1), (3, 3), (5, 1), (8, 1), (8, 6)])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_place_and_neighbours_change_no_bit(shape: str, dtype: str, lanes: int, steps: int) -> None:
    model = random_model(4, dtype=dtype, **SHAPES[shape])
    for seed in range(3):
        one = random_lanes(model, lanes, steps, seed)
        order = torch.randperm(lanes, generator=torch.Generator().manual_seed(seed))
        moved = one.select(order)
        moved.frontiers[0] = 1  # a neighbour of another length and content
        moved.x[0] += 1
        left, right = decode(model, moved), decode(model, one)
        assert all(same(left, i, right, int(order[i])) for i in range(1, lanes))
        assert not same(left, 0, right, int(order[0]))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_steps_together_are_the_steps_one_by_one(shape: str, dtype: str) -> None:
    """What a verify round accepts has the bits of rounds whose later steps were all refused."""
    model, lanes, steps = random_model(5, dtype=dtype, **SHAPES[shape]), 3, 4
    one = random_lanes(model, lanes, steps, 9)
    logits, states = decode(model, one)
    single = random_lanes(model, lanes, steps, 9)
    for step in range(steps):
        single.x = torch.randn_like(one.x)  # refused drafts
        single.x[:, 0] = one.x[:, step]
        found, after = decode(model, single)
        assert torch.equal(found[:, 0], logits[:, step])
        for kept, right in zip(after.recurrent, states.recurrent, strict=True):
            assert torch.equal(kept[:, 0], right[:, step])
        after.keep(single.state, [(lane, 0) for lane in range(lanes)])
        single.frontiers += 1


def test_a_padding_row_writes_nothing() -> None:
    model = random_model(6)
    lanes = random_lanes(model, 2, 1, 3)
    before = [(one.k.clone(), one.v.clone()) for one in lanes.cache]
    rows = RowBatch.empty(2, PAGES, torch.device("cpu"))
    rows.tables = lanes.tables
    model.decode(lanes.x.flatten(0, 1), rows, state=lanes.state, cache=lanes.cache)
    for one, (k, v) in zip(lanes.cache, before, strict=True):
        assert torch.equal(one.k, k)
        assert torch.equal(one.v, v)


@pytest.mark.parametrize("rows", [2, 3, 5, 6, 7, 9, 10, 11])
def test_a_product_shared_by_threads_treats_rows_alike(rows: int) -> None:
    """Without rounding the rows up, MKL's last rows differ here where it has two threads."""
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(n, 64, generator=generator) for n in (rows, 208))
    x[:] = x[0]
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    found = ROWS.linear(x, weight)
    torch.set_num_threads(threads)
    assert torch.equal(found, found[:1].expand(rows, -1))


@pytest.mark.parametrize("function", ["sigmoid", "softplus"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_functions_of_a_row_round_alike_and_right(function: str, dtype: torch.dtype) -> None:
    x = (torch.randn(301, generator=torch.Generator().manual_seed(1)) * 12).to(dtype)
    found = getattr(ROWS, function)(x)
    last = torch.stack([getattr(ROWS, function)(x[: i + 1])[i] for i in range(len(x))])
    assert torch.equal(found, last)
    right = getattr(torch.nn.functional, function)(x.double())
    torch.testing.assert_close(found, right.float(), rtol=1e-6, atol=1e-12)


def test_kept_states_are_those_after_the_steps_named_and_no_other_lane_changes() -> None:
    model = random_model(6)
    lanes = random_lanes(model, 3, 4, 2)
    _, states = decode(model, lanes)
    before = lanes.state.recurrent.clone(), lanes.state.conv.clone()
    states.keep(lanes.state, [(2, 1), (0, 3)])
    now = lanes.state.recurrent, lanes.state.conv
    for found, old, after in zip(now, before, states, strict=True):
        assert torch.equal(found[1], old[1])
        assert torch.equal(found[2], torch.stack([each[2, 1] for each in after]))
        assert torch.equal(found[0], torch.stack([each[0, 3] for each in after]))
