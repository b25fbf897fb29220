"""The proof kit: give it an engine, it returns the pytest tests that matter.

Ten lines in a test file of one's own prove an adapter; here the kit's toy takes its place:

>>> from ninfer_pool.testing import conformance
>>> from ninfer_pool.testing.toy import ToyEngine
>>> def make_my_engine(*, num_pages, lanes):
...     return ToyEngine(num_pages=num_pages, lanes=lanes)
>>> TestMine = conformance(make_my_engine)

Run pytest on it. What a test draws at random it draws from a seed, so every run repeats.
``conformance(make_my_engine, examples=10_000, seed=7)`` looks longer and elsewhere, and so does
any Hypothesis profile that sets more than its usual 100 examples.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import Any

import pytest

from ninfer_pool.core.config import PoolConfig
from ninfer_pool.errors import ConfigError
from ninfer_pool.testing.adapter import EngineAdapter, refuse
from ninfer_pool.testing.failing import Failing
from ninfer_pool.testing.restoring import Restoring

LANES = 3
"""Lanes that the tests request of a factory."""

Factory = Callable[..., EngineAdapter]


class Conformance(Restoring, Failing):
    """What an engine behind a pool must hold. Made by `conformance`."""

    __test__ = False


def conformance(
    engine_factory: Factory,
    *,
    examples: int | None = None,
    seed: int = 0,
    tolerance: float | None = None,
    others: Sequence[Factory] = (),
    shrink: bool = True,
) -> type[Conformance]:
    """Return a pytest class that proves the adapter: ``TestMine = conformance(make_mine)``.

    Args:
        engine_factory: returns a fresh adapter (see `EngineAdapter`) each time it is called; it
            is given those of the keywords ``num_pages=`` and ``lanes=`` that it takes. Weights
            may be shared between adapters; pages and states may not.
        examples: how many random workloads are played; None: 40, or what the Hypothesis profile
            sets, where that is more than 100.
        seed: of everything random; the same seed, the same run.
        tolerance: the RMS ratio allowed where the bits may differ from a cold run's; None: what
            the adapter states as its ``tolerance``, else 0.001. What the pool calls exact is
            always compared bit by bit.
        others: factories of engines that must share nothing with this one: other weights,
            another KV type.
        shrink: make a random workload that fails as short as possible.

    Raises:
        ConfigError: an adapter that lacks a method or reports wrong sizes, with the reason.

    >>> from ninfer_pool.testing.toy import ToyEngine
    >>> TestToy = conformance(ToyEngine)
    >>> len(failures(TestToy, only="identity"))
    0
    """
    _check_options(engine_factory, examples=examples, seed=seed, tolerance=tolerance)
    first = make(engine_factory)
    if not isinstance(getattr(first, "config", None), PoolConfig):
        refuse(first)
    num_pages = pages_needed(first.config)
    engine = make(engine_factory, num_pages=num_pages, lanes=LANES)
    refuse(engine)
    if engine.config.num_pages < num_pages:
        raise ConfigError(
            f"num_pages: {engine.config.num_pages}; the tests need {num_pages}: the factory "
            f"must take num_pages="
        )
    body = {
        "__doc__": Conformance.__doc__,
        "__test__": True,
        "make": staticmethod(lambda: make(engine_factory, num_pages=num_pages, lanes=LANES)),
        "others": tuple(partial(make, other) for other in others),
        "examples": examples,
        "seed": seed,
        "tolerance": tolerance,
        "shrink": shrink,
    }
    return type("TestConformance", (Conformance,), body)


def _check_options(
    engine_factory: object, *, examples: int | None, seed: int, tolerance: float | None
) -> None:
    if not callable(engine_factory):
        raise ConfigError(f"engine_factory: {engine_factory!r}; needs a function that makes one")
    if examples is not None and (type(examples) is not int or examples < 1):
        raise ConfigError(f"examples: {examples!r}; needs an int of 1 or more, or None")
    if type(seed) is not int or seed < 0:
        raise ConfigError(f"seed: {seed!r}; needs an int of 0 or more")
    if tolerance is not None and not 0 <= tolerance < 1:
        raise ConfigError(f"tolerance: {tolerance!r}; needs a number from 0 to below 1")


def pages_needed(config: PoolConfig) -> int:
    """Return how many pages the tests need of an engine with these sizes."""
    return 12 * (6 + 4 * config.image_pages)


def make(engine_factory: Factory, **sizes: int) -> EngineAdapter:
    """Call a factory with those of the sizes that it takes; check that it kept to them.

    Raises:
        ConfigError: it made an engine of another size.
    """
    parameters = inspect.signature(engine_factory).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    if not sizes:
        needed = {p.name for p in parameters if p.default is p.empty and p.name in names}
        defaults = {"num_pages": 64, "lanes": LANES}
        sizes = {name: size for name, size in defaults.items() if name in needed}
    given = {name: size for name, size in sizes.items() if takes_all or name in names}
    engine = engine_factory(**given)
    for name, size in given.items():
        found = getattr(getattr(engine, "config", None), name, size)
        if found != size:
            raise ConfigError(f"{name}: {found}; the factory was asked for {size}")
    return engine


def cases(test: Callable[..., None]) -> Iterator[dict[str, Any]]:
    """Return the arguments of each case of a test that is parametrized, at most once a name."""
    found: list[dict[str, Any]] = [{}]
    for mark in getattr(test, "pytestmark", ()):
        if mark.name == "parametrize":
            name, values = mark.args
            found = [{**case, name: value} for value in values for case in found]
    return iter(found)


def failures(
    tests: type[Conformance], *, only: str = "", first: bool = True
) -> dict[str, BaseException]:
    """Run the tests of a class without pytest; return what failed, by name.

    Args:
        tests: what `conformance` returned. only: run those whose name contains this.
        first: stop after the first that fails.
    """
    found: dict[str, BaseException] = {}
    for name, test in inspect.getmembers(tests, inspect.isfunction):
        if not name.startswith("test_") or only not in name:
            continue
        for case in cases(test):
            try:
                with suppress(pytest.skip.Exception):
                    test(tests(), **case)
            except Exception as error:
                found[f"{name}[{'-'.join(map(str, case.values()))}]"] = error
                if first:
                    return found
    return found


class _Module(ModuleType):
    """Makes the module callable: ``from ninfer_pool.testing import conformance`` names it."""

    def __call__(self, engine_factory: Factory, **options: Any) -> type[Conformance]:
        return conformance(engine_factory, **options)


sys.modules[__name__].__class__ = _Module
