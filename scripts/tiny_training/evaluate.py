"""Bits a byte on text, draft acceptance while generating greedily."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .model import TinyModel, rotary


@torch.no_grad()
def bits(model: TinyModel, tokens: Tensor, *, window: int = 1024, context: int = 256) -> float:
    """Return the bits of tokens 1 ... n-1 of one array (n,), read in windows from scratch.

    All but the first window predict only what has at least `context` tokens before it.
    """
    total = 0.0
    for start in range(0, max(1, len(tokens) - 1 - context), window - context):
        row = tokens[start : start + window + 1]
        hidden, _ = model(row[None, :-1])
        losses = F.cross_entropy(model.head(hidden)[0], row[1:], reduction="none")
        total += float(losses[0 if start == 0 else context :].sum())
    return total / math.log(2)


@torch.no_grad()
def generate(model: TinyModel, prompts: Tensor, new_tokens: int) -> Tensor:
    """Return prompts (B, T) with `new_tokens` greedy tokens behind, by whole passes (slow)."""
    rows = prompts
    for _ in range(new_tokens):
        hidden, _ = model(rows)
        best = model.head(hidden[:, -1:]).argmax(-1)
        rows = torch.cat((rows, best), 1)
    return rows


@torch.no_grad()
def accepted(model: TinyModel, rows: Tensor, prompt_tokens: int, *, depth: int) -> list[float]:
    """Return, for depths 1 ... `depth`, how often a draft of greedy rows (B, T) holds so far.

    At a frontier q the draft head reads token q and the model's hidden at q - 1 and foretells
    token q + 1; deeper, it reads its own guess and its own normed output. The first generated
    token comes from prefill, so the first frontier is at it. Depth d counts where guesses
    1 ... d are all right.
    """
    hidden, _ = model(rows)
    held = torch.zeros(depth)
    frontiers = range(prompt_tokens, rows.shape[1] - depth)
    for frontier in frontiers:
        held += _holds(model, rows, hidden, frontier, depth)
    return (held / len(frontiers)).tolist()


def _holds(model: TinyModel, rows: Tensor, hidden: Tensor, frontier: int, depth: int) -> Tensor:
    """Return the share of rows whose first 1 ... depth guesses at this frontier are right."""
    embedded = model.model.embed_tokens(rows[:, 1 : frontier + 1])
    reads = hidden[:, :frontier]
    good = torch.ones(len(rows), dtype=torch.bool)
    shares = []
    for ahead in range(1, depth + 1):
        cos, sin = rotary(embedded.shape[1] + 1)
        last = model.mtp(embedded, reads, cos[1:], sin[1:])[:, -1:]
        guess = model.head(last).argmax(-1)
        good &= guess[:, 0] == rows[:, frontier + ahead]
        shares.append(good.float().mean())
        embedded = torch.cat((embedded, model.model.embed_tokens(guess)), 1)
        reads = torch.cat((reads, last), 1)
    return torch.stack(shares)
