"""The linear-attention operations give what transformers' own functions give."""

# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import (
    causal_conv1d_update,
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from ninfer_pool.kernels import reference
from tests.kernels.made import Delta, Linear, Numbers, delta_inputs, error_ratio

LINEAR = [
    Linear(key_heads=2, value_heads=4, key_dim=32, value_dim=32),
    Linear(key_heads=1, value_heads=3, key_dim=64, value_dim=128),
    Linear(key_heads=3, value_heads=3, key_dim=24, value_dim=40),
]
BOUND = 1e-5


@pytest.mark.parametrize("sizes", LINEAR, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 300])
def test_prefill(sizes: Linear, tokens: int) -> None:
    numbers = Numbers(1)
    inputs = delta_inputs(numbers, sizes, tokens)
    state = numbers.normal(sizes.value_heads, sizes.key_dim, sizes.value_dim)
    batch = Delta(*(x[None] for x in inputs))
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    right, last = torch_chunk_gated_delta_rule(*batch, initial_state=state[None], **options)
    found, after = reference.delta_prefill(*inputs, state)
    assert error_ratio(found, right[0]) < BOUND
    assert error_ratio(after, last[0]) < BOUND


@pytest.mark.parametrize("sizes", LINEAR, ids=str)
@pytest.mark.parametrize("steps", [1, 6])
def test_step(sizes: Linear, steps: int) -> None:
    numbers = Numbers(2)
    inputs = delta_inputs(numbers, sizes, 3, steps)
    state = numbers.normal(3, sizes.value_heads, sizes.key_dim, sizes.value_dim)
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    right, last = torch_recurrent_gated_delta_rule(*inputs, initial_state=state, **options)
    found, states = reference.delta_step(*inputs, state)
    assert error_ratio(found, right) < BOUND
    assert error_ratio(states[:, -1], last) < BOUND


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_convolution(tokens: int) -> None:
    numbers = Numbers(3)
    x, weight = numbers.normal(2, tokens, 50), numbers.normal(50, 4)
    columns = numbers.normal(2, 50, 3)
    held = columns.clone()
    right = causal_conv1d_update(x.mT, held, weight, None, "silu")
    found, after = reference.conv_step(x, weight, columns)
    assert error_ratio(found, right.mT) < BOUND
    assert torch.equal(after[:, -1], held)
