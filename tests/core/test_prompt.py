"""What a prompt, a namespace and a pool's set-up accept, refuse, and mean."""

from __future__ import annotations

import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer_pool import ConfigError, Namespace, NamespaceError, PoolConfig, Prompt, PromptError
from ninfer_pool.core.policy import Policy
from tests.machinery import strategies

SPACE = Namespace(weights="w", kv_dtype="k")
AXES = np.tile(np.arange(6, dtype=np.int32), (3, 1))


def prompt(tokens: Any = (1, 2, 3, 4, 5, 6), **options: Any) -> Prompt:
    return Prompt(tokens, namespace=SPACE, **options)


def test_a_buffer_of_int32_is_taken_without_a_copy() -> None:
    tokens = np.arange(5, dtype=np.int32)
    made = prompt(tokens)
    tokens[0] = 9
    assert made.tokens[0] == 9
    assert not made.tokens.flags.writeable


@pytest.mark.parametrize(
    "tokens",
    [
        [3, 1, 2],
        (3, 1, 2),
        array.array("i", [3, 1, 2]),
        np.array([3, 0, 1, 0, 2], dtype=np.int32)[::2],
        np.array([3, 1, 2], dtype="<i4"),
        np.array([3, 1, 2], dtype=np.int32).data,
    ],
)
def test_what_tokens_may_be(tokens: Any) -> None:
    made = prompt(tokens)
    assert made.tokens.tolist() == [3, 1, 2]
    assert repr(made) == "Prompt(3 tokens, boundaries=[])"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": []}, "tokens: empty"),
        ({"tokens": np.array([1, -2], dtype=np.int32)}, "tokens[1]: -2"),
        ({"tokens": [-1]}, "tokens[0]: -1"),
        ({"tokens": [1, True]}, "tokens[1]: True"),
        ({"tokens": [2**31]}, "tokens[0]: 2147483648"),
        ({"tokens": [1.5]}, "tokens[0]: 1.5"),
        ({"tokens": 5}, "tokens: int"),
        ({"tokens": np.arange(3)}, "tokens: format 'l'"),
        ({"tokens": np.zeros((2, 2), dtype=np.int32)}, "2 axes"),
        ({"namespace": "w"}, "namespace: 'w'"),
        ({"boundaries": 5}, "boundaries: 5; needs a list"),
        ({"boundaries": [5]}, "boundaries[0]: 5"),
        ({"boundaries": [(1, np.array(["turn", "turn"]))]}, "boundaries[0].kind: array"),
        ({"boundaries": [(1, "odd")]}, "boundaries[0].kind: 'odd'"),
        ({"boundaries": [(1, "frontier")]}, "boundaries[0].kind: 'frontier'"),
        ({"boundaries": [(0, "turn")]}, "boundaries[0].position: 0"),
        ({"boundaries": [(7, "turn")]}, "boundaries[0].position: 7"),
        ({"boundaries": [("1", "turn")]}, "boundaries[0].position: '1'"),
        ({"boundaries": [(3, "turn"), (2, "turn")]}, "boundaries[1].position: 2 after 3"),
        ({"boundaries": [(2, "turn")], "media": [(1, 3, "x")]}, "inside a media span"),
        ({"media": None}, "media: None; needs a list"),
        ({"media": [(1, 2)]}, "media[0]: (1, 2)"),
        ({"media": [(1, 2, "\ud800")]}, "media[0].digest: '\\ud800'"),
        ({"media": [("1", 2, "x")]}, "media[0]: ('1', 2, 'x')"),
        ({"media": [(1, 2, "")]}, "media[0].digest: ''"),
        ({"media": [(1, 2, 5)]}, "media[0].digest: 5"),
        ({"media": [(2, 2, "x")]}, "media[0]: [2, 2)"),
        ({"media": [(2, 7, "x")]}, "media[0]: [2, 7)"),
        ({"media": [(1, 4, "x"), (3, 5, "x")]}, "media[1]: begins at 3"),
        ({"positions": AXES.astype(np.int64)}, "positions: int64"),
        ({"positions": [[1], [1, 2]]}, "positions: ragged"),
        ({"positions": AXES[:2]}, "positions: int32 of shape (2, 6)"),
        ({"token_types": np.zeros(5, dtype=np.int32)}, "token_types: int32 of shape (5,)"),
    ],
)
def test_what_a_prompt_refuses(options: dict[str, Any], message: str) -> None:
    options = {"tokens": [1, 2, 3, 4, 5, 6], "namespace": SPACE, **options}
    with pytest.raises(PromptError) as caught:
        Prompt(options.pop("tokens"), **options)
    assert message in str(caught.value)


