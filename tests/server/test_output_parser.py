"""What a model writes is told apart the same however it is cut up, and nothing of it is lost."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ninfer_pool.server.chat_request import Piece, Reasoning, Text, ToolCall
from ninfer_pool.server.output_parser import MAX_CLOSES, OutputParser
from ninfer_pool.server.usage import merged
from tests.server.asked import TOOL

QWEN = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nUlm\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
)
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm", "days": 2}}\n</tool_call>'
CALLED = ("weather", {"city": "Ulm", "days": 2})


def plain(pieces: list[Piece]) -> list[Any]:
    """Pieces without ids, neighbours joined."""
    return [
        (p.name, json.loads(p.arguments)) if isinstance(p, ToolCall) else p for p in merged(pieces)
    ]


def heard(*parts: str, thinking: bool = False, stop: tuple[str, ...] = (), **more: Any) -> Any:
    """What is told of a text that comes in these parts."""
    parser = OutputParser(**{"thinking": thinking, "tools": [TOOL], "stop": stop, **more})
    pieces = [piece for part in parts for piece in parser.push(part)] + parser.finish()
    assert all(isinstance(p, ToolCall) or p.text for p in pieces), "an empty piece"
    assert parser.finish() == []
    return plain(pieces)


def written(name: str, **parameters: str) -> str:
    """A call in Qwen's form."""
    values = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in parameters.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def called(**parameters: str) -> Any:
    """The arguments that come of parameters in Qwen's form."""
    ((_, arguments),) = heard(written("weather", **parameters))
    return arguments


# -- thoughts ---------------------------------------------------------------------------------


def test_thoughts_then_the_answer() -> None:
    assert heard("Hm\n</think>\n\n\nYes\n", thinking=True) == [Reasoning("Hm\n"), Text("Yes\n")]


def test_thoughts_that_do_not_end() -> None:
    assert heard("Hm </thi", thinking=True) == [Reasoning("Hm </thi")]


@pytest.mark.parametrize("thinking", [True, False])
def test_thoughts_that_the_model_opens_itself(*, thinking: bool) -> None:
    text = "\n <think>Hm</think>\nYes"
    assert heard(text, thinking=thinking) == [Reasoning("Hm"), Text("Yes")]


def test_marks_that_stand_elsewhere_are_text() -> None:
    text = "a <think>b</think>\nc"
    assert heard(text) == [Text(text)]
    assert heard(f"x</think>{text}", thinking=True) == [Reasoning("x"), Text(text)]


def test_a_call_among_thoughts_is_a_thought() -> None:
    assert heard(QWEN, thinking=True) == [Reasoning(QWEN)]


def test_white_space_at_the_start_is_kept_where_no_thoughts_begin() -> None:
    assert heard("\n\nYes") == [Text("\n\nYes")]
    assert heard("\n<thi") == [Text("\n<thi")]
    assert heard(" ", thinking=True) == [Reasoning(" ")]


def test_text_is_told_as_soon_as_it_is_certain() -> None:
    parser = OutputParser(thinking=True, tools=[TOOL], stop=["END"])
    assert parser.push("Hm") == [Reasoning("Hm")]
    assert parser.push(" </th") == [Reasoning(" ")]
    assert parser.push("at </think>\n") == [Reasoning("</that ")]
    assert parser.push("\n") == []
    assert parser.push("Yes <tool") == [Text("Yes ")]
    assert parser.push(" E") == [Text("<tool ")]
    assert parser.push("NE") == [Text("EN")]
    assert parser.push("ND more") == []
    assert (parser.finish(), parser.stop_string) == ([], "END")


# -- calls ------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [QWEN, HERMES])
def test_calls_in_both_forms(form: str) -> None:
    assert heard(f"So:\n{form}\n{form}!") == [Text("So:\n"), CALLED, Text("\n"), CALLED, Text("!")]


def test_ids_are_random() -> None:
    parser = OutputParser(thinking=False, tools=[TOOL])
    one, other = (p for p in parser.push(QWEN + QWEN) if isinstance(p, ToolCall))
    assert one.id.startswith("call_")
    assert one.id != other.id


def test_values_have_the_types_of_the_schema() -> None:
    values = {"city": "12", "days": "3", "note": "null", "exact": "true", "unit": "1"}
    wanted = {"city": "12", "days": 3, "note": None, "exact": True, "unit": "1"}
    assert called(**values) == wanted


def test_values_of_no_known_type_are_json_where_they_are_some() -> None:
    values = {"a": '{"x": [1]}', "b": "NaN", "c": "plain", "d": '{"x": 1, "x"}', "e": ""}
    assert called(**values) == {**values, "a": {"x": [1]}}
    assert called(days="many", exact="no") == {"days": "many", "exact": "no"}


def test_values_keep_their_own_lines() -> None:
    assert called(city="\n two\nlines \n") == {"city": "\n two\nlines \n"}


def test_a_value_may_hold_markers() -> None:
    value = "</parameter>\n<tool_call> x </tool_call> </function>.\n<b></b>"
    assert called(city=value) == {"city": value}
    arguments = json.dumps({"city": "a </tool_call> b"})
    text = f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>'
    assert heard(text) == [("weather", {"city": "a </tool_call> b"})]


def test_a_call_without_arguments_and_of_a_tool_unheard_of() -> None:
    assert heard(written("other")) == [("other", {})]
    assert heard('<tool_call>{"name": "f"}</tool_call>') == [("f", {})]
    nested = '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert heard(nested) == [("f", {"a": 1})]


