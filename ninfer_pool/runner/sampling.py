"""How one sequence's next tokens are chosen: greedily, or drawn from a processed distribution.

Logits pass through penalties (repetition, then presence and frequency), temperature, top_k,
top_p, min_p: the order of transformers. Each filter takes the result of the one before it,
renormalised. Where values tie at a limit, the lowest ids stay.

Drafts are verified by speculative sampling (Leviathan et al., arXiv 2211.17192; Chen et al.,
arXiv 2302.01318), which does not change the distribution of the output.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ninfer_pool.errors import ModelError, PromptError

_RANGES = {
    "temperature": (0.0, 1e6),
    "top_p": (math.ulp(0.0), 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-6, 1e6),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
_WANTED = {"top_p": "above 0 and at most 1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """A request's sampling parameters.

    Args:
        temperature: divisor of the logits, 0 to 1e6; 0: greedy, whatever the filters.
        top_k: only this many of the likeliest tokens stay; 0: all.
        top_p: only the likeliest tokens that together reach this probability, above 0, stay.
        min_p: only tokens at least this fraction as likely as the likeliest, 0 to 1, stay.
        repetition_penalty: divides positive and multiplies other logits of tokens in the prompt
            or generated, 1e-6 to 1e6; 1: off.
        presence_penalty: subtracted from the logits of tokens generated, -2 to 2.
        frequency_penalty: subtracted from them once for each time generated, -2 to 2.
        seed: an int64; equal seeds give equal draws; None: a random one.

    Raises:
        PromptError: names the field, its value and what would be right.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            # NaN fails both comparisons.
            if type(value) not in (int, float) or not low <= value <= high:
                wanted = _WANTED.get(name, f"from {low:g} to {high:g}")
                raise PromptError(f"{name}: {value!r}; needs a number {wanted}")
        if type(self.top_k) is not int or self.top_k < 0:
            raise PromptError(f"top_k: {self.top_k!r}; needs an int of 0 (off) or more")
        if self.seed is None:
            return
        if type(self.seed) is not int or not -(2**63) <= self.seed < 2**63:
            raise PromptError(f"seed: {self.seed!r}; needs an int of 64 bits with a sign, or None")

    @property
    def penalises(self) -> bool:
        """Whether tokens seen before change the logits."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1, 0, 0)


class Sampler:
    """Chooses the tokens of one running sequence.

    Draws depend on the seed and the logits alone, on every device: one generator on the CPU
    gives one number for each draft made, each draft verified and each token drawn.

    Args:
        sampling: the request's parameters.
        prompt: its token ids, for the repetition penalty.
    """

    def __init__(
        self, sampling: Sampling, *, prompt: Sequence[int] | npt.NDArray[np.int32]
    ) -> None:
        self._sampling = sampling
        self._prompt = torch.empty(0, dtype=torch.int64)
        if sampling.penalises:
            self._prompt = torch.from_numpy(np.unique(np.asarray(prompt, dtype=np.int64)))
        self._generated: Counter[int] = Counter()
        self._proposals: dict[tuple[int, ...], torch.Tensor] = {}
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken, the lowest id of equals."""
        return self._sampling.temperature == 0

    def note(self, tokens: Sequence[int]) -> None:
        """Count emitted tokens, and discard drafts that were never verified."""
        self._generated.update(tokens)
        self._proposals.clear()

    def distribution(self, logits: torch.Tensor, *, before: Sequence[int] = ()) -> torch.Tensor:
        """Return the processed probabilities (vocab,), fp64 on the CPU, unless `greedy`.

        ``logits`` (vocab,) of any float type follow the tokens noted and ``before``. O(vocab), and
        O(n log n) in the n tokens that top_k or top_p choose from.

        Raises:
            ModelError: the highest of the logits is not finite.
        """
        assert not self.greedy, "greedy sampling has no distribution"
        scores = self._scores(logits, before)
        # The highest at 0: no temperature makes it overflow.
        scaled = (scores - scores.max()) / self._sampling.temperature
        probabilities = torch.softmax(scaled, 0)
        probabilities = _top_k(probabilities, self._sampling.top_k)
        probabilities = _top_p(probabilities, self._sampling.top_p)
        return _min_p(probabilities, self._sampling.min_p)

    def draft(self, logits: torch.Tensor, before: Sequence[int]) -> int:
        """Propose the token after those noted and ``before``, this round's earlier drafts.

        ``logits`` (vocab,) are a draft head's. `accept` uses the distribution drawn from here.

        Raises:
            ModelError: as `distribution` does.
        """
        if self.greedy:
            return next(self._best(logits[None], [before]))
        proposed = self.distribution(logits, before=before)
        token = self._draw(proposed)
        self._proposals[(*before, token)] = proposed
        return token

    def accept(self, logits: torch.Tensor, drafts: Sequence[int]) -> list[int]:
        """Verify a round's drafts and return those accepted and one token more.

        Row i of ``logits`` (k + 1, vocab) is the model's, after the tokens noted and i of the k
        drafts. Rows after the first draft rejected are not read. A draft from another source than
        `draft` counts as a proposal of that one token, which is exact for every source. Whether a
        token of `draft` is passed here may depend on the drafts before it, but not on that token.

        Raises:
            ModelError: as `distribution` does.
        """
        vocab = logits.shape[-1]
        assert logits.shape == (len(drafts) + 1, vocab), "one row a draft and one more"
        assert all(0 <= token < vocab for token in drafts), "a draft that is no token"
        proposals, self._proposals = self._proposals, {}
        if self.greedy:
            return self._accept_greedily(logits, drafts)
        for i, token in enumerate(drafts):
            p = self.distribution(logits[i], before=drafts[:i])
            q = proposals.get(tuple(drafts[: i + 1]))
            q = _one_hot(token, like=p) if q is None else q
            if not _accepts(self._uniform(), p=float(p[token]), q=float(q[token])):
                return [*drafts[:i], self._draw(_residual(p, q))]
        return [*drafts, self._draw(self.distribution(logits[-1], before=drafts))]

    def _accept_greedily(self, logits: torch.Tensor, drafts: Sequence[int]) -> list[int]:
        accepted: list[int] = []
        best = self._best(logits, [drafts[:i] for i in range(len(logits))])
        for token, draft in zip(best, [*drafts, None], strict=True):
            accepted.append(token)
            if token != draft:
                break
        return accepted

    def _best(self, logits: torch.Tensor, befores: Sequence[Sequence[int]]) -> Iterator[int]:
        """Yield each row's likeliest token; a row that is not consumed may hold anything."""
        if self._sampling.penalises:
            rows = zip(logits, befores, strict=True)
            yield from (int(self._scores(row, before).argmax()) for row, before in rows)
            return
        # Of equals, max returns the first. Two small copies are all that leaves the device.
        values, tokens = logits.max(-1)
        for value, token in zip(values.tolist(), tokens.tolist(), strict=True):
            _check_highest(value)
            yield token

    def _scores(self, logits: torch.Tensor, before: Sequence[int]) -> torch.Tensor:
        """Return checked logits less their penalties, in fp64 on the CPU, where none overflows."""
        scores = logits.to("cpu", torch.float64)
        _check_highest(float(scores.max()))
        if not self._sampling.penalises:
            return scores
        return _penalised(
            scores,
            self._sampling,
            prompt=self._prompt,
            generated=self._generated + Counter(before),
        )

    def _draw(self, weights: torch.Tensor) -> int:
        """Draw an id with probability in proportion to its weight; never one of weight 0."""
        cumulative = weights.cumsum(0)
        # The uniform number is below 1, so that the product is below the last sum.
        x = self._uniform() * cumulative[-1]
        return int(torch.searchsorted(cumulative, x, right=True))

    def _uniform(self) -> float:
        return float(torch.rand((), dtype=torch.float64, generator=self._generator))


