"""llama.cpp's samplers over logits that may come from a restored image."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from ninfer_pool.errors import ConfigError

CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaSampling:
    """Sampling parameters, named as in `llama_cpp.Llama.generate`; greedy by default.

    Raises:
        ConfigError: a value out of range.
    """

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature: {self.temperature!r}; needs a number of 0 or more")
        for name in ("top_p", "min_p"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}: {getattr(self, name)!r}; needs a number of 0 to 1")
        if type(self.top_k) is not int or type(self.seed) is not int or not 0 <= self.seed < 2**32:
            raise ConfigError(f"top_k, seed: {self.top_k!r}, {self.seed!r}; need ints")


class LlamaSampler:
    """Chooses one request's tokens; `close` frees it."""

    def __init__(self, sampling: LlamaSampling) -> None:
        self._chain: Any = None
        if sampling.temperature > 0:
            params = llama_cpp.llama_sampler_chain_default_params()
            self._chain = llama_cpp.llama_sampler_chain_init(params)
            for each in (
                llama_cpp.llama_sampler_init_top_k(sampling.top_k),
                llama_cpp.llama_sampler_init_top_p(sampling.top_p, 1),
                llama_cpp.llama_sampler_init_min_p(sampling.min_p, 1),
                llama_cpp.llama_sampler_init_temp(sampling.temperature),
                llama_cpp.llama_sampler_init_dist(sampling.seed),
            ):
                llama_cpp.llama_sampler_chain_add(self._chain, each)

    def choose(self, logits: npt.NDArray[np.float32]) -> int:
        """Return the next token."""
        if self._chain is None:
            return int(logits.argmax())
        rows = np.zeros(len(logits), dtype=CANDIDATE)
        rows["id"], rows["logit"] = np.arange(len(logits)), logits
        pointer = rows.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token_data))
        array = llama_cpp.llama_token_data_array(
            data=pointer, size=len(rows), selected=-1, sorted=False
        )
        llama_cpp.llama_sampler_apply(self._chain, ctypes.byref(array))
        token = int(array.data[array.selected].id)
        llama_cpp.llama_sampler_accept(self._chain, token)
        return token

    def close(self) -> None:
        """Free the library's samplers."""
        if self._chain is not None:
            llama_cpp.llama_sampler_free(self._chain)
            self._chain = None
