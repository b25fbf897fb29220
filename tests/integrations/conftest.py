"""The engines here are not ours: each test file skips itself where its library is missing."""

from __future__ import annotations

# A helper without doctests, which collection would import even where transformers is missing.
collect_ignore = ["architectures.py"]
