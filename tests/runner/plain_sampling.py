"""What sampling means, with lists and dictionaries: the formulas that tests compare with."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ninfer_pool.runner.sampling import Sampling


def plain_scores(
    logits: Sequence[float], how: Sampling, *, prompt: Sequence[int], generated: Sequence[int]
) -> list[float]:
    """The penalties, token by token, as vLLM's documentation words them."""
    scores = list(logits)
    for token in range(len(scores)):
        if token in prompt or token in generated:
            if scores[token] > 0:
                scores[token] /= how.repetition_penalty
            else:
                scores[token] *= how.repetition_penalty
        if token in generated:
            scores[token] -= how.frequency_penalty * generated.count(token)
            scores[token] -= how.presence_penalty
    return scores


def share(weights: dict[int, float]) -> dict[int, float]:
    total = math.fsum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def plain(
    logits: Sequence[float],
    how: Sampling,
    *,
    prompt: Sequence[int] = (),
    generated: Sequence[int] = (),
) -> list[float]:
    """The processed distribution with lists and dictionaries, one step after the other."""
    scores = plain_scores(logits, how, prompt=prompt, generated=generated)
    top = max(scores)
    left = share({t: math.exp((s - top) / how.temperature) for t, s in enumerate(scores)})
    ranked = sorted(left, key=lambda token: (-left[token], token))
    if how.top_k:
        left = share({token: left[token] for token in ranked[: how.top_k]})
    kept: dict[int, float] = {}
    for token in (token for token in ranked if token in left):
        if how.top_p < 1 and math.fsum(kept.values()) >= how.top_p:
            break
        kept[token] = left[token]
    left = share(kept)
    least = how.min_p * max(left.values())
    left = share({token: p for token, p in left.items() if p >= least})
    return [left.get(token, 0.0) for token in range(len(scores))]