def _check_highest(value: float) -> None:
    if not math.isfinite(value):
        raise ModelError(f"logits: the highest is {value}; needs a finite number and no NaN")


def _penalised(
    scores: torch.Tensor,
    sampling: Sampling,
    *,
    prompt: torch.Tensor,
    generated: Mapping[int, int],
) -> torch.Tensor:
    """Return scores (vocab,) less the penalties for ids in ``prompt`` and ``generated``.

    Ids past the vocabulary, which a prompt may use to mark media, have no score to change.
    """
    vocab = len(scores)
    counted = {token: count for token, count in generated.items() if token < vocab}
    tokens = torch.tensor(list(counted), dtype=torch.int64)
    counts = torch.tensor(list(counted.values()), dtype=torch.float64)
    seen = torch.cat([prompt[prompt < vocab], tokens])
    factor = sampling.repetition_penalty
    old = scores[seen]
    scores = scores.scatter(0, seen, torch.where(old > 0, old / factor, old * factor))
    taken = sampling.presence_penalty + sampling.frequency_penalty * counts
    return scores.scatter_add(0, tokens, -taken)


def _only(probabilities: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Return the probabilities (vocab,) of the ids ``kept``, normalised; 0 elsewhere."""
    alone = torch.zeros_like(probabilities).index_copy(0, kept, probabilities[kept])
    return alone / alone.sum()


def _ranked(probabilities: torch.Tensor, *, least: float) -> torch.Tensor:
    """Return the ids at least this likely, the likeliest first, of equals the lowest first."""
    ids = (probabilities >= least).nonzero().squeeze(1)
    return ids[probabilities[ids].argsort(descending=True, stable=True)]


def _top_k(probabilities: torch.Tensor, top_k: int) -> torch.Tensor:
    if not 0 < top_k < len(probabilities):
        return probabilities
    least = float(probabilities.topk(top_k).values[-1])
    return _only(probabilities, _ranked(probabilities, least=least)[:top_k])


def _top_p(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    if top_p == 1:
        return probabilities
    # Together, ids less likely than this cannot make up the 1 - top_p that is left out: a large
    # vocabulary need not be sorted.
    least = 0.5 * (1 - top_p) / len(probabilities)
    ranked = _ranked(probabilities, least=least)
    short = probabilities[ranked].cumsum(0) < top_p
    return _only(probabilities, ranked[: int(short.sum()) + 1])


def _min_p(probabilities: torch.Tensor, min_p: float) -> torch.Tensor:
    if min_p == 0:
        return probabilities
    least = min_p * probabilities.max()
    return _only(probabilities, (probabilities >= least).nonzero().squeeze(1))


def _one_hot(token: int, *, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like).index_fill(0, torch.tensor([token]), 1)


def _accepts(uniform: float, *, p: float, q: float) -> bool:
    """Return whether a draft of probability q is accepted, which has probability min(1, p / q)."""
    return uniform * q < p


def _residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return the weights (vocab,) to draw from after a rejection: max(p - q, 0)."""
    rest = (p - q).clamp(min=0)
    # Equal except for rounding: the draft was rejected by rounding alone, and p is as good.
    return rest if rest.any() else p
