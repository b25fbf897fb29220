"""A symbolic engine whose operations fail on request, half done."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ninfer_pool.core.ledger import Pages
from ninfer_pool.core.operations import CopyPage, Operation, SaveImage
from ninfer_pool.testing.symbolic import SymbolicEngine


class OperationFailed(Exception):
    """The engine could not carry an operation out, as at a device error."""


class FaultyEngine(SymbolicEngine):
    """Fails once after ``failing`` more operations, leaving the failed one half done."""

    failing: int | None = None
    """Operations until one fails; a prefill counts as one. None: none fails."""

    def execute(self, operations: Iterable[Operation]) -> None:
        """Carry them out, up to the one that fails: its target then holds nothing of use."""
        for operation in operations:
            if self._fails():
                if isinstance(operation, CopyPage):
                    self.poison([operation.target])
                elif isinstance(operation, SaveImage):
                    self.poison(operation.pages[:1])
                else:
                    self.roll_back(operation.lane, 0)
                raise OperationFailed(repr(operation))
            super().execute([operation])

    def prefill(self, tokens: Any, pages: Pages, begin: int, lane: int) -> bytes:
        """Compute them all, or half of them."""
        if self._fails():
            super().prefill(tokens[: len(tokens) // 2], pages, begin, lane)
            raise OperationFailed(f"prefill of {len(tokens)} tokens from {begin}")
        return super().prefill(tokens, pages, begin, lane)

    def _fails(self) -> bool:
        if self.failing is None:
            return False
        self.failing -= 1
        if self.failing < 0:
            self.failing = None
            return True
        return False
