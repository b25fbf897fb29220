"""Decode steps as CUDA graphs: one launch per step in place of a few hundred."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from ninfer_pool.runner.batch import RowBatch
from ninfer_pool.runner.model import Steps

Decoded: TypeAlias = tuple[torch.Tensor, Steps]
LEAST_WIDTH = 16
"""Pages of the narrowest table that a graph is captured for; wider ones double."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: RowBatch
    outputs: Decoded


class Graphs:
    """A decode step on CUDA: captured once for each width of the page tables, then replayed.

    ``step`` may write KV to the rows' slots and nothing else: a capture runs it more than once.
    The outputs of a replay are valid until the next one.
    """

    def __init__(self, step: Callable[[RowBatch], Decoded]) -> None:
        self._step = step
        self._captured: dict[int, _Captured] = {}

    def __call__(self, rows: RowBatch) -> Decoded:
        """Run one step."""
        width = LEAST_WIDTH
        while width < rows.tables.shape[1]:
            width *= 2
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
