"""Compile every Triton kernel for a card that need not be there, with the launchers' own arguments.

    python -m tests.kernels.compile_kernels 90

prints one JSON object for each: kernel, case, bytes of shared memory, PTX and cubin. The launchers
run on CPU tensors with launching replaced by a note of kernel and arguments; nothing is computed.
"""

# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from ninfer_pool.kernels import dispatch
from ninfer_pool.kernels.cuda import device
from tests.kernels import cases
from tests.kernels.cases import Case
from tests.kernels.made import Heads, Linear

POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def cases_for(capability: int) -> list[Case]:
    """Models' own shapes in the dtypes that this card has."""
    half = torch.bfloat16 if capability >= 80 else torch.float16
    storage = "bf16" if capability >= 80 else "fp16"
    large, middle = Heads(query=16, kv=2, dim=256), Heads(query=8, kv=1, dim=128)
    wide = Linear(key_heads=2, value_heads=4, key_dim=128, value_dim=128)
    narrow = Linear(key_heads=2, value_heads=2, key_dim=64, value_dim=64)
    found = [cases.copies("copy_pages", 8192), cases.comparison(9, None)]
    for heads, pages, dtype in (
        (large, "int8-g64", half),
        (middle, storage, half),
        (large, "fp32", torch.float32),
    ):
        found += [
            cases.append(pages, heads, dtype),
            cases.prefill(pages, heads, dtype, begin=0, tokens=100),
            cases.decode(pages, heads, dtype, lengths=[70, 3]),
        ]
    for sizes, dtype in ((wide, half), (narrow, torch.float32)):
        found += [
            cases.delta("delta_prefill", sizes, dtype, 100),
            cases.delta("delta_step", sizes, dtype, 2, 3),
            cases.convolution("conv_prefill", dtype, 70, 256),
            cases.convolution("conv_step", dtype, 2, 3, 256),
        ]
    return found


def launches(case: Case) -> list[tuple[JITFunction, dict[str, Any]]]:
    """The kernels that the case's launcher would launch, with their arguments by name."""
    noted: list[tuple[JITFunction, dict[str, Any]]] = []

    def note(kernel: JITFunction, grid: object) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            noted.append((kernel, dict(zip(kernel.arg_names, args, strict=False)) | options))

        return launch

    with_launching, JITFunction.__getitem__ = JITFunction.__getitem__, note
    try:
        case.make("cpu").outcome(dispatch._in_triton(case.operation))
    finally:
        JITFunction.__getitem__ = with_launching
    return noted


def type_of(argument: Any) -> str:
    """Triton's name of an argument's type."""
    if isinstance(argument, torch.Tensor):
        return POINTERS[argument.dtype]
    return "fp32" if isinstance(argument, float) else "i32"


def compiled(kernel: JITFunction, arguments: dict[str, Any], capability: int) -> Any:
    """The kernel for one launch, down to the card's own code."""
    signature: dict[str, str] = {}
    fixed: dict[str, Any] = {}
    aligned: dict[tuple[int], list[list[object]]] = {}
    for place, parameter in enumerate(kernel.params):
        value = arguments.pop(parameter.name)
        if parameter.is_constexpr:
            signature[parameter.name], fixed[parameter.name] = "constexpr", value
            continue
        signature[parameter.name] = type_of(value)
        if parameter.do_not_specialize or parameter.do_not_specialize_on_alignment:
            continue
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and not value % 16):
            aligned[place,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=fixed, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=arguments)


def compile_all(capability: int) -> Iterator[dict[str, Any]]:
    """Compile what is launched, each kernel and set of constants once."""

    def pretended(x: torch.Tensor) -> int:
        return capability

    device.capability = pretended
    for case in cases_for(capability):
        for kernel, arguments in launches(case):
            built = compiled(kernel, arguments, capability)
            yield {
                "kernel": kernel.__name__,
                "case": str(case),
                "shared_bytes": built.metadata.shared,
                "ptx_bytes": len(built.asm["ptx"]),
                "cubin_bytes": len(built.asm["cubin"]),
            }


if __name__ == "__main__":
    for line in compile_all(int(sys.argv[1])):
        print(json.dumps(line), flush=True)
