"""Peers that are measured may import Triton, before tests of kernels do."""

from __future__ import annotations

from tests import triton_mode

triton_mode.choose()
