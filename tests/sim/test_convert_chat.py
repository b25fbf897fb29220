"""Logs of chat requests become traces: positions, boundaries, parents, answers, media."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ninfer_pool.errors import TraceError
from ninfer_pool.sim.converters import convert
from ninfer_pool.sim.trace import TraceRequest

SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "How high is it?"}
ANSWER = {"role": "assistant", "content": "Two metres."}
MORE = {"role": "user", "content": "And how wide?"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}

SYSTEM_TEXT = "<|im_start|>system\nBe brief.<|im_end|>\n"
ASK_TEXT = SYSTEM_TEXT + "<|im_start|>user\nHow high is it?<|im_end|>\n<|im_start|>assistant\n"
REPLY_TEXT = "Two metres.<|im_end|>"
MORE_TEXT = (
    f"{ASK_TEXT}{REPLY_TEXT}\n<|im_start|>user\nAnd how wide?<|im_end|>\n<|im_start|>assistant\n"
)


def log(folder: Path, *records: dict[str, Any]) -> Path:
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def chat(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), **more}


def converted(folder: Path, *records: dict[str, Any]) -> tuple[TraceRequest, ...]:
    return convert("openai-jsonl", log(folder, *records)).requests


def test_positions_are_utf8_bytes_of_the_prompt_in_chatml(tmp_path: Path) -> None:
    first, accented = converted(
        tmp_path, chat(SYSTEM, ASK), chat({"role": "user", "content": "né"})
    )
    assert first.input == len(ASK_TEXT)
    assert first.boundaries == ((len(SYSTEM_TEXT), "system"), (len(ASK_TEXT), "turn"))
    expected = "<|im_start|>user\nné<|im_end|>\n<|im_start|>assistant\n"
    assert accented.input == len(expected.encode())
    assert accented.boundaries == ((accented.input, "turn"),)
    header = convert("openai-jsonl", tmp_path / "log.jsonl").header
    assert "positions are UTF-8 bytes" in str(header["notes"])


def test_a_logged_answer_is_shared_when_it_comes_back(tmp_path: Path) -> None:
    for response in (
        "Two metres.",
        ANSWER,
        {"choices": [{"message": ANSWER}], "usage": {"completion_tokens": 4}},
        {"status_code": 200, "body": {"choices": [{"message": ANSWER}]}},
    ):
        first, second = converted(
            tmp_path, chat(SYSTEM, ASK, response=response), chat(SYSTEM, ASK, ANSWER, MORE)
        )
        assert first.output == len(REPLY_TEXT)
        assert (second.parent, second.shared) == (0, len(ASK_TEXT + REPLY_TEXT))
        assert second.input == len(MORE_TEXT)
        assert [position for position, kind in second.boundaries if kind == "turn"] == [
            len(ASK_TEXT),
            len(MORE_TEXT),
        ]
        assert second.session == first.session


def test_an_unlogged_answer_is_read_from_the_next_prompt(tmp_path: Path) -> None:
    first, second, third = converted(
        tmp_path,
        chat(SYSTEM, ASK, usage={"completion_tokens": 4}),
        chat(SYSTEM, ASK, ANSWER, MORE, max_tokens=77),
        chat(SYSTEM, ASK, {**ANSWER, "content": "Two miles."}, MORE),
    )
    assert (first.output, second.output, third.output) == (len(REPLY_TEXT), 77, 0)
    assert (second.parent, second.shared) == (0, len(ASK_TEXT + REPLY_TEXT))
    # A second answer to the same question parts inside the first one's text.
    assert (third.parent, third.shared) == (1, len(ASK_TEXT + "Two m"))


def test_an_answer_that_held_hidden_reasoning_is_not_taken_for_its_text(tmp_path: Path) -> None:
    usage = {"completion_tokens": 400, "completion_tokens_details": {"reasoning_tokens": 390}}
    for response in (None, {"choices": [{"message": ANSWER}]}):
        first, second = converted(
            tmp_path,
            chat(SYSTEM, ASK, usage=usage, response=response),
            chat(SYSTEM, ASK, ANSWER, MORE),
        )
        assert first.output == 400
        assert (second.parent, second.shared) == (0, len(ASK_TEXT))


def test_shown_reasoning_that_is_not_sent_back_parts_at_the_turn_point(tmp_path: Path) -> None:
    thought = {**ANSWER, "reasoning_content": "Hm."}
    first, second = converted(
        tmp_path, chat(SYSTEM, ASK, response=thought), chat(SYSTEM, ASK, ANSWER, MORE)
    )
    assert first.output == len("<think>\nHm.\n</think>\n\n" + REPLY_TEXT)
    assert (second.parent, second.shared) == (0, len(ASK_TEXT))


def test_tools_come_first_inside_the_system_part(tmp_path: Path) -> None:
    plain, tools, only_tools, later = converted(
        tmp_path,
        chat(SYSTEM, ASK),
        chat(SYSTEM, ASK, tools=[TOOL]),
        chat(ASK, tools=[TOOL]),
        chat(SYSTEM, MORE, tools=[TOOL]),
    )
    opening = f"<|im_start|>system\n# Tools\n\n<tools>\n{json.dumps(TOOL)}\n</tools>\n\n"
    assert tools.input - plain.input == len(opening) - len("<|im_start|>system\n")
    assert tools.boundaries[0] == (len(opening + "Be brief.<|im_end|>\n"), "system")
    assert only_tools.boundaries[0] == (len(opening + "<|im_end|>\n"), "system")
    assert later.shared >= tools.boundaries[0][0]
    assert later.parent == 1


def test_tool_calls_come_back_as_they_were_generated(tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "seen"}
    first, second = converted(
        tmp_path,
        chat(ASK, response={"choices": [{"message": said}]}),
        chat(ASK, said, result),
    )
    text = '\n<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call><|im_end|>'
    assert first.output == len(text)
    assert second.shared == first.total


def test_legacy_function_calls_are_rendered_too(tmp_path: Path) -> None:
    said = {"role": "assistant", "function_call": {"name": "look", "arguments": "{}"}}
    first, second = converted(
        tmp_path, chat(ASK, response=said | {"content": None}), chat(ASK, said)
    )
    assert second.shared == first.total


def test_images_become_media_with_a_digest_of_what_they_hold(tmp_path: Path) -> None:
    def look(url: Any) -> dict[str, Any]:
        text = {"type": "text", "text": "Look: "}
        return {"role": "user", "content": [text, {"type": "image_url", "image_url": url}]}

    one, same, other = converted(
        tmp_path,
        chat(look({"url": "data:image/png;base64,AAAA"})),
        chat(look("data:image/png;base64,AAAA"), ANSWER, ASK),
        chat(look({"url": "data:image/png;base64,BBBB"})),
    )
    begin = len("<|im_start|>user\nLook: ")
    ((first, end, digest),) = one.media
    assert (first, end) == (begin, begin + 256)
    assert digest.startswith("sha256:")
    assert same.media == one.media
    assert same.shared > end
    assert other.media[0][:2] == one.media[0][:2]
    assert other.media[0][2] != digest
    assert other.shared == begin


def test_the_log_says_when_and_who(tmp_path: Path) -> None:
    for first, second, apart in (
        ({"t": 3}, {"t": 4.5}, 1.5),
        ({"timestamp": 1_700_000_000}, {"timestamp": 1_700_000_002}, 2.0),
        ({"timestamp": 1_700_000_000_000}, {"timestamp": 1_700_000_000_250}, 0.25),
        ({"created": "2026-01-01T00:00:00Z"}, {"created": "2026-01-01T00:01:00+00:00"}, 60.0),
        ({}, {}, 1.0),
    ):
        requests = converted(tmp_path, chat(ASK, **first), chat(MORE, **second))
        assert [request.t for request in requests] == [0.0, apart]
    for name in ("session_id", "user", "prompt_cache_key"):
        first_user, second_user = converted(
            tmp_path, chat(ASK, **{name: "ann"}), chat(ASK, **{name: 7})
        )
        assert (first_user.session, second_user.session) == ("ann", "7")


def test_a_request_may_be_wrapped(tmp_path: Path) -> None:
    wrapped = {"custom_id": "r1", "body": chat(SYSTEM, ASK, user="ann", max_tokens=5), "t": 1}
    (request,) = converted(tmp_path, wrapped)
    assert (request.input, request.session, request.output) == (len(ASK_TEXT), "ann", 5)


@pytest.mark.parametrize(
    ("field", "record"),
    [
        ("messages", {}),
        ("messages", chat()),
        ("messages", {"messages": "hi"}),
        (r"messages\[0\]", {"messages": ["hi"]}),
        (r"messages\[0\]\.role", chat({"content": "hi"})),
        (r"messages\[0\]\.role", chat({"role": 5})),
        (r"messages\[0\]\.content", chat({"role": "user", "content": 5})),
        (r"messages\[0\]\.content\[0\]", chat({"role": "user", "content": [5]})),
        (r"messages\[0\]\.content\[0\]\.text", chat({"role": "user", "content": [{"text": 5}]})),
        (r"messages\[0\]\.content\[0\]\.text", chat({"role": "user", "content": [{}]})),
        (r"messages\[0\]\.tool_calls", chat({"role": "assistant", "tool_calls": 5})),
        (r"messages\[0\]\.tool_calls\[0\]", chat({"role": "assistant", "tool_calls": [5]})),
        ("tools", chat(ASK, tools=5)),
        ("body", {"body": 5}),
        ("user", chat(ASK, user=[1])),
        ("usage", chat(ASK, usage=5)),
        (r"usage\.completion_tokens", chat(ASK, usage={"completion_tokens": -1})),
        ("max_tokens", chat(ASK, max_tokens="many")),
        ("response", chat(ASK, response=5)),
        (r"response\.choices", chat(ASK, response={"choices": 5})),
        ("kind", chat(ASK, kind=5)),
        ("t", chat(ASK, t=float("nan"))),
        ("created", chat(ASK, created="yesterday")),
    ],
)
def test_a_malformed_line_is_named(field: str, record: dict[str, Any], tmp_path: Path) -> None:
    path = log(tmp_path, record)
    with pytest.raises(TraceError, match=rf"log\.jsonl, line 1, field {field}: "):
        convert("openai-jsonl", path)


@pytest.mark.parametrize(
    ("first", "second"),
    [({"t": 2}, {"t": 1}), ({"t": 1}, {}), ({}, {"t": 1}), ({"t": 1}, {"created": 2})],
)
def test_times_go_on_and_are_given_on_all_lines_or_none(
    first: dict[str, Any], second: dict[str, Any], tmp_path: Path
) -> None:
    path = log(tmp_path, chat(ASK, **first), chat(ASK, **second))
    with pytest.raises(TraceError, match=r"line 2, field (t|created): "):
        convert("openai-jsonl", path)


# --- by a tokenizer -------------------------------------------------------------------------------


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A stand-in for the package: one token for each run without a space."""

    class Tokenizer:
        @staticmethod
        def from_file(path: str) -> Tokenizer:
            if Path(path).read_text() != "{}":
                raise Exception("no tokenizer")  # as the package does
            return Tokenizer()

        def encode(self, text: str, *, add_special_tokens: bool) -> SimpleNamespace:
            assert not add_special_tokens
            return SimpleNamespace(ids=[sum(word.encode()) for word in text.split()])

    module = ModuleType("tokenizers")
    vars(module)["Tokenizer"] = Tokenizer
    monkeypatch.setitem(sys.modules, "tokenizers", module)
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    return path


