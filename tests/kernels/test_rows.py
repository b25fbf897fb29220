"""A row's bits in a decode step depend on that row alone, and nothing unasked for is read.

All is compared with ``torch.equal``: a resumed run is promised the same bits, not close ones.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
import torch

from ninfer_pool.kernels import PAGE_TOKENS, KVPages, reference
from tests.kernels.made import (
    Delta,
    Heads,
    Linear,
    Numbers,
    delta_inputs,
    fill,
    poisoned_pages,
    stored,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEADS = [Heads(query=4, kv=2, dim=64), Heads(query=9, kv=3, dim=128), Heads(query=1, kv=1, dim=64)]
LINEAR = [
    Linear(key_heads=1, value_heads=3, key_dim=24, value_dim=40),
    Linear(key_heads=2, value_heads=2, key_dim=64, value_dim=64),
    Linear(key_heads=1, value_heads=1, key_dim=7, value_dim=9),
]
ROWS, TABLE, SLAB = 6, 4, 40

Row = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""A query (H, D) with the keys and values (n, G, D) that it attends to."""


def make_row(numbers: Numbers, heads: Heads, dtype: torch.dtype, length: int) -> Row:
    """One row of random numbers."""
    kv = (length, heads.kv, heads.dim)
    q = numbers.normal(heads.query, heads.dim, dtype=dtype)
    return q, numbers.normal(*kv, dtype=dtype), numbers.normal(*kv, dtype=dtype)


