"""What tokens are drawn from: each processor, each limit, each refusal."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer_pool.errors import ModelError, PromptError
from ninfer_pool.runner.sampling import Sampler, Sampling
from tests.runner.plain_sampling import plain

# No sum of equal shares of at most 12 tokens is one of these, so that rounding decides nothing.
TOP_P = st.sampled_from([0.05, 0.13, 0.31, 0.47, 0.71, 0.83, 0.97])
OPTIONS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "temperature": {},
    "top_k": {"top_k": st.integers(1, 14)},
    "top_p": {"top_p": TOP_P},
    "min_p": {"min_p": st.sampled_from([0.01, 0.11, 0.43, 1.0])},
    "repetition": {"repetition_penalty": st.sampled_from([0.5, 1.2, 3.0])},
    "presence": {"presence_penalty": st.sampled_from([-2.0, 0.7, 2])},
    "frequency": {"frequency_penalty": st.sampled_from([-2, 0.7, 2.0])},
}
OPTIONS["all"] = {name: values for options in OPTIONS.values() for name, values in options.items()}


def sampler(how: Sampling | None = None, *, prompt: Any = (), **options: Any) -> Sampler:
    return Sampler(Sampling(**options) if how is None else how, prompt=prompt)


@pytest.mark.parametrize("name", OPTIONS)
@settings(max_examples=60)
@given(data=st.data())
def test_each_processor_is_the_plain_formula(name: str, data: st.DataObject) -> None:
    temperature = st.sampled_from([0.1, 0.7, 1, 1.9])
    how = Sampling(
        **data.draw(st.fixed_dictionaries({"temperature": temperature, **OPTIONS[name]}))
    )
    # Quarters, which any float type holds, and so few that they tie.
    logit = st.integers(-12, 12).map(lambda n: n / 4)
    first = data.draw(logit)
    logits = [first, *data.draw(st.lists(logit | st.just(-math.inf), max_size=11))]
    token = st.integers(0, len(logits) + 1)  # past the vocabulary, too
    prompt, noted, before = (data.draw(st.lists(token, max_size=6)) for _ in range(3))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    given_logits = torch.tensor(logits, dtype=dtype)
    made = sampler(how, prompt=np.array(prompt, dtype=np.int32))
    made.note(noted)
    got = made.distribution(given_logits, before=before)
    wanted = plain(logits, how, prompt=prompt, generated=[*noted, *before])
    assert got.tolist() == pytest.approx(wanted, rel=1e-9, abs=1e-300)
    assert given_logits.tolist() == logits  # left as they were


PENALTIES = {"repetition_penalty": 1.5, "presence_penalty": 0.6, "frequency_penalty": 0.9}

EQUAL = torch.zeros(4)
HALVES = torch.tensor([0.5, 0.25, 0.125, 0.125]).log().double()


@pytest.mark.parametrize(
    ("options", "logits", "kept"),
    [
        ({"top_k": 2}, EQUAL, [0, 1]),
        ({"top_k": 4}, EQUAL, [0, 1, 2, 3]),
        ({"top_k": 10**30}, EQUAL, [0, 1, 2, 3]),
        ({"top_p": 0.51}, EQUAL, [0, 1, 2]),
        ({"top_p": 1e-300}, EQUAL, [0]),
        ({"top_p": 0.49}, HALVES, [0]),
        ({"top_p": 0.51}, HALVES, [0, 1]),
        ({"min_p": 1}, EQUAL, [0, 1, 2, 3]),
        ({"min_p": 0.51}, HALVES, [0]),
        ({"min_p": 0.24}, HALVES, [0, 1, 2, 3]),
        ({"top_k": 2, "top_p": 0.66}, HALVES, [0]),  # top_p sees 2/3 and 1/3
        ({"temperature": 5e-324}, HALVES, [0]),
        ({"temperature": 1e6, "repetition_penalty": 1e6}, HALVES, [0, 1, 2, 3]),
    ],
)
def test_which_tokens_stay_at_a_limit(
    options: dict[str, Any], logits: torch.Tensor, kept: list[int]
) -> None:
    made = sampler(**{"temperature": 1.0, **options})
    assert made.distribution(logits).nonzero().flatten().tolist() == kept


def test_a_large_vocabulary_keeps_the_same_tokens_sorted_or_not() -> None:
    logits = torch.randn(50_000, generator=torch.Generator().manual_seed(0)) * 4
    for top_p in (0.1, 0.9, 0.999):
        p = logits.double().softmax(0)
        order = p.argsort(descending=True)
        wanted = order[: int((p[order].cumsum(0) < top_p).sum()) + 1]
        got = sampler(temperature=1.0, top_p=top_p).distribution(logits)
        assert torch.equal(got.nonzero().flatten(), wanted.sort().values)


# ------------------------------------------------------------------ one draw


@settings(max_examples=50)
@given(data=st.data())
def test_what_has_no_probability_is_never_drawn(data: st.DataObject) -> None:
    logits = torch.tensor(data.draw(st.lists(st.floats(-50, 50, width=32), min_size=1)))
    made = sampler(temperature=1.0, top_k=3, top_p=0.8, seed=data.draw(st.integers(-9, 9)))
    allowed = made.distribution(logits)
    assert all(allowed[made.accept(logits[None], [])[0]] > 0 for _ in range(10))


@given(seed=st.integers(-(2**63), 2**63 - 1), draws=st.integers(1, 20))
def test_a_seed_repeats_its_draws(seed: int, draws: int) -> None:
    logits = torch.zeros(1, 50)
    one, two = (sampler(temperature=1.0, seed=seed) for _ in range(2))
    assert [one.accept(logits, []) for _ in range(draws)] == [
        two.accept(logits, []) for _ in range(draws)
    ]


def test_other_seeds_and_no_seed_draw_otherwise() -> None:
    logits = torch.zeros(1, 2**16)
    seeds = [*range(40), *[None] * 40]
    firsts = [sampler(temperature=1.0, seed=seed).accept(logits, [])[0] for seed in seeds]
    assert len(set(firsts)) > 70


@settings(max_examples=50)
@given(
    logits=st.lists(st.integers(-3, 3), min_size=1, max_size=9),
    temperature=st.sampled_from([0.0, 0.5, 100.0]),
)
def test_the_likeliest_alone_is_greedy_and_ties_go_to_the_lowest_id(
    logits: list[int], temperature: float
) -> None:
    made = sampler(temperature=temperature, top_k=1)
    assert made.greedy == (temperature == 0)
    row = torch.tensor([logits], dtype=torch.float32)
    assert made.accept(row, []) == [logits.index(max(logits))]
    assert made.draft(row[0], []) == logits.index(max(logits))


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize("bad", [[math.nan, 0.0], [-math.inf, -math.inf], [math.inf, 0.0]])
@pytest.mark.parametrize("options", [{}, PENALTIES, {"temperature": 1.0}])
def test_logits_without_a_finite_highest_are_refused(
    options: dict[str, Any], bad: list[float]
) -> None:
    row = torch.tensor(bad)
    with pytest.raises(ModelError, match=r"logits: the highest is (nan|-?inf); needs"):
        sampler(**options).draft(row, [])
    with pytest.raises(ModelError, match="logits: the highest is"):
        sampler(**options).accept(row[None], [])


@pytest.mark.parametrize("options", [{}, PENALTIES, {"temperature": 1.0}])
def test_rows_after_a_rejected_draft_are_not_looked_at(options: dict[str, Any]) -> None:
    rows = torch.tensor([[0.0, -math.inf], [math.nan, math.nan]])
    assert sampler(**options).accept(rows, [1]) == [0]


@pytest.mark.parametrize(
    ("field", "values", "wanted"),
    [
        ("temperature", [-0.1, math.nan, math.inf, "1", None, True, 10**400], "from 0 to 1e+06"),
        ("top_p", [0, 0.0, 1.01, -1, math.nan, False], "above 0 and at most 1"),
        ("min_p", [-0.01, 1.01, math.nan, [0.1]], "from 0 to 1"),
        ("repetition_penalty", [0, -1, math.nan, math.inf], "from 1e-06 to 1e+06"),
        ("presence_penalty", [-2.01, 2.01, math.nan, "0"], "from -2 to 2"),
        ("frequency_penalty", [-2.01, 2.01, math.nan, None], "from -2 to 2"),
        ("top_k", [-1, 1.0, True, None], "an int of 0 (off) or more"),
        ("seed", [2**63, -(2**63) - 1, 1.0, True, "7"], "an int of 64 bits"),
    ],
)
def test_a_field_out_of_range_is_refused_by_name(
    field: str, values: list[Any], wanted: str
) -> None:
    for value in values:
        with pytest.raises(PromptError) as caught:
            sampler(**{field: value})
        assert str(caught.value).startswith(f"{field}: {value!r}; needs ")
        assert wanted in str(caught.value)


def test_every_field_is_checked() -> None:
    for field in dataclasses.fields(Sampling):
        options: dict[str, Any] = {field.name: object()}
        with pytest.raises(PromptError, match=f"^{field.name}: "):
            sampler(**options)
