"""Of a crossed test the items that together hold every pair of values; `--long` runs them all.

`pytest.mark.pairwise` on a test or a module; a keyword expands a parameter's value into several
factors: ``pairwise(kind=KINDS)`` where ``KINDS[value]`` is a dict.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations, groupby
from typing import Any, TypeVar

import pytest

Item = TypeVar("Item")
Factors = Mapping[str, Any]


def drawn(factors: Mapping[Item, Factors]) -> list[Item]:
    """Return items that cover each pair of factor values that occurs; O(items squared).

    >>> len(drawn({(a, b, c): {"a": a, "b": b, "c": c} for a in "12" for b in "12" for c in "12"}))
    4
    """
    pairs = {item: set(combinations(sorted(row.items()), 2)) for item, row in factors.items()}
    missing, chosen = set().union(*pairs.values()), list[Item]()
    while missing:
        best = max(pairs, key=lambda item: len(pairs[item] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return [item for item in factors if item in chosen] or list(factors)[:1]


def _factors(item: pytest.Function, expand: Mapping[str, Mapping[Any, Factors]]) -> Factors:
    row: dict[str, Any] = {}
    for name, value in item.callspec.params.items():
        row |= expand[name][value] if name in expand else {name: repr(value)}
    return row


def left_out(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the items of pairwise tests that are not drawn."""
    marked = [
        item
        for item in items
        if isinstance(item, pytest.Function)
        and hasattr(item, "callspec")
        and item.get_closest_marker("pairwise")
    ]
    found: list[pytest.Item] = []
    for _, group in groupby(marked, key=lambda item: item.function):
        crossed = list(group)
        mark = crossed[0].get_closest_marker("pairwise")
        expand = mark.kwargs if mark is not None else {}
        if len(crossed[0].callspec.params) > 1:
            kept = drawn({item: _factors(item, expand) for item in crossed})
            found += [item for item in crossed if item not in kept]
    return found