def decode(
    rows: list[Row], storage: str, pages: torch.Tensor, *, first: int = 0
) -> list[torch.Tensor]:
    """Decode ``rows`` together, their keys and values spread over ``pages`` of a poisoned slab."""
    _, heads, dim = rows[0][1].shape
    cache = poisoned_pages(storage, pages=SLAB, heads=heads, dim=dim)
    tables = torch.full((len(rows), TABLE), -1)
    for r, (_, k, v) in enumerate(rows):
        used = -(-len(k) // PAGE_TOKENS)
        tables[r, :used], pages = pages[:used], pages[used:]
        fill(cache, tables[r], k, v)
    q = torch.stack([row[0] for row in rows])
    lengths = torch.tensor([len(row[1]) for row in rows])
    out = reference.attention_decode(q, cache, tables, lengths, scale=0.2, first=first)
    return list(out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("storage", ["fp32", "bf16", "int8-g64"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attention_gives_a_row_the_same_bits_anywhere(
    heads: Heads, storage: str, dtype: torch.dtype
) -> None:
    numbers = Numbers(1)
    for trial, length in enumerate((1, 63, 64, 65, 200, 256)):
        row = make_row(numbers, heads, dtype, length)
        alone = decode([row], storage, numbers.order(SLAB))[0]
        assert bool(alone.isfinite().all())
        others = [make_row(numbers, heads, dtype, 1 + 37 * n) for n in range(ROWS - 1)]
        for place in (trial % ROWS, ROWS - 1):
            rows = [*others[:place], row, *others[place:]]
            found = decode(rows, storage, numbers.order(SLAB))
            assert torch.equal(found[place], alone)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("storage", ["fp32", "bf16", "int8-g64"])
def test_rows_of_one_lane_get_the_bits_of_rows_alone(storage: str, dtype: torch.dtype) -> None:
    numbers, heads = Numbers(8), HEADS[1]
    _, k, v = make_row(numbers, heads, dtype, 140)
    cache = poisoned_pages(storage, pages=SLAB, heads=heads.kv, dim=heads.dim)
    table = numbers.order(SLAB)[:TABLE]
    fill(cache, table, k, v)
    lengths = torch.tensor([126, 127, 128, 129, 0, 140, 1])
    q = numbers.normal(7, heads.query, heads.dim, dtype=dtype)
    together = reference.attention_decode(q, cache, table.expand(7, -1), lengths, scale=0.2)
    for r in range(7):
        one = slice(r, r + 1)
        alone = reference.attention_decode(q[one], cache, table[None], lengths[one], scale=0.2)
        assert torch.equal(alone[0], together[r])


def test_attention_of_padding_rows_is_zeros_whatever_their_tables_say() -> None:
    numbers, heads = Numbers(2), HEADS[0]
    row = make_row(numbers, heads, torch.float32, 70)
    cache = poisoned_pages("fp32", pages=4, heads=heads.kv, dim=heads.dim)
    fill(cache, torch.tensor([2, 1]), row[1], row[2])
    q = torch.stack((torch.full_like(row[0], torch.nan), row[0], row[0]))
    tables, lengths = torch.tensor([[-1, -1], [2, 1], [10**6, -9]]), torch.tensor([0, 70, 1])
    out = reference.attention_decode(q, cache, tables, lengths, scale=0.2, first=1)
    assert not out[[0, 2]].any()
    assert bool(out[1].isfinite().all())


@pytest.mark.parametrize("storage", ["fp32", "bf16", "int8-g64"])
@pytest.mark.parametrize(("begin", "tokens"), [(0, 64), (0, 65), (64, 40), (100, 30), (127, 1)])
def test_prefill_depends_neither_on_page_ids_nor_on_other_pages(
    storage: str, begin: int, tokens: int
) -> None:
    numbers, heads, end = Numbers(3), HEADS[0], begin + tokens
    _, k, v = make_row(numbers, heads, torch.float32, end)
    q = numbers.normal(tokens, heads.query, heads.dim)

    def run(table: torch.Tensor, *, neighbours: bool) -> torch.Tensor:
        cache = poisoned_pages(storage, pages=SLAB, heads=heads.kv, dim=heads.dim)
        fill(cache, table, k, v)
        if neighbours:
            mess(cache, numbers, table[: -(-end // PAGE_TOKENS)])
        return reference.attention_prefill(q, cache, table, begin=begin, scale=0.2)

    right = run(torch.arange(TABLE), neighbours=False)
    assert bool(right.isfinite().all())
    for neighbours in (False, True):
        table = numbers.order(SLAB)[:TABLE]
        assert torch.equal(run(table, neighbours=neighbours), right)


def mess(cache: KVPages, numbers: Numbers, spared: torch.Tensor) -> None:
    """Write other numbers to every page but those ``spared``."""
    others = torch.ones(SLAB, dtype=torch.bool)
    others[spared] = False
    for x in stored(cache):
        x[others] = numbers.normal(*x[others].shape).to(x.dtype)


def merge(row: torch.Tensor, others: torch.Tensor, place: int) -> torch.Tensor:
    """A batch with ``row`` (1, …) at ``place`` among ``others`` (B, …)."""
    return torch.cat((others[:place], row, others[place:]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", LINEAR, ids=str)
@pytest.mark.parametrize("steps", [1, 3])
def test_a_delta_step_gives_a_lane_the_same_bits_anywhere(
    sizes: Linear, dtype: torch.dtype, steps: int
) -> None:
    numbers = Numbers(4)
    shape = sizes.value_heads, sizes.key_dim, sizes.value_dim
    row, state = delta_inputs(numbers, sizes, 1, steps, dtype=dtype), numbers.normal(1, *shape)
    alone = reference.delta_step(*row, state)
    others = delta_inputs(numbers, sizes, ROWS - 1, steps, dtype=dtype)
    states = torch.full((ROWS - 1, *shape), torch.nan)
    for place in range(ROWS):
        batch = Delta(*(merge(x, y, place) for x, y in zip(row, others, strict=True)))
        out, after = reference.delta_step(*batch, merge(state, states, place))
        assert torch.equal(out[place], alone[0][0])
        assert torch.equal(after[place], alone[1][0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", [1, 23, 64, 150])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_convolution_gives_a_lane_the_same_bits_anywhere(
    channels: int, dtype: torch.dtype, steps: int
) -> None:
    numbers = Numbers(5)
    weight = numbers.normal(channels, 4, dtype=dtype)
    x, columns = numbers.normal(1, steps, channels), numbers.normal(1, channels, 3)
    x, columns = x.to(dtype), columns.to(dtype)
    alone = reference.conv_step(x, weight, columns)
    others = numbers.normal(ROWS - 1, steps, channels, dtype=dtype)
    held = torch.full((ROWS - 1, channels, 3), torch.nan, dtype=dtype)
    for place in range(ROWS):
        batch = merge(x, others, place), weight, merge(columns, held, place)
        y, after = reference.conv_step(*batch)
        assert torch.equal(y[place], alone[0][0])
        assert torch.equal(after[place], alone[1][0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_verified_together_get_the_bits_of_tokens_decoded_in_turn(
    dtype: torch.dtype,
) -> None:
    numbers, sizes = Numbers(6), LINEAR[1]
    together = delta_inputs(numbers, sizes, 2, 4, dtype=dtype)
    state = numbers.normal(2, sizes.value_heads, sizes.key_dim, sizes.value_dim)
    out, states = reference.delta_step(*together, state)
    for i in range(4):
        one = Delta(*(x[:, i : i + 1] for x in together))
        out_i, after = reference.delta_step(*one, state)
        state = after[:, 0]
        assert torch.equal(out_i[:, 0], out[:, i])
        assert torch.equal(state, states[:, i])


def test_silu_gives_an_element_the_same_bits_anywhere() -> None:
    x = Numbers(7).normal(4096) * 4
    whole = reference.silu(x)
    assert torch.equal(torch.cat([reference.silu(x[i : i + 7]) for i in range(0, 4096, 7)]), whole)
    torch.testing.assert_close(whole, torch.nn.functional.silu(x))


def test_silu_has_no_overflow() -> None:
    x = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4])
    right = torch.nn.functional.silu(x)
    torch.testing.assert_close(reference.silu(x), right, rtol=1e-6, atol=1e-30)