def test_what_is_said_explicitly_and_what_is_left_out_are_one() -> None:
    types = np.zeros(6, dtype=np.int32)
    assert prompt(positions=AXES, token_types=types).attributes == prompt().attributes == ()


def whole(made: Prompt, options: dict[str, Any]) -> list[Any]:
    """Each position's token, type, axes and media, spelled out in full."""
    count = len(made)
    axes = options.get("positions")
    axes = np.tile(np.arange(count), (3, 1)) if axes is None else axes
    types = options.get("token_types")
    types = np.zeros(count, dtype=np.int32) if types is None else types
    cells: list[Any] = [
        (int(made.tokens[at]), int(types[at]), tuple(axes[:, at].tolist())) for at in range(count)
    ]
    for begin, end, digest in options.get("media", ()):
        block = [axes[:, begin:end].tolist(), digest, end - begin]
        for at in range(begin, end):
            cells[at] = (int(made.tokens[at]), int(types[at]), block)
    return cells


@st.composite
def pairs(draw: st.DrawFn) -> Any:
    tokens = draw(st.lists(strategies.TOKENS, min_size=1, max_size=6))
    return [(tokens, draw(strategies.attributes(len(tokens)))) for _ in range(2)]


@given(pairs())
def test_attributes_differ_just_where_what_they_stand_for_differs(pair: Any) -> None:
    made = [prompt(tokens, **options) for tokens, options in pair]
    full = [whole(p, options) for p, (_, options) in zip(made, pair, strict=True)]
    first = next((at for at, both in enumerate(zip(*full, strict=True)) if both[0] != both[1]), -1)
    short = [dict(p.attributes) for p in made]
    differ = [at for at in sorted({*short[0], *short[1]}) if short[0].get(at) != short[1].get(at)]
    assert (differ[0] if differ else -1) == first


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": 5}, "weights: 5"),
        ({"weights": "\ud800"}, "weights: '\\ud800'; needs a str of valid Unicode"),
        ({"world_size": 2**63}, "world_size: 9223372036854775808; needs an int of 64 bits"),
        ({"kv_dtype": None}, "kv_dtype: None"),
        ({"salt": ""}, "salt: 0 characters"),
        ({"salt": "x" * 129}, "salt: 129 characters"),
        ({"rank": 1}, "rank: 1; needs 0 <= rank < 1"),
        ({"world_size": "2"}, "world_size: '2'"),
    ],
)
def test_what_a_namespace_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(NamespaceError) as caught:
        Namespace(**{"weights": "w", "kv_dtype": "k", **changes})
    assert message in str(caught.value)


def test_the_first_field_that_differs() -> None:
    assert SPACE.first_difference(SPACE) is None
    assert SPACE.first_difference(Namespace(weights="w", kv_dtype="k", draft="mtp3")) == "draft"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_pages": 0}, "num_pages: 0"),
        ({"page_bytes": 1.5}, "page_bytes: 1.5"),
        ({"lanes": True}, "lanes: True"),
        ({"image_bytes": -1}, "image_bytes: -1"),
        ({"max_entries": 0}, "max_entries: 0"),
        ({"retained_bytes": 16}, "retained_bytes: 16; one page and one image need 48"),
        ({"num_pages": 2}, "num_pages: 2; one page and one image need 3"),
        ({"policy": "best"}, "policy: 'best'; needs one of default"),
        ({"policy": 5}, "policy: 5; needs a name or a factory"),
        ({"affinity": "any"}, "affinity: 'any'"),
        ({"end_logits": "no"}, "end_logits: 'no'; needs True or False"),
        ({"clock": 5}, "clock: 5; needs a function"),
        ({"num_pages": 2**31}, "num_pages: 2147483648; needs an int of at most 2147483647"),
        ({"grid": 2**63}, "grid: 9223372036854775808; needs an int of at most"),
    ],
)
def test_what_a_pool_refuses(changes: dict[str, Any], message: str) -> None:
    base: dict[str, Any] = {"num_pages": 9, "page_bytes": 16, "image_bytes": 32}
    with pytest.raises(ConfigError) as caught:
        PoolConfig(**{**base, **changes})
    assert message in str(caught.value)


def test_a_policy_of_ones_own_must_say_an_order() -> None:
    with pytest.raises(NotImplementedError):
        Policy().victims(0)
