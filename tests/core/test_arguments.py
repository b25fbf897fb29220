"""Arguments of a wrong type are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from ninfer_pool import ConfigError, PromptError
from tests.core.shop import driver


def test_flags_numbers_and_factories_of_the_wrong_type_are_refused() -> None:
    shop = driver()
    for name in ("read", "retain", "pin", "exact", "claim", "wait_for_shared"):
        wrong: dict[str, Any] = {name: 1}
        with pytest.raises(PromptError, match="needs True or False"):
            shop.pool.acquire(shop.prompt([1, 2]), **wrong)
    with pytest.raises(ConfigError, match="since: 'x'; needs an int"):
        shop.pool.events("x")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="policy: makes a dict; needs to make a Policy"):
        driver(policy=dict)
    for nothing in (None, ["a"], 5):
        assert shop.pool.find(nothing) == []  # type: ignore[arg-type]
        assert not shop.pool.evict(nothing)  # type: ignore[arg-type]
