"""An order-3 count model over bytes: what the trained model has to beat.

Interpolated Kneser-Ney smoothing with three discounts (Chen and Goodman, "An empirical study of
smoothing techniques for language modeling", 1999): the longest context counts occurrences, each
shorter one counts in how many places a byte was seen, and the shortest falls back to 1 / 256.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Codes = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def bits_per_byte(train: bytes, held_out: bytes, *, order: int = 3) -> float:
    """Return the model's bits a byte on `held_out`; O(n log n) in the length of `train`.

    The first `order` bytes of `held_out` are context only.
    """
    grams, counts = np.unique(_codes(train, order), return_counts=True)
    tables = [(grams, counts)]
    for _ in range(order):  # one byte shorter on the left, counted once for each longer gram
        shorter = tables[-1][0] % 256 ** (order + 1 - len(tables))
        tables.append(np.unique(shorter, return_counts=True))
    wanted = _codes(held_out, order)
    probability = np.full(len(wanted), 1 / 256)
    for length, (known, seen) in enumerate(reversed(tables), start=1):
        probability = _interpolate(known, seen, wanted % 256**length, probability)
    return float(-np.log2(probability).mean())


def _codes(text: bytes, order: int) -> Codes:
    """Return each run of order + 1 bytes as one number, the newest byte lowest."""
    symbols = np.frombuffer(text, dtype=np.uint8).astype(np.int64)
    codes = np.zeros(len(symbols) - order, dtype=np.int64)
    for place in range(order + 1):
        codes = codes * 256 + symbols[place : len(symbols) - order + place]
    return codes


def _interpolate(known: Codes, seen: Codes, wanted: Codes, shorter: Floats) -> Floats:
    """Return P(last byte | bytes before it) for each wanted gram, given the shorter context's."""
    taken = _discounts(seen)[np.minimum(seen, 3)]
    contexts, first = np.unique(known // 256, return_index=True)
    total = np.add.reduceat(seen, first)
    left = np.add.reduceat(taken, first)
    at = _find(contexts, wanted // 256)
    gram = _find(known, wanted)
    kept = np.where(gram >= 0, seen[gram] - taken[gram], 0.0)
    mixed = (kept + left[at] * shorter) / total[at]
    return np.where(at >= 0, mixed, shorter)


def _discounts(seen: Codes) -> Floats:
    """Return what is taken from grams seen 0, 1, 2 and at least 3 times."""
    times = [max(1, int((seen == n).sum())) for n in range(1, 5)]
    share = times[0] / (times[0] + 2 * times[1])
    taken = [n - (n + 1) * share * times[n] / times[n - 1] for n in range(1, 4)]
    return np.array([0.0, *np.clip(taken, 0.05, [0.95, 1.9, 2.85])])


def _find(table: Codes, wanted: Codes) -> Codes:
    """Return each wanted number's place in the sorted table, -1 where it is not there."""
    at = np.minimum(np.searchsorted(table, wanted), len(table) - 1)
    return np.where(table[at] == wanted, at, -1)
