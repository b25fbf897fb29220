"""The engines here are not ours: each test file skips itself where its library is missing."""

from __future__ import annotations

from tests import triton_mode

triton_mode.choose()  # transformers imports Triton, before tests of kernels do

# Helpers without doctests, which collection would import even where a library is missing.
collect_ignore = ["architectures.py", "llama_models.py", "llama_random.py"]
