"""Each Triton kernel against the reference: on the card where there is one, else interpreted."""

# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")
import torch
from triton import knobs

from ninfer_pool.kernels import dispatch, reference
from tests.kernels import cases, interpreter
from tests.kernels.cases import Case
from tests.kernels.made import Heads, Linear, error_ratio
from tests.triton_mode import has_cuda

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
HEADS = Heads(query=6, kv=2, dim=64)
ODD = Heads(query=3, kv=1, dim=24)
WIDE = Heads(query=2, kv=1, dim=192)
SMALL = Linear(key_heads=1, value_heads=2, key_dim=32, value_dim=32)
UNEVEN = Linear(key_heads=2, value_heads=2, key_dim=24, value_dim=40)

CASES = [
    cases.append("fp32", ODD, FP32),
    cases.append("bf16", HEADS, FP32),
    cases.append("bf16", HEADS, BF16),
    cases.append("fp16", ODD, FP32),
    cases.append("int8-g64", HEADS, FP32),
    cases.append("int8-g64", WIDE, BF16),
    cases.prefill("fp32", HEADS, FP32, begin=0, tokens=5),
    cases.prefill("fp32", ODD, FP32, begin=60, tokens=70, first=1),
    cases.prefill("bf16", HEADS, BF16, begin=64, tokens=3),
    cases.prefill("int8-g64", HEADS, FP32, begin=63, tokens=2),
    cases.prefill("int8-g64", WIDE, FP16, begin=0, tokens=3, first=2),
    cases.decode("fp32", HEADS, FP32, lengths=[1, 64, 65]),
    cases.decode("fp32", ODD, FP32, lengths=[0, 1, 2, 130], first=1),
    cases.decode("bf16", HEADS, BF16, lengths=[63, 70]),
    cases.decode("int8-g64", WIDE, FP32, lengths=[70, 600]),
    cases.decode("fp32", HEADS, FP32, lengths=[600, 520, 1100]),
    cases.decode("int8-g64", HEADS, FP16, lengths=[3]),
    *(cases.delta("delta_prefill", SMALL, FP32, tokens) for tokens in (1, 31, 32, 33, 70)),
    cases.delta("delta_prefill", UNEVEN, FP32, 65),
    cases.delta("delta_prefill", UNEVEN, BF16, 33),
    cases.delta("delta_step", SMALL, FP32, 3, 1),
    cases.delta("delta_step", UNEVEN, FP32, 2, 4),
    cases.delta("delta_step", SMALL, BF16, 2, 2),
    *(cases.convolution("conv_prefill", FP32, tokens, 23) for tokens in (1, 2, 3, 17)),
    cases.convolution("conv_prefill", BF16, 5, 130),
    cases.convolution("conv_step", FP32, 3, 1, 23),
    cases.convolution("conv_step", FP32, 2, 5, 130),
    cases.convolution("conv_step", BF16, 2, 2, 23),
    *(cases.copies(name, 4104) for name in ("copy_pages", "save_image", "load_image")),
    cases.copies("copy_pages", 7),
    *(cases.comparison(5000, at) for at in (0, 4095, 4096, None)),
]
TESTED = {case.operation for case in CASES}


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the kernels run."""
    if has_cuda():
        return "cuda"
    assert knobs.runtime.interpret, "triton was imported before TRITON_INTERPRET was set"
    interpreter.repair(monkeypatch)
    return "cpu"


def in_triton(operation: str) -> Callable[..., Any]:
    """The launcher of an operation."""
    return dispatch._in_triton(operation)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_kernel_gives_what_the_reference_gives(case: Case, device: str) -> None:
    right = case.make("cpu").outcome(getattr(reference, case.operation))
    found = case.make(device).outcome(in_triton(case.operation))
    assert [x.shape for x in found] == [x.shape for x in right]
    assert [x.dtype for x in found] == [x.dtype for x in right]
    for x, y in zip(found, right, strict=True):
        if case.tolerance:
            assert error_ratio(x, y) <= case.tolerance
        else:
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.operation.startswith(("att", "del"))][::3], ids=str
)
def test_a_kernel_gives_the_same_bits_each_time(case: Case, device: str) -> None:
    found = [case.make(device).outcome(in_triton(case.operation)) for _ in range(2)]
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


@pytest.mark.parametrize("storage", ["fp32", "int8-g64"])
def test_a_decoded_row_has_the_same_bits_beside_others(storage: str, device: str) -> None:
    lengths = [70, 1, 0, 130]
    call = cases.decode(storage, HEADS, FP32, lengths=lengths).make(device)
    q, cache, tables, length = call.args
    decode = in_triton("attention_decode")
    together = decode(q, cache, tables, length, **call.options)
    for row in (0, 3):
        one = slice(row, row + 1)
        alone = decode(q[one], cache, tables[one], length[one], **call.options)
        assert torch.equal(alone[0], together[row])


def test_every_operation_is_tried() -> None:
    operations = {"append_kv", "attention_decode", "attention_prefill", "first_difference"}
    operations |= {"conv_prefill", "conv_step", "delta_prefill", "delta_step"}
    assert operations | {"copy_pages", "save_image", "load_image"} == TESTED


def test_launchers_are_found_where_dispatch_looks() -> None:
    for name in TESTED:
        module = import_module(in_triton(name).__module__)
        assert module.__name__.startswith("ninfer_pool.kernels.cuda.")
