"""Bodies of completions, of requests to be explained, and of pins."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ninfer_pool.server import openai
from tests.server.asked import HELLO, completion, refusal


@pytest.mark.parametrize(
    ("field", "value"),
    [("echo", True), ("best_of", 2), ("suffix", "x"), ("logprobs", 1), ("logprobs", 0), ("n", 2)],
)
def test_what_cannot_be_honoured_of_a_completion_is_refused(field: str, value: Any) -> None:
    assert refusal(lambda: completion(**{field: value})).param == field


@pytest.mark.parametrize(
    ("prompt", "found"),
    [("a", "a"), (["a"], "a"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2]), (" ", " ")],
)
def test_one_prompt_in_any_form(prompt: Any, found: Any) -> None:
    call = completion(prompt=prompt)
    assert call.text == found
    assert (call.messages, call.endpoint) == ((), openai.COMPLETIONS)
    assert not call.parse_tools


@pytest.mark.parametrize(
    "prompt",
    ["", [], [[]], [""], None, ["a", "b"], [[1], [2]], [1, "a"], [True], [-1], [2**31], 5, {}],
)
def test_no_prompt_or_several_are_refused(prompt: Any) -> None:
    error = refusal(lambda: completion(prompt=prompt))
    assert error.param == "prompt"
    assert "one text or one list of token ids" in error.message


def test_what_is_not_there_is_missing() -> None:
    assert refusal(lambda: openai.parse_chat(b"{}", {})).message == "messages: Field required"
    assert refusal(lambda: openai.parse_completion(b"{}", {})).message == "prompt: Field required"


def test_either_body_can_be_explained() -> None:
    raw = openai.parse_explain(json.dumps({"prompt": "Once", "cache_salt": "s"}).encode(), {})
    assert (raw.text, raw.control.salt, raw.endpoint) == ("Once", "s", openai.EXPLAIN)
    asked = openai.parse_explain(json.dumps({"messages": [HELLO]}).encode(), {})
    assert (asked.messages, asked.endpoint) == ((HELLO,), openai.EXPLAIN)


def test_a_pin_is_what_a_body_may_leave_out() -> None:
    assert openai.parse_pin(b"")
    assert openai.parse_pin(b"{}")
    assert not openai.parse_pin(b'{"pinned": false}')
    assert refusal(lambda: openai.parse_pin(b'{"pinned": "no"}')).param == "pinned"
