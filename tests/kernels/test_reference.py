"""The reference says what its formulas say: each is checked against a slow, obvious other way."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("torch")
import torch

from ninfer_pool.kernels import PAGE_TOKENS, reference
from tests.kernels.made import (
    Delta,
    Heads,
    Linear,
    Numbers,
    delta_inputs,
    error_ratio,
    fill,
    poisoned_pages,
    slots_of,
    stored,
)

HEADS = [Heads(query=4, kv=2, dim=64), Heads(query=3, kv=3, dim=128), Heads(query=5, kv=1, dim=24)]
LINEAR = [
    Linear(key_heads=1, value_heads=3, key_dim=24, value_dim=40),
    Linear(key_heads=2, value_heads=4, key_dim=32, value_dim=16),
    Linear(key_heads=3, value_heads=3, key_dim=7, value_dim=64),
]
LENGTHS = [1, 2, 3, 63, 64, 65, 255, 256, 257]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """softmax(scale q kᵀ) v for one row q (H, D) over k, v (n, G, D), a head at a time."""
    rows = []
    for h, query in enumerate(q.double()):
        g = h * k.shape[1] // len(q)
        weights = torch.softmax(k[:, g].double() @ query * scale, 0)
        rows.append(weights @ v[:, g].double())
    return torch.stack(rows)


# Pages


@pytest.mark.parametrize("storage", ["fp32", "bf16", "fp16"])
def test_append_writes_the_slots_and_nothing_else(storage: str) -> None:
    numbers = Numbers(1)
    cache = poisoned_pages(storage, pages=5, heads=2, dim=24)
    k, v = numbers.normal(70, 2, 24), numbers.normal(70, 2, 24)
    slots = slots_of(torch.tensor([4, 1]), 70)
    slots[[0, 69]] = -1
    reference.append_kv(cache, k, v, slots)
    for x, pages in ((k, cache.k), (v, cache.v)):
        flat = pages.transpose(1, 2).reshape(5 * PAGE_TOKENS, 2, 24)
        assert torch.equal(flat[slots[1:69]], x[1:69].to(pages.dtype))
        assert int(flat.isnan().logical_not().sum()) == 68 * 2 * 24


def test_a_quantised_number_is_within_half_a_step() -> None:
    x = Numbers(2).normal(50, 2, 192) * torch.logspace(-3, 3, 50)[:, None, None]
    codes, scale = reference.quantise(x)
    assert codes.dtype == torch.int8
    assert scale.shape == (50, 2, 3)
    back = reference.dequantise(codes, scale, torch.float32)
    step = scale.float().repeat_interleave(64, -1)
    # Rounding the scale to fp16 can clip a group's largest element by 127 × 2 ** -11 of a step.
    assert bool(((back - x).abs() <= step * 0.5631).all())


@pytest.mark.parametrize("value", [0.0, 1e-12, 1e7, 3e38])
def test_quantising_extremes_stays_finite(value: float) -> None:
    codes, scale = reference.quantise(torch.full((1, 64), value))
    back = reference.dequantise(codes, scale, torch.float32)
    assert bool(back.isfinite().all())
    assert bool((back <= value).all())


def test_what_is_quantised_again_stays_as_it_is() -> None:
    codes, scale = reference.quantise(Numbers(3).normal(9, 128))
    again = reference.quantise(reference.dequantise(codes, scale, torch.float32))
    assert torch.equal(again[0], codes)
    assert torch.equal(again[1], scale)


# Attention


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("first", [0, 1, 70])
@pytest.mark.parametrize(("begin", "tokens"), [(0, 1), (0, 66), (63, 2), (64, 1), (100, 30)])
def test_prefill_attends_to_the_positions_up_to_its_own(
    heads: Heads, first: int, begin: int, tokens: int
) -> None:
    numbers, end = Numbers(4), begin + tokens
    k, v = numbers.normal(end, heads.kv, heads.dim), numbers.normal(end, heads.kv, heads.dim)
    q = numbers.normal(tokens, heads.query, heads.dim)
    cache = poisoned_pages("fp32", pages=6, heads=heads.kv, dim=heads.dim)
    table = numbers.order(6)[:3]
    fill(cache, table, k, v)
    out = reference.attention_prefill(q, cache, table, begin=begin, scale=0.2, first=first)
    for i, row in enumerate(out):
        seen = slice(first, begin + i + 1)
        right = attend(q[i], k[seen], v[seen], 0.2)
        if begin + i < first:
            assert not row.any()
        else:
            assert error_ratio(row, right) < 3e-6


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("first", [0, 1])
def test_decode_attends_to_each_rows_own_length(heads: Heads, first: int) -> None:
    numbers, lengths = Numbers(5), [0, 1, 2, 63, 64, 65, 130]
    cache = poisoned_pages("fp32", pages=30, heads=heads.kv, dim=heads.dim)
    order, tables = numbers.order(30), torch.full((7, 3), -1)
    q, rows = numbers.normal(7, heads.query, heads.dim), []
    for r, length in enumerate(lengths):
        used = -(-length // PAGE_TOKENS)
        tables[r, :used] = order[3 * r : 3 * r + used]
        shape = (length, heads.kv, heads.dim)
        rows.append((numbers.normal(*shape), numbers.normal(*shape)))
        fill(cache, tables[r], *rows[r])
    out = reference.attention_decode(
        q, cache, tables, torch.tensor(lengths), scale=0.2, first=first
    )
    for r, (k, v) in enumerate(rows):
        if lengths[r] <= first:
            assert not out[r].any()
        else:
            assert error_ratio(out[r], attend(q[r], k[first:], v[first:], 0.2)) < 3e-6


@pytest.mark.parametrize("storage", ["bf16", "int8-g64"])
def test_attention_reads_what_the_pages_hold_not_what_was_written(storage: str) -> None:
    numbers, heads = Numbers(6), Heads(query=4, kv=2, dim=64)
    k, v = numbers.normal(100, 2, 64), numbers.normal(100, 2, 64)
    cache = poisoned_pages(storage, pages=2, heads=2, dim=64)
    table = torch.tensor([1, 0])
    fill(cache, table, k, v)
    if storage == "bf16":
        k, v = k.bfloat16().float(), v.bfloat16().float()
    else:
        k, v = (reference.dequantise(*reference.quantise(x), torch.float32) for x in (k, v))
    q = numbers.normal(1, heads.query, heads.dim)
    right = attend(q[0], k, v, 0.2)
    length = torch.tensor([100])
    decoded = reference.attention_decode(q, cache, table[None], length, scale=0.2)
    prefilled = reference.attention_prefill(q, cache, table, begin=99, scale=0.2)
    assert error_ratio(decoded[0], right) < 1e-6
    assert error_ratio(prefilled[0], right) < 1e-6


# Gated delta rule


def unit(x: torch.Tensor) -> torch.Tensor:
    """Each vector of the last dimension at length one, as the models' own code has it."""
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def delta_token_by_token(inputs: Delta, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence as it is written, in fp64: out (T, Hv, Dv) and the states after each token."""
    q, k, v, g, beta = (x.double() for x in inputs)
    serves = torch.arange(v.shape[1]) * k.shape[1] // v.shape[1]
    s, rows, states = state.double(), [], []
    for t in range(len(v)):
        key, query = unit(k[t, serves]), unit(q[t, serves]) / math.sqrt(k.shape[2])
        s = s * g[t].exp()[:, None, None]
        known = torch.einsum("hk,hkv->hv", key, s)
        s = s + torch.einsum("hk,hv->hkv", key, beta[t, :, None] * (v[t] - known))
        rows.append(torch.einsum("hk,hkv->hv", query, s))
        states.append(s)
    return torch.stack(rows), torch.stack(states)


@pytest.mark.parametrize("sizes", LINEAR, ids=str)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_prefill_by_chunks_is_the_recurrence(sizes: Linear, tokens: int) -> None:
    numbers = Numbers(7)
    inputs = delta_inputs(numbers, sizes, tokens)
    state = numbers.normal(sizes.value_heads, sizes.key_dim, sizes.value_dim)
    out, last = reference.delta_prefill(*inputs, state)
    right, states = delta_token_by_token(inputs, state)
    assert error_ratio(out, right) < 2e-6
    assert error_ratio(last, states[-1]) < 2e-6


@pytest.mark.parametrize("sizes", LINEAR, ids=str)
def test_a_step_keeps_the_state_after_each_token(sizes: Linear) -> None:
    numbers = Numbers(8)
    inputs = delta_inputs(numbers, sizes, 3, 5)
    state = numbers.normal(3, sizes.value_heads, sizes.key_dim, sizes.value_dim)
    out, states = reference.delta_step(*inputs, state)
    for lane in range(3):
        right = delta_token_by_token(Delta(*(x[lane] for x in inputs)), state[lane])
        assert error_ratio(out[lane], right[0]) < 1e-6
        assert error_ratio(states[lane], right[1]) < 1e-6


def test_equal_keys_without_decay_stay_accurate() -> None:
    """The worst case for a triangular inverse made of powers: here those reach 10 ** 18."""
    sizes = Linear(key_heads=1, value_heads=1, key_dim=8, value_dim=8)
    q, k, v, g, beta = delta_inputs(Numbers(9), sizes, 128)
    inputs = Delta(q, k[:1].expand_as(k), v, torch.zeros_like(g), torch.ones_like(beta))
    state = torch.zeros(1, 8, 8)
    out, last = reference.delta_prefill(*inputs, state)
    right, states = delta_token_by_token(inputs, state)
    assert error_ratio(out, right) < 1e-5
    assert error_ratio(last, states[-1]) < 1e-5


def test_a_decay_that_forgets_all_makes_no_nan() -> None:
    sizes = Linear(key_heads=1, value_heads=2, key_dim=16, value_dim=16)
    q, k, v, g, beta = delta_inputs(Numbers(10), sizes, 130)
    inputs = Delta(q, k, v, torch.full_like(g, -200.0), beta)
    out, last = reference.delta_prefill(*inputs, torch.ones(2, 16, 16))
    right, states = delta_token_by_token(inputs, torch.ones(2, 16, 16))
    assert error_ratio(out, right) < 1e-6
    assert error_ratio(last, states[-1]) < 1e-6


# Convolution


def convolve_by_hand(
    x: torch.Tensor, weight: torch.Tensor, columns: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """y (T, C) and the columns after each token (T, C, W - 1), token by token in fp64."""
    held, rows, after = columns.double(), [], []
    for token in x.double():
        window = torch.cat((held, token[:, None]), 1)
        total = (window * weight.double()).sum(1)
        rows.append(total / (1 + (-total).exp()))
        held = window[:, 1:]
        after.append(held)
    return torch.stack(rows), torch.stack(after)


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 70])
def test_convolution_continues_from_the_columns(tokens: int, width: int) -> None:
    numbers = Numbers(11)
    x, weight = numbers.normal(tokens, 37), numbers.normal(37, width)
    columns = numbers.normal(37, width - 1)
    right, after = convolve_by_hand(x, weight, columns)
    y, last = reference.conv_prefill(x, weight, columns)
    assert error_ratio(y, right) < 1e-6
    assert torch.equal(last.double(), after[-1])
    y_step, after_step = reference.conv_step(x[None], weight, columns[None])
    assert error_ratio(y_step[0], right) < 1e-6
    assert torch.equal(after_step[0].double(), after)


def test_a_convolution_in_pieces_is_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = Numbers(12)
    inputs = numbers.normal(50, 10), numbers.normal(10, 4), numbers.normal(10, 3)
    whole = reference.conv_prefill(*inputs)
    monkeypatch.setattr(reference, "CONV_PIECE", 70)
    pieces = reference.conv_prefill(*inputs)
    assert torch.equal(pieces[0], whole[0])
    assert torch.equal(pieces[1], whole[1])


# Bytes and tokens


@pytest.mark.parametrize("page_bytes", [7, 64])
def test_pages_and_images_move_whole(page_bytes: int) -> None:
    slab = torch.arange(6 * page_bytes, dtype=torch.int64).to(torch.uint8).view(6, page_bytes)
    before = slab.clone()
    reference.copy_pages(slab, torch.tensor([0, 4]), torch.tensor([5, 1]))
    assert torch.equal(slab, before[[0, 4, 2, 3, 4, 0]])
    buffer = torch.full((2, page_bytes), 9, dtype=torch.uint8)
    reference.save_image(slab, torch.tensor([3, 0]), buffer)
    assert bool((slab[[3, 0]] == 9).all())
    reference.load_image(slab, torch.tensor([4, 3]), buffer)
    assert torch.equal(buffer, torch.stack((before[4], slab[3])))


@pytest.mark.parametrize("at", [0, 1, 98, 99, None])
def test_the_first_difference_is_found(at: int | None) -> None:
    a = torch.arange(100, dtype=torch.int32)
    b = a.clone()
    if at is not None:
        b[at:] += 1
    assert reference.first_difference(a, b) == (100 if at is None else at)


def test_empty_sequences_do_not_differ() -> None:
    empty = torch.empty(0, dtype=torch.int32)
    assert reference.first_difference(empty, empty) == 0


# What every operation keeps


def test_no_input_is_changed() -> None:
    numbers, sizes = Numbers(13), Linear(key_heads=1, value_heads=1, key_dim=16, value_dim=16)
    state, weight, columns = numbers.normal(1, 16, 16), numbers.normal(16, 4), numbers.normal(16, 3)
    for tokens in (1, 64, 65):
        inputs = delta_inputs(numbers, sizes, tokens)
        x, held = numbers.normal(tokens, 16), []
        every = [*inputs, state, x, weight, columns]
        held = [t.clone() for t in every]
        reference.delta_prefill(*inputs, state)
        reference.delta_step(*Delta(*(t[None] for t in inputs)), state[None])
        reference.conv_prefill(x, weight, columns)
        reference.conv_step(x[None], weight, columns[None])
        assert all(torch.equal(a, b) for a, b in zip(every, held, strict=True))


def test_attention_changes_no_page() -> None:
    numbers = Numbers(14)
    cache = poisoned_pages("fp32", pages=3, heads=1, dim=16)
    table, length = torch.tensor([2, 0]), torch.tensor([80])
    fill(cache, table, numbers.normal(80, 1, 16), numbers.normal(80, 1, 16))
    before = [x.clone() for x in stored(cache)]
    q = numbers.normal(80, 2, 16)
    reference.attention_prefill(q, cache, table, begin=0, scale=0.25)
    reference.attention_decode(q[:1], cache, table[None], length, scale=0.25)
    for x, y in zip(stored(cache), before, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
