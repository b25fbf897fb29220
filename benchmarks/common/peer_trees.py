"""Prefix structures of other engines, measured with the pool where they can be imported.

Nothing is imported before `available_peers` is called. A missing peer is a line in the report,
never a failure.

==========  =====================================================================
mlx-lm      ``pip install 'ninfer-pool[bench]'`` (mlx-lm >= 0.32 with its CPU backend):
            `LRUPromptCache`, a trie of one dictionary a token
SGLang      ``pip install --no-deps sglang==0.5.23``: `RadixCache`, a radix tree.
            Only the six modules of the tree are loaded; all else that they import (torch,
            triton, the rest of the engine) is replaced by empty stand-ins.
==========  =====================================================================

Not here: SGLang's Rust tree (its binary links against one exact torch build) and vLLM's block
hashes (a wheel of several hundred megabytes for one function).

The stored payload has no size and can be cut anywhere, so the structure alone is timed. The right
answer of every lookup is the longest common prefix.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]


class Peer(Protocol):
    """One engine's structure behind five methods."""

    name: str
    version: str

    def prompt(self, tokens: Tokens) -> Any:
        """Return the tokens in the engine's own form; made before anything is timed."""

    def build(self, entries: Sequence[Tokens]) -> None:
        """Drop everything, then store every entry."""

    def lookup(self, prompt: Any) -> int:
        """Return the number of tokens found."""

    def commit(self, prompt: Any) -> None:
        """Look the sequence up, hold the match, store the whole, release the match."""

    def evict(self) -> None:
        """Remove the entry that the engine's own policy picks."""


def available_peers() -> tuple[list[Peer], list[tuple[str, str]]]:
    """Return the importable peers, and (name, reason) for each other one."""
    found: list[Peer] = []
    missing: list[tuple[str, str]] = []
    makers: list[tuple[str, Callable[[], Peer]]] = [("mlx-lm", MlxPeer), ("SGLang", SglangPeer)]
    for name, make in makers:
        try:
            peer = make()
            _check(peer)
        except Exception as error:  # whatever a foreign import raises is a reason, not a fault
            missing.append((name, f"{type(error).__name__}: {error}".splitlines()[0]))
        else:
            found.append(peer)
    return found, missing


def _check(peer: Peer) -> None:
    """Store two short sequences, look one up, evict: calls that a changed version would break."""
    first, second = np.arange(10, dtype=np.int32), np.arange(5, 20, dtype=np.int32)
    peer.build([first, second])
    peer.commit(peer.prompt(np.arange(12, dtype=np.int32)))
    found = peer.lookup(peer.prompt(np.arange(30, dtype=np.int32)))
    if found != 12:
        raise RuntimeError(f"version {peer.version} answers {found} to a lookup of 12 tokens")
    peer.evict()


class _Payload:
    """Stands in for a layer's KV: no bytes, can be trimmed, copying it costs nothing."""

    nbytes = 0

    def is_trimmable(self) -> bool:
        return True

    def trim(self, count: int) -> int:
        return count

    def __deepcopy__(self, memo: object) -> _Payload:
        return self


class MlxPeer:
    """mlx-lm's `LRUPromptCache`: tokens are lists of int, the cut entry is a copy."""

    name = "mlx-lm"
    _MODEL = "model"

    def __init__(self) -> None:
        self.version = importlib.metadata.version("mlx-lm")
        self._class: Any = importlib.import_module("mlx_lm.models.cache").LRUPromptCache
        self._held = self._class()

    def prompt(self, tokens: Tokens) -> list[int]:
        numbers: list[int] = tokens.tolist()
        return numbers

    def build(self, entries: Sequence[Tokens]) -> None:
        self._held = self._class(max_size=1 << 30)
        for entry in entries:
            self._held.insert_cache(self._MODEL, self.prompt(entry), [_Payload()])

    def lookup(self, prompt: list[int]) -> int:
        _, rest = self._held.fetch_nearest_cache(self._MODEL, prompt)
        return len(prompt) - len(rest)

    def commit(self, prompt: list[int]) -> None:
        found, _ = self._held.fetch_nearest_cache(self._MODEL, prompt)
        self._held.insert_cache(self._MODEL, prompt, found or [_Payload()])

    def evict(self) -> None:
        self._held.trim_to(n_sequences=len(self._held) - 1)


