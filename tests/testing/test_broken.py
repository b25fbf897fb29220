"""Every broken engine is found: by a named test, and by random workloads within a stated number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ninfer_pool.testing import conformance
from ninfer_pool.testing.conformance import Conformance, failures
from ninfer_pool.testing.host import ConformanceError
from ninfer_pool.testing.toy import ToyEngine
from tests.machinery.broken import BROKEN, Broken


def name(broken: Broken) -> str:
    return broken.make.__name__


def proof(broken: Broken, *, examples: int) -> type[Conformance]:
    return conformance(
        broken.make, examples=examples, shrink=False, others=[lambda: broken.make(seed=1)]
    )


@pytest.mark.parametrize("broken", BROKEN, ids=name)
def test_a_named_test_finds_it(broken: Broken) -> None:
    found = failures(proof(broken, examples=1), only=broken.test)
    assert found
    assert all(isinstance(error, ConformanceError) for error in found.values())


@pytest.mark.parametrize("broken", [b for b in BROKEN if b.examples], ids=name)
def test_random_workloads_find_it_within_the_stated_number(broken: Broken) -> None:
    assert broken.examples is not None
    assert failures(proof(broken, examples=broken.examples), only="random")


@pytest.mark.parametrize("broken", BROKEN, ids=name)
def test_it_serves_a_first_prompt_right(broken: Broken) -> None:
    """So that nothing but a restore, a fork, a draft or another lane shows the fault."""
    tokens, table = np.arange(1, 7, dtype=np.int32), np.array([2, 3], dtype=np.int32)
    first = broken.make(num_pages=8)
    good = ToyEngine(num_pages=8, recurrent=first.model.recurrent)
    told: dict[str, Any] = {"lane": 0, "begin": 0, "table": table}
    wrong = first.prefill(tokens, **told).tobytes() != good.prefill(tokens, **told).tobytes()
    assert wrong == (name(broken) in {"OnePageEarly", "WholePagesRead"})


def test_there_are_enough_of_them() -> None:
    assert len({b.make for b in BROKEN}) >= 15
    assert all(b.make.__doc__ for b in BROKEN)
