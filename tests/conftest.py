"""What all tests share: the `--long` option, and Hypothesis profiles that replay exactly."""

from __future__ import annotations

import pytest
from hypothesis import settings

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
    """Choose the Hypothesis profile; a test's own `@settings` still have the last word."""
    settings.load_profile("long" if config.getoption("--long") else "ci")


@pytest.fixture(scope="session")
def long_run(request: pytest.FixtureRequest) -> bool:
    """Whether `--long` was asked for: tests that loop over seeds then take many more."""
    return bool(request.config.getoption("--long"))
