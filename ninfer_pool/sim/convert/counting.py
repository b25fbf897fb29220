"""Positions of a prompt: its UTF-8 bytes, or the tokens of a tokenizer given as a file."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from ninfer_pool.errors import TraceError
from ninfer_pool.sim.convert.chatml import MEDIA_POSITIONS, PromptPiece


class PositionCounter(Protocol):
    """Turns a piece into units, as bytes; equal units mean equal positions."""

    @property
    def unit(self) -> int:
        """Bytes of one position."""

    @property
    def label(self) -> str:
        """The kind of positions, for the header."""

    def units(self, piece: PromptPiece) -> bytes:
        """Return the piece's positions, `unit` bytes each."""


class ByteCounter:
    """One position for each UTF-8 byte."""

    unit: Final = 1
    label: Final = "UTF-8 bytes"

    def units(self, piece: PromptPiece) -> bytes:
        """Return the piece's text in UTF-8; media as bytes drawn from its digest."""
        if piece.media is not None:
            return _media_units(piece.media, self.unit)
        # A lone surrogate is legal in JSON; it must not end the conversion.
        return piece.text.encode("utf-8", "surrogatepass")


class TokenCounter:
    """One position for each token of a ``tokenizer.json``; equal pieces are encoded once.

    Raises:
        TraceError: the package ``tokenizers`` is not installed, or the file is not a tokenizer.
    """

    unit: Final = 4

    def __init__(self, path: Path) -> None:
        self._encode = _load(path)
        self._known: dict[bytes, bytes] = {}
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        self.label = f"tokens of {path.name} (sha256:{digest[:16]})"

    def units(self, piece: PromptPiece) -> bytes:
        """Return the token ids, int32 little-endian; media as negative ids from the digest."""
        if piece.media is not None:
            return _media_units(piece.media, self.unit)
        text = piece.text.encode("utf-8", "replace")
        key = hashlib.sha256(text).digest()
        found = self._known.get(key)
        if found is None:
            ids = self._encode(text.decode())
            found = self._known[key] = np.array(ids, dtype="<i4").tobytes()
        return found


def _load(path: Path) -> Callable[[str], list[int]]:
    try:
        # By name, so that types are checked the same with and without the package.
        tokenizers = importlib.import_module("tokenizers")
    except ImportError as error:
        raise TraceError(
            "--tokenizer: needs the package tokenizers; run: pip install tokenizers"
        ) from error
    if not path.is_file():
        raise TraceError(f"{path}: no such file; must be a tokenizer.json")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exception
        raise TraceError(f"{path}: not a tokenizer ({error}); must be a tokenizer.json") from error

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    return encode


def _media_units(digest: str, unit: int) -> bytes:
    """Return positions of this media alone: no text has only bytes of 0x80 to 0xBF."""
    seed = hashlib.sha256(digest.encode()).digest()
    block = np.frombuffer(seed, dtype=np.uint8) & 0x3F | 0x80
    return np.resize(block, MEDIA_POSITIONS * unit).tobytes()
