"""The demo runs the shipped model: its tests need torch, on one thread."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")
torch.set_num_threads(1)
