"""Explanations name the part of the identity that differs."""

from __future__ import annotations

import numpy as np
import pytest

from ninfer_pool import Namespace, Prompt
from tests.core.shop import driver
from tests.machinery.driver import SPACE


def test_plain_attention_names_what_differs_below_a_longer_sequence() -> None:
    """Only checkpoints up to the prompt's end were looked at: none, where answers follow it."""
    shop = driver(image_bytes=0)
    shop.serve(range(1, 21), answer=[50, 51])
    other = Namespace(weights="sha256:2", kv_dtype=SPACE.kv_dtype)
    assert shop.pool.explain(Prompt(list(range(1, 21)), namespace=other)).reason == (
        "identity:weights"
    )


@pytest.mark.parametrize("field", ["positions", "token_types"])
def test_the_attribute_that_differs_is_named_behind_one_that_does_not(field: str) -> None:
    shop = driver()
    axes = np.tile(np.arange(20, dtype=np.int32), (3, 1))
    types = np.zeros(20, dtype=np.int32)
    shop.serve(shop.prompt(range(20), media=[(4, 8, "x")], positions=axes, token_types=types))
    axes, types = axes.copy(), types.copy()
    if field == "positions":
        axes[1, 4:8] += 1
    else:
        types[4:8] = 1
    other = shop.prompt(range(20), media=[(4, 8, "x")], positions=axes, token_types=types)
    assert shop.pool.explain(other).reason == f"identity:{field}"
