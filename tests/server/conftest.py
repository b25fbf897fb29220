"""The server's tests need its extra; one thread: two beside another busy process are far slower."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("starlette")
torch.set_num_threads(1)
