"""The exactness tests have power: each way to damage what is resumed shows at once.

Models whose state forgets within a step would pass any test of restoring. Ours are made so that
it matters, and this holds them to it: each damage flips most of the later argmaxes, or moves the
logits by more than a thousand times what the comparison with transformers allows.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ninfer_pool.runner import Sequence
from ninfer_pool.runner.runner import Runner
from tests.runner.models import random_model
from tests.runner.world import begin, make, serve

BOUND = 1e-5
STEM = [(37 * i) % 198 + 1 for i in range(150)]
OTHER = [(53 * i) % 198 + 1 for i in range(150)]
NEXT = [(11 * i) % 198 + 1 for i in range(64)]

Damage = Callable[[Runner, Sequence], None]


def recurrent_zeroed(runner: Runner, sequence: Sequence) -> None:
    """The recurrent state was not loaded."""
    runner.slab.state(sequence.lane).recurrent.zero_()


def convolution_zeroed(runner: Runner, sequence: Sequence) -> None:
    """The convolution's columns were not loaded."""
    runner.slab.state(sequence.lane).conv.zero_()


def anothers_state(runner: Runner, sequence: Sequence) -> None:
    """The image of another request was loaded."""
    _load(runner, sequence, OTHER)


def one_token_stale(runner: Runner, sequence: Sequence) -> None:
    """The image was saved one token too early."""
    _load(runner, sequence, STEM[:-1])


def _load(runner: Runner, sequence: Sequence, tokens: list[int]) -> None:
    donors = make(runner.model, lanes=1)
    donor, _ = begin(donors, tokens, [(len(tokens), "turn")])
    while not donor.ready:
        donors.prefill(donor)
    state, mine = donors.slab.state(0), runner.slab.state(sequence.lane)
    mine.recurrent.copy_(state.recurrent)
    mine.conv.copy_(state.conv)


def pages_swapped(runner: Runner, sequence: Sequence) -> None:
    """A KV page changed places with another request's."""
    other, _ = begin(runner, OTHER, [], max_tokens=1, lane=1)
    while not other.ready:
        runner.prefill(other)
    sequence.table[0] = other.table[0]


DAMAGES: list[Damage] = [
    recurrent_zeroed,
    convolution_zeroed,
    anothers_state,
    one_token_stale,
    pages_swapped,
]


def resumed(damage: Damage | None) -> torch.Tensor:
    """Logits (64, vocab) of what follows the stem, resumed at its end, perhaps with damage."""
    runner = make(random_model(3, head_dim=64), lanes=2)
    serve(runner, STEM, [(150, "turn")], steps=1)
    boundaries = [(150, "turn"), (214, "turn")]
    sequence, _ = begin(runner, [*STEM, *NEXT], boundaries, max_tokens=1, lane=0)
    assert sequence.lease.start == 150
    if damage is not None:
        damage(runner, sequence)
    seen: list[torch.Tensor] = []
    while not sequence.ready:
        runner.prefill(sequence, look=lambda _, hidden: seen.append(runner.model.logits(hidden)))
    return torch.cat(seen)


@pytest.fixture(scope="module")
def right() -> torch.Tensor:
    """The logits without damage."""
    return resumed(None)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_shows(damage: Damage, right: torch.Tensor) -> None:
    wrong = resumed(damage)
    flipped = (wrong.argmax(-1) != right.argmax(-1)).float().mean()
    moved = (wrong - right).pow(2).mean().sqrt() / right.pow(2).mean().sqrt()
    assert flipped > 0.5 or moved > 1000 * BOUND, (float(flipped), float(moved))


def test_a_zeroed_hidden_tail_shows() -> None:
    """On a full hit the tail alone says what comes next."""
    runner = make(random_model(3, head_dim=64), lanes=1)
    right = serve(runner, STEM, [(150, "turn")], steps=1)
    sequence, _ = begin(runner, STEM, [(150, "turn")], max_tokens=1)
    assert sequence.lease.start == 150
    assert torch.equal(runner.executor.tail_logits(sequence.lane), right.new[0])
    runner.slab.tails[sequence.lane] = 0
    wrong = runner.executor.tail_logits(sequence.lane)
    assert (wrong - right.new[0]).norm() > 1000 * BOUND * right.new[0].norm()
