"""The example that an engine's author starts from runs as it stands, against symbolic pages."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ninfer_pool import PrefixPool
from ninfer_pool.testing.symbolic import SymbolicEngine, audit

PAGE = Path(__file__).resolve().parents[1] / "docs" / "how-to" / "embed.md"
PROMPT = np.arange(300, dtype=np.int32)


class Shop:
    """The example's own names, with an engine."""

    def __init__(self) -> None:
        found = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
        assert found is not None
        names: dict[str, Any] = {}
        exec(compile(found[1], str(PAGE), "exec"), names)
        self.pool: PrefixPool = names["pool"]
        self.engine = SymbolicEngine(self.pool.config, namespace=names["space"])
        self._serve: Callable[..., None] = names["serve"]

    def serve(self, tokens: Any, boundaries: Any = ()) -> int:
        """Serve one request and return how many tokens were prefilled for it."""
        before = self.engine.prefilled
        self._serve(self.engine, tokens, boundaries)
        self.pool.check()
        assert audit(self.pool, self.engine)
        return self.engine.prefilled - before


@pytest.fixture
def shop() -> Shop:
    return Shop()


def test_a_cold_request_prefills_its_whole_prompt(shop: Shop) -> None:
    assert shop.serve(PROMPT) == 300


def test_the_same_prompt_again_prefills_nothing(shop: Shop) -> None:
    shop.serve(PROMPT)
    assert shop.serve(PROMPT) == 0


def test_a_conversation_prefills_its_growth_alone(shop: Shop) -> None:
    shop.engine.answer = [7, 8, 9]
    shop.serve(PROMPT, [(100, "system"), (300, "turn")])
    (entry,) = shop.pool.entries()
    assert entry.checkpoints == ((100, "system"), (300, "turn"), (303, "frontier"))
    grown = np.concatenate((PROMPT, np.array([7, 8, 9, 5, 5], dtype=np.int32)))
    assert shop.serve(grown, [(100, "system"), (300, "turn")]) == 2


def test_another_question_resumes_at_the_system_prompt(shop: Shop) -> None:
    shop.serve(PROMPT, [(100, "system"), (300, "turn")])
    other = np.concatenate((PROMPT[:100], PROMPT[:50]))
    assert shop.serve(other, [(100, "system")]) == 50