class SglangPeer:
    """SGLang's `RadixCache` at page size 1: tokens are 64-bit arrays, values are row numbers."""

    name = "SGLang"

    def __init__(self) -> None:
        self.version = importlib.metadata.version("sglang")
        self._tree_module, self._params = _load_radix_tree()
        self._tree: Any = self._fresh()

    def _fresh(self) -> Any:
        return self._tree_module.RadixCache.create_simulated(mock_allocator=_NoAllocator())

    def prompt(self, tokens: Tokens) -> tuple[Any, _Rows]:
        key = self._tree_module.RadixKey(token_ids=array("q", tokens.astype(np.int64).tobytes()))
        return key, np.arange(len(tokens), dtype=np.int64).view(_Rows)

    def build(self, entries: Sequence[Tokens]) -> None:
        self._tree = self._fresh()
        for entry in entries:
            self._insert(self.prompt(entry))

    def _insert(self, prompt: tuple[Any, _Rows]) -> None:
        self._tree.insert(self._params.InsertParams(key=prompt[0], value=prompt[1]))

    def lookup(self, prompt: tuple[Any, _Rows]) -> int:
        params = self._params.MatchPrefixParams(key=prompt[0])
        return int(self._tree.match_prefix(params).device_prefix_len)

    def commit(self, prompt: tuple[Any, _Rows]) -> None:
        params = self._params.MatchPrefixParams(key=prompt[0])
        node = self._tree.match_prefix(params).last_device_node
        self._tree.inc_lock_ref(node)
        self._insert(prompt)
        self._tree.dec_lock_ref(node)

    def evict(self) -> None:
        self._tree.evict(self._params.EvictParams(num_tokens=1))


class _Rows(np.ndarray[Any, np.dtype[np.int64]]):
    """Row numbers of a KV pool: an array in the place of a tensor."""

    def clone(self) -> _Rows:
        return self.copy()


class _NoAllocator:
    """An allocator that ignores freed rows."""

    device = None

    def free_segment(self, rows: object, *, start_pos: int) -> None:
        pass


_TREE = "sglang.srt.mem_cache."
_REAL = {
    _TREE + name
    for name in (
        "radix_cache", "base_prefix_cache", "cache_init_params", "events", "evict_policy", "utils",
    )
}  # fmt: skip


def _load_radix_tree() -> tuple[Any, Any]:
    """The tree's module and the module of its parameter classes, loaded among stand-ins."""
    top = importlib.util.find_spec("sglang")
    if top is None or not top.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'sglang'")
    with _stand_ins(top.submodule_search_locations[0]):
        tree = importlib.import_module(_TREE + "radix_cache")
        return tree, importlib.import_module(_TREE + "base_prefix_cache")


@contextmanager
def _stand_ins(folder: str) -> Iterator[None]:
    """Imports find the tree's own modules and the standard library; all else is empty.

    Every module that was put in place is removed again, so no later import finds a stand-in.
    """
    before = set(sys.modules)
    finder = _StandInFinder(folder)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:
            if name.split(".")[0] not in sys.stdlib_module_names:
                del sys.modules[name]


class _StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, folder: str) -> None:
        self._folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] in sys.stdlib_module_names:
            return None
        if fullname in _REAL:
            where = "/".join([self._folder, *fullname.split(".")[1:-1]])
            return importlib.machinery.PathFinder.find_spec(fullname, [where])
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _StandInModule(ModuleType):
    """A module in which every name is a class that takes and does anything."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (_Anything,), {})
        setattr(self, name, made)
        return made


class _Anything:
    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return _Anything()
