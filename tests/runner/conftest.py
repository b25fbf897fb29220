"""The runner's tests need torch, and run on one thread: several would not be faster here."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def seeds(request: pytest.FixtureRequest) -> range:
    """Seeds of random conversations; many more with ``--long``."""
    return range(200 if request.getfixturevalue("long_run") else 4)
