"""Several sequences of one model in a llama.cpp context: decode, remove, copy state out and in."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from ninfer_pool.errors import ConfigError

Bytes = npt.NDArray[np.uint8]
Logits = npt.NDArray[np.float32]

PARTIAL = 1
"""``LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY``: the recurrent part alone."""
NEEDED = (
    "llama_state_seq_get_size_ext",
    "llama_state_seq_get_data_ext",
    "llama_state_seq_set_data_ext",
    "llama_memory_seq_rm",
    "llama_memory_seq_cp",
)


class LibraryError(RuntimeError):
    """A call of llama.cpp failed."""


class RestoreError(LibraryError):
    """A retained state could not be restored."""


class Sequences:
    """A context of its own on the model of a `llama_cpp.Llama`, with ``lanes`` sequences.

    Each sequence has its own stream of ``n_ctx`` cells. A restored state is stored in the cells
    of a cold run and attended to in the same order, so its bits are the same.

    Args:
        llama: provides its model and its context's settings; its own context is not used.

    Raises:
        ConfigError: a library too old, a model whose state cannot be copied by position.
    """

    def __init__(self, llama: llama_cpp.Llama, *, lanes: int, n_ctx: int) -> None:
        _check_library()
        _check_model(llama)
        self._llama = llama  # keeps the model
        self.lanes, self.n_ctx, self.n_batch = lanes, n_ctx, min(llama.n_batch, n_ctx)
        params = type(llama.context_params).from_buffer_copy(llama.context_params)
        params.n_ctx, params.n_seq_max, params.kv_unified = lanes * n_ctx, lanes, False
        params.n_batch = self.n_batch
        params.n_ubatch = min(params.n_ubatch, self.n_batch)
        self.params = params
        self.closed = False
        self._closing = contextlib.ExitStack()
        self._ctx = llama_cpp.llama_init_from_model(llama.model, params)
        if not self._ctx:
            raise ConfigError(f"lanes: {lanes} of {n_ctx} tokens; no context, see llama.cpp's log")
        self._closing.callback(llama_cpp.llama_free, self._ctx)
        self._batch = llama_cpp.llama_batch_init(self.n_batch, 0, 1)
        self._closing.callback(llama_cpp.llama_batch_free, self._batch)
        self._memory = llama_cpp.llama_get_memory(self._ctx)
        self.hybrid = bool(llama_cpp.llama_model_is_hybrid(llama.model))
        self.vocab_size = int(llama.n_vocab())
        self._copying: set[int] = set()
        """Lanes of copies that the library delays until it decodes."""

    def close(self) -> None:
        """Free the context; nothing may be called afterwards."""
        self.closed = True
        self._closing.close()

    def decode(self, lane: int, tokens: Sequence[int], begin: int) -> Logits:
        """Compute tokens at positions ``begin`` on; return the last one's logits (vocab,).

        In one call of the library, so at most ``n_batch`` tokens.

        Raises:
            LibraryError: the library failed; the lane's contents are undefined then.
        """
        if self.closed:
            raise LibraryError("closed: the context is freed")
        batch, count = self._batch, len(tokens)
        batch.n_tokens = count
        _view(batch.token, count)[:] = tokens
        _view(batch.pos, count)[:] = np.arange(begin, begin + count)
        _view(batch.n_seq_id, count)[:] = 1
        _view(batch.logits, count)[:] = 0
        batch.logits[count - 1] = 1
        for index in range(count):
            batch.seq_id[index][0] = lane
        code = llama_cpp.llama_decode(self._ctx, batch)
        if code:
            raise LibraryError(f"llama_decode: {code} for {count} tokens at {begin} of lane {lane}")
        self._copying.clear()
        found = llama_cpp.llama_get_logits_ith(self._ctx, -1)
        return np.ctypeslib.as_array(found, shape=(self.vocab_size,)).copy()

    def clear(self, lane: int) -> None:
        """Remove all of a lane."""
        if self.closed:
            return  # freed with the context
        llama_cpp.llama_memory_seq_rm(self._memory, lane, -1, -1)

    def remove(self, lane: int, begin: int) -> bool:
        """Remove the positions from ``begin`` on; False where the state cannot be truncated."""
        return bool(llama_cpp.llama_memory_seq_rm(self._memory, lane, begin, -1))

    def copy(self, source: int, target: int) -> None:
        """Copy ``source`` to ``target`` inside the library, at its next decode."""
        self.clear(target)
        self._copying |= {source, target}
        llama_cpp.llama_memory_seq_cp(self._memory, source, target, -1, -1)

    def take(self, lane: int, flags: int = 0) -> Bytes:
        """Return a copy of a lane's state."""
        size = llama_cpp.llama_state_seq_get_size_ext(self._ctx, lane, flags)
        data = np.empty(size, dtype=np.uint8)
        done = llama_cpp.llama_state_seq_get_data_ext(self._ctx, _pointer(data), size, lane, flags)
        if done != size:
            raise LibraryError(f"llama_state_seq_get_data: {done} of {size} bytes of lane {lane}")
        return data

    def put(self, lane: int, data: Bytes, flags: int = 0) -> None:
        """Replace a lane's state, or with ``PARTIAL`` its recurrent part.

        Raises:
            LibraryError: the library rejected it, or a delayed copy would undo it.
        """
        if lane in self._copying and not flags & PARTIAL:
            raise LibraryError(f"lane {lane}: a copy of it is pending")
        size = data.size
        done = llama_cpp.llama_state_seq_set_data_ext(self._ctx, _pointer(data), size, lane, flags)
        if done != size:
            raise LibraryError(f"llama_state_seq_set_data: {done} of {size} bytes of lane {lane}")


def _view(pointer: Any, count: int) -> npt.NDArray[Any]:
    return np.ctypeslib.as_array(pointer, shape=(count,))


def _pointer(data: Bytes) -> Any:
    return data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


def _check_library() -> None:
    missing = [name for name in NEEDED if not hasattr(llama_cpp, name)]
    if missing:
        version = llama_cpp.__version__
        raise ConfigError(f"llama-cpp-python: {version} has no {missing[0]}; needs 0.3.36 or newer")


def _check_model(llama: llama_cpp.Llama) -> None:
    """Raise `ConfigError` for a model or settings whose state cannot be resumed by position."""
    model = llama.model
    unsupported = {
        "embedding=True": bool(llama.context_params.embeddings),
        "lora_path": getattr(llama, "lora_path", None) is not None,
        "sliding-window attention": llama_cpp.llama_model_n_swa(model) > 0,
        "an encoder": llama_cpp.llama_model_has_encoder(model),
        "no attention layer": llama_cpp.llama_model_is_recurrent(model)
        and not llama_cpp.llama_model_is_hybrid(model),
    }
    found = [name for name, present in unsupported.items() if present]
    if found:
        raise ConfigError(
            f"model: {found[0]}; needs a causal model with full attention in some layers "
            "(and recurrent state in others, or not), and no adapter"
        )
