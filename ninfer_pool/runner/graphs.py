"""Decode steps as CUDA graphs: one launch a step where there would be a few hundred."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TypeAlias

import torch

from ninfer_pool.runner.model import Steps

Decoded: TypeAlias = tuple[torch.Tensor, Steps]
LEAST_WIDTH = 16
"""Pages of the narrowest table that a graph is made for; wider ones double."""


@dataclass(slots=True, kw_only=True)
class RowBatch:
    """What a pass over a fixed number R of rows takes; rows that are not put are padding.

    ``tokens`` (R,), ``positions`` (3, R) rotary, ``tables`` (R, P) page ids, ``lengths`` (R,)
    positions to attend to and ``slots`` (R,) to write, -1 for none; all int64.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    tables: torch.Tensor
    lengths: torch.Tensor
    slots: torch.Tensor

    @classmethod
    def empty(cls, rows: int, width: int, device: torch.device) -> RowBatch:
        """Return padding alone."""

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        return cls(
            tokens=zeros(rows),
            positions=zeros(3, rows),
            tables=zeros(rows, width),
            lengths=zeros(rows),
            slots=zeros(rows) - 1,
        )

    def copy_(self, other: RowBatch) -> None:
        """Take another's values, of a table as wide or narrower."""
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            mine[..., : theirs.shape[-1]].copy_(theirs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: RowBatch
    outputs: Decoded


class Graphs:
    """A decode step on CUDA: recorded once for each width of the page tables, then replayed.

    ``step`` must leave no trace but KV written to the rows' slots, so that recording it, which
    runs it more than once, changes nothing. What a replay returns stands until the next one.
    """

    def __init__(self, step: Callable[[RowBatch], Decoded]) -> None:
        self._step = step
        self._captured: dict[int, _Captured] = {}

    def __call__(self, rows: RowBatch) -> Decoded:
        """Run one step."""
        width = width_of(rows.tables.shape[1])
        if width not in self._captured:
            self._captured[width] = self._capture(rows, width)
        captured = self._captured[width]
        captured.inputs.copy_(rows)
        captured.graph.replay()
        return captured.outputs

    def _capture(self, rows: RowBatch, width: int) -> _Captured:
        device = rows.tokens.device
        inputs = RowBatch.empty(len(rows.tokens), width, device)
        inputs.copy_(rows)
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            self._step(inputs)  # compiles the kernels and fills the allocator
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = self._step(inputs)
        return _Captured(graph=graph, inputs=inputs, outputs=outputs)


def width_of(pages: int) -> int:
    """Return the width of the graph that serves tables of ``pages``."""
    width = LEAST_WIDTH
    while width < pages:
        width *= 2
    return width