def test_positions_are_tokens_where_a_tokenizer_is_given(words: Path, tmp_path: Path) -> None:
    path = log(tmp_path, chat(SYSTEM, ASK), chat(SYSTEM, ASK, ANSWER, MORE))
    trace = convert("openai-jsonl", path, tokenizer=words)
    first, second = trace.requests
    # <|im_start|>system / Be / brief.<|im_end|> | <|im_start|>user / How / high / is / it?… | turn
    assert (first.input, first.boundaries) == (9, ((3, "system"), (9, "turn")))
    assert (first.output, second.shared) == (2, 11)
    assert "positions are tokens of tokenizer.json (sha256:" in str(trace.header["notes"])


def test_media_of_two_images_differ_in_tokens_too(words: Path, tmp_path: Path) -> None:
    def look(data: str) -> dict[str, Any]:
        return chat({"role": "user", "content": [{"type": "image", "source": {"data": data}}]})

    path = log(tmp_path, look("a"), look("b"), look("b"))
    one, two, three = convert("openai-jsonl", path, tokenizer=words).requests
    assert one.media[0][:2] == (1, 257)
    assert (two.shared, three.shared) == (1, three.input)


def test_without_the_package_the_error_is_the_command_to_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(TraceError, match="pip install tokenizers"):
        convert("openai-jsonl", log(tmp_path, chat(ASK)), tokenizer=tmp_path / "tokenizer.json")


def test_a_file_that_is_no_tokenizer_is_refused(words: Path, tmp_path: Path) -> None:
    path = log(tmp_path, chat(ASK))
    with pytest.raises(TraceError, match="not a tokenizer"):
        convert("openai-jsonl", path, tokenizer=path)
    with pytest.raises(TraceError, match="no such file"):
        convert("openai-jsonl", path, tokenizer=tmp_path / "absent.json")
