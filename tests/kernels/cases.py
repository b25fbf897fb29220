"""Calls of every operation on small odd shapes, for whichever implementation is to be tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ninfer_pool.kernels import PAGE_TOKENS
from tests.kernels.made import (
    Heads,
    Linear,
    Numbers,
    delta_inputs,
    fill,
    poisoned_pages,
    slots_of,
    stored,
)


@dataclass(frozen=True, kw_only=True)
class Call:
    """The arguments of one call, and which tensors it changes."""

    args: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    changed: tuple[torch.Tensor, ...] = ()

    def outcome(self, operation: Callable[..., Any]) -> list[torch.Tensor]:
        """Call ``operation``; return what it returned and what it changed, on CPU."""
        result = operation(*self.args, **self.options)
        returned = result if isinstance(result, tuple) else (result,)
        found = [torch.tensor(x) if isinstance(x, int) else x for x in returned if x is not None]
        return [x.cpu() for x in (*found, *self.changed)]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One operation with one set of shapes: ``make(device)`` builds the same call anywhere."""

    operation: str
    make: Callable[[str], Call]
    name: str
    tolerance: float = 0.0
    """Largest error ratio allowed; 0 asks for equal bits."""

    def __str__(self) -> str:
        return f"{self.operation}-{self.name}"


def _pages(numbers: Numbers, storage: str, heads: Heads, dtype: torch.dtype, tokens: int) -> Any:
    """Filled pages of one lane, and their table."""
    count = -(-tokens // PAGE_TOKENS) + 2
    cache = poisoned_pages(
        storage, pages=count, heads=heads.kv, dim=heads.dim, device=numbers.device
    )
    table = numbers.order(count)[: count - 2]
    kv = (tokens, heads.kv, heads.dim)
    fill(cache, table, numbers.normal(*kv, dtype=dtype), numbers.normal(*kv, dtype=dtype))
    return cache, table


def append(storage: str, heads: Heads, dtype: torch.dtype, *, tokens: int = 9) -> Case:
    """Write tokens across a page edge, one of them padding."""

    def make(device: str) -> Call:
        numbers = Numbers(1, device)
        cache = poisoned_pages(storage, pages=3, heads=heads.kv, dim=heads.dim, device=device)
        slots = slots_of(torch.tensor([2, 0], device=device), PAGE_TOKENS + 4)[-tokens:].clone()
        slots[1] = -1
        kv = (tokens, heads.kv, heads.dim)
        k, v = (numbers.normal(*kv, dtype=dtype) for _ in "kv")
        return Call(args=(cache, k, v, slots), changed=tuple(stored(cache)))

    return Case(operation="append_kv", make=make, name=f"{storage}-{heads.dim}-{dtype}")


def prefill(
    storage: str, heads: Heads, dtype: torch.dtype, *, begin: int, tokens: int, first: int = 0
) -> Case:
    """Attend from a chunk of new tokens."""

    def make(device: str) -> Call:
        numbers = Numbers(2, device)
        cache, table = _pages(numbers, storage, heads, dtype, begin + tokens)
        q = numbers.normal(tokens, heads.query, heads.dim, dtype=dtype)
        options = {"begin": begin, "scale": heads.dim**-0.5, "first": first}
        return Call(args=(q, cache, table), options=options)

    return Case(
        operation="attention_prefill",
        make=make,
        name=f"{storage}-{heads.dim}-{dtype}-{begin}-{first}",
        tolerance=1e-5 if dtype == torch.float32 else 1e-2,
    )


def decode(
    storage: str, heads: Heads, dtype: torch.dtype, *, lengths: list[int], first: int = 0
) -> Case:
    """Attend from rows of several lengths, all over the pages of one lane."""

    def make(device: str) -> Call:
        numbers = Numbers(3, device)
        cache, table = _pages(numbers, storage, heads, dtype, max(lengths))
        q = numbers.normal(len(lengths), heads.query, heads.dim, dtype=dtype)
        tables = table.expand(len(lengths), -1).contiguous()
        for row, length in enumerate(lengths):
            tables[row, -(-length // PAGE_TOKENS) :] = -1
        args = (q, cache, tables, torch.tensor(lengths, device=device))
        return Call(args=args, options={"scale": heads.dim**-0.5, "first": first})

    return Case(
        operation="attention_decode",
        make=make,
        name=f"{storage}-{heads.dim}-{dtype}-{first}",
        tolerance=1e-5 if dtype == torch.float32 else 1e-2,
    )


def delta(operation: str, sizes: Linear, dtype: torch.dtype, *rows: int) -> Case:
    """The gated delta rule over ``rows``: (T,) tokens, or (B, S) lanes and steps."""

    def make(device: str) -> Call:
        numbers = Numbers(4, device)
        inputs = delta_inputs(numbers, sizes, *rows, dtype=dtype)
        shape = (*rows[:-1], sizes.value_heads, sizes.key_dim, sizes.value_dim)
        return Call(args=(*inputs, numbers.normal(*shape)))

    return Case(
        operation=operation,
        make=make,
        name=f"{sizes.key_dim}-{sizes.value_dim}-{dtype}-{rows}",
        tolerance=1e-5 if dtype == torch.float32 else 1e-2,
    )


def convolution(operation: str, dtype: torch.dtype, *shape: int) -> Case:
    """Convolve x of ``shape``: (T, C), or (B, S, C)."""

    def make(device: str) -> Call:
        numbers = Numbers(5, device)
        x, channels = numbers.normal(*shape, dtype=dtype), shape[-1]
        columns = numbers.normal(*shape[:-2], channels, 3, dtype=dtype)
        return Call(args=(x, numbers.normal(channels, 4, dtype=dtype), columns))

    return Case(
        operation=operation,
        make=make,
        name=f"{dtype}-{shape}",
        tolerance=1e-6 if dtype == torch.float32 else 1e-2,
    )


def copies(operation: str, page_bytes: int) -> Case:
    """Copy pages within the slab, or between it and a buffer."""

    def make(device: str) -> Call:
        numbers = Numbers(6, device)
        slab = numbers.between(0, 255, 7, page_bytes).to(torch.uint8)
        buffer = numbers.between(0, 255, 2, page_bytes).to(torch.uint8)
        pages = torch.tensor([5, 0], device=device)
        if operation == "copy_pages":
            return Call(args=(slab, pages, pages + 1), changed=(slab,))
        return Call(args=(slab, pages, buffer), changed=(slab, buffer))

    return Case(operation=operation, make=make, name=str(page_bytes))


def comparison(tokens: int, at: int | None) -> Case:
    """Compare sequences that part at ``at`` and again at the end."""

    def make(device: str) -> Call:
        a = torch.arange(tokens, dtype=torch.int32, device=device)
        b = a.clone()
        if at is not None:
            b[[at, -1]] += 1
        return Call(args=(a, b))

    return Case(operation="first_difference", make=make, name=f"{tokens}-{at}")