@pytest.mark.parametrize(
    "inner",
    [
        "",
        "nonsense",
        "{}",
        "[1]",
        '{"name": 5, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {"a": 1e999}}',
        '{"name": "f", "arguments": {"a": "\\ud800"}}',
        '{"name": "f", "arguments": {}, "more": 1}',
        '{"name": "f", "arguments": ' + "[" * 9_000,
        "<function=f></function> more",
        "<function=></function>",
        "<function=f>words</function>",
        "<function=f><parameter=a>1</function>",
        "<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>",
        "<function=f>",
    ],
)
def test_what_is_no_call_stays_text(inner: str) -> None:
    text = f"a <tool_call>{inner}</tool_call>\n"
    assert heard(text) == [Text(text)]
    assert heard(f"{text}{QWEN}") == [Text(text), CALLED]


@pytest.mark.parametrize("end", range(len("<tool_call>"), len(QWEN)))
def test_half_a_call_stays_text(end: int) -> None:
    assert heard(QWEN[:end]) == [Text(QWEN[:end])]


def test_a_call_that_never_closes_does_not_swallow_the_next() -> None:
    assert heard("<tool_call>\n<function=f>" + QWEN) == [Text("<tool_call>\n<function=f>"), CALLED]


def test_closing_markers_are_looked_for_so_often() -> None:
    text = "<tool_call><function=f>" + "</tool_call>" * MAX_CLOSES + "</function></tool_call>"
    assert heard(text) == [Text(text)]


def test_calls_are_text_where_none_are_read() -> None:
    assert heard(QWEN, parse_tools=False) == [Text(QWEN)]
    assert heard(QWEN, tools=[]) == [Text(QWEN)]


def test_raw_text_has_nothing_but_stop_strings() -> None:
    text = f" <think>a</think>\n{QWEN}"
    assert heard(text, raw=True) == [Text(text)]
    assert heard(text, raw=True, thinking=True, stop=("</th",)) == [Text(" <think>a")]


# -- stop strings -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "stop", "left", "met"),
    [
        ("one two three", ("two",), "one ", "two"),
        ("abc", ("abc", "b"), "a", "b"),
        ("xaab", ("ab", "aab"), "x", "aab"),
        ("aaab", ("aab",), "a", "aab"),
        ("one tw", ("two",), "one tw", None),
        ("é\N{GRINNING FACE}é", ("\N{GRINNING FACE}",), "é", "\N{GRINNING FACE}"),
    ],
)
def test_text_ends_before_the_first_stop_string(
    text: str, stop: tuple[str, ...], left: str, met: str | None
) -> None:
    for parts in ([text], list(text)):
        parser = OutputParser(thinking=False, stop=stop)
        pieces = [piece for part in parts for piece in parser.push(part)] + parser.finish()
        assert plain(pieces) == [Text(left)]
        assert parser.stop_string == met
        assert met is None or parser.push("more") == []


def test_a_stop_string_counts_among_thoughts_and_in_calls() -> None:
    assert heard("Hm. So</think>Yes", thinking=True, stop=("So",)) == [Reasoning("Hm. ")]
    assert heard(QWEN, stop=("</function>",)) == [Text(QWEN.partition("</function>")[0])]
    assert heard("a\n</think>b", thinking=True, stop=("</think>",)) == [Reasoning("a\n")]


# -- however it is cut up ---------------------------------------------------------------------

FRAGMENTS = st.sampled_from(
    [
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "<function=weather>", "\n", " "),
        *("</function>", "<parameter=city>", "</parameter>", QWEN, HERMES, "STOP", "ST", "OP"),
        *('{"name": "f"}', '{"name": "f", "arguments": {"a": "', '"}}', "<", "</", "tool_call>"),
    ]
)
TEXTS = st.lists(FRAGMENTS | st.text(max_size=4), max_size=14).map("".join)
STOPS = st.lists(st.sampled_from(["STOP", "TO", "\n\n", "</tool_call>", "<"]), max_size=2)


@given(text=TEXTS, cuts=st.lists(st.integers(0, 300)), stop=STOPS, thinking=st.booleans())
@example(text="</think>" + QWEN, cuts=[3, 12], stop=["STOP"], thinking=True)
def test_pieces_are_the_same_however_the_text_is_cut_up(
    text: str, cuts: list[int], stop: list[str], *, thinking: bool
) -> None:
    whole = heard(text, thinking=thinking, stop=tuple(stop))
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [text[a:b] for a, b in pairwise(edges)]
    assert heard(*parts, thinking=thinking, stop=tuple(stop)) == whole
    assert heard(*text, thinking=thinking, stop=tuple(stop)) == whole


@given(text=TEXTS)
def test_nothing_is_lost_where_nothing_is_told_apart(text: str) -> None:
    (found,) = heard("x" + text, tools=[])
    assert found == Text("x" + text)


@given(before=st.text(), after=st.text(), values=st.lists(st.text(), max_size=3))
def test_a_call_comes_back_as_it_was_written(before: str, after: str, values: list[str]) -> None:
    arguments = {f"k{index}": value for index, value in enumerate(values)}
    call = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=False)
    pieces = heard(f"x{before}", "<tool_call>", call, "</tool_call>", after)
    assert ("f", arguments) in pieces
    assert "".join(p.text for p in pieces if isinstance(p, Text)) == f"x{before}{after}"
