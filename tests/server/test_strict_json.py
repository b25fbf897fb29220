"""Bodies that are no JSON object, or one that no prompt could hold."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer_pool.server import anthropic, openai
from ninfer_pool.server.chat_request import ChatRequest
from ninfer_pool.server.errors import ApiError
from tests.server.asked import chat, refusal

LEVELS = 200
"""Lists and objects within each other that are still read."""


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "empty"),
        (b"  \n", "empty"),
        (b"{", "line 1"),
        (b"[]", "[]"),
        (b"[1]", "a list of 1"),
        (b"null", "null"),
        (b'"x"', "'x'"),
        (b"\xff\xfe", "expected value"),
        ('{"a": 1}'.encode("utf-16"), "expected value"),
        (b'\xef\xbb\xbf{"a": 1}', "body"),
        (b'{"a": "\xff"}', "unicode"),
        (b'{"a": 1} x', "trailing characters"),
        (b'{"a": NaN}', "expected value"),
        (b'{"a": -Infinity}', "invalid number"),
        (b'{"a": ' + b"9" * 5000 + b"}", "out of range"),
        (b'{"a": {"b": ["\\ud800"]}}', "hex escape"),
        (b'{"\\udfff": 1}', "surrogate"),
        (b"[" * 200_000, "recursion limit"),
        (b'{"a":' * 200_000, "recursion limit"),
        (b'{"a": "\x00"}', "control character"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes, says: str) -> None:
    for parse in (openai.parse_chat, openai.parse_completion, openai.parse_explain):
        error = refusal(partial(parse, body, {}))
        assert says in error.message
        assert error.message.startswith("body: ")


@pytest.mark.parametrize("field", ["temperature", "ttl_seconds"])
def test_a_number_too_large_for_a_float_is_refused(field: str) -> None:
    body = b'{"messages": [{"role": "user", "content": "Hi"}], "%s": 1e999}' % field.encode()
    assert refusal(partial(openai.parse_chat, body, {})).message.startswith(f"{field}: ")


def test_of_a_key_that_is_written_twice_the_last_value_counts() -> None:
    body = b'{"messages": [], "messages": [{"role": "user", "content": "Hi"}]}'
    assert len(openai.parse_chat(body, {}).messages) == 1


def test_deep_values_are_no_trouble() -> None:
    deep: Any = 1
    for _ in range(LEVELS - 1):
        deep = {"a": deep}
    assert chat(metadata=deep) == chat()
    assert sys.getrecursionlimit() > 4 * LEVELS


def test_whole_characters_written_as_pairs_are_read() -> None:
    call = openai.parse_chat(
        b'{"messages": [{"role": "user", "content": "\\ud83d\\ude00 \\u00e9"}]}', {}
    )
    assert call.messages[0]["content"] == "\N{GRINNING FACE} é"
    assert call.model is None


WORDS = (
    "messages role content type text tools function name model stop max_tokens system prompt "
    "input_schema arguments tool_calls cache_salt chat_template_kwargs thinking cache_control "
    "temperature user id"
)
NAMES = st.sampled_from(WORDS.split())
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["user", "assistant", "tool", "text", "function", "ephemeral", "", "\0"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=5),
)
PARSERS = (
    openai.parse_chat,
    openai.parse_completion,
    openai.parse_explain,
    anthropic.parse_messages,
    anthropic.parse_count,
)


@given(body=st.binary() | st.dictionaries(NAMES, VALUES).map(lambda x: json.dumps(x).encode()))
def test_any_body_is_understood_or_refused(body: bytes) -> None:
    for parse in PARSERS:
        found = outcome(partial(parse, body, {}))
        assert isinstance(found, ChatRequest) or (
            found.status == 400 and 0 < len(found.message) < 500
        )


def outcome(parse: Callable[[], ChatRequest]) -> ChatRequest | ApiError:
    """What comes of a body, whatever it is."""
    try:
        return parse()
    except ApiError as error:
        return error
