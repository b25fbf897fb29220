"""What all tests share: the `--long` option, and Hypothesis profiles that replay exactly."""

from __future__ import annotations

import signal

import pytest
from hypothesis import settings

from tests.pairwise import left_out

settings.register_profile("ci", derandomize=True, database=None, deadline=None)
settings.register_profile("long", settings.get_profile("ci"), max_examples=2_000)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--long`, which scripts/test passes on."""
    parser.addoption(
        "--long",
        action="store_true",
        help="many more Hypothesis examples and seeds (hours, not minutes)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose the Hypothesis profile, and restore Ctrl-C where a background job ignores it.

    A shell starts a script's background jobs with SIGINT ignored, which every child inherits.
    """
    settings.load_profile("long" if config.getoption("--long") else "ci")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Draw crossed tests pairwise, except with `--long`."""
    if not config.getoption("--long") and (gone := left_out(items)):
        config.hook.pytest_deselected(items=gone)
        items[:] = [item for item in items if item not in gone]


@pytest.fixture(scope="session")
def long_run(request: pytest.FixtureRequest) -> bool:
    """Whether `--long` was asked for: tests that loop over seeds then take many more."""
    return bool(request.config.getoption("--long"))
