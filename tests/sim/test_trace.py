"""Traces: what is written is read again, and every broken rule names file, line and field."""

from __future__ import annotations

import gzip
import importlib.resources
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from ninfer_pool.errors import TraceError
from ninfer_pool.sim.trace import (
    Trace,
    TraceRequest,
    check_trace,
    read_trace,
    trace_name,
    write_trace,
)
from tests.sim.made_traces import DATA, line, text, traces

HEADER = text()[:-1]


def refusal(path: Path, content: str | bytes) -> str:
    """The one-line message with which a file of that content is refused."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


@given(trace=traces())
def test_what_is_written_is_read_again(
    trace: Trace, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for suffix in (".jsonl", ".jsonl.gz"):
        path = tmp_path_factory.getbasetemp() / f"made{suffix}"
        write_trace(path, trace)
        assert read_trace(path) == trace
        once = path.read_bytes()
        write_trace(path, read_trace(path))
        assert path.read_bytes() == once


@pytest.mark.parametrize("name", ["claude_code_8_lanes", "claude_code_32_lanes"])
def test_a_public_trace_is_written_back_byte_for_byte(name: str, tmp_path: Path) -> None:
    path = DATA / f"{name}.jsonl.gz"
    trace = read_trace(path)
    assert trace.name == name
    write_trace(tmp_path / "copy.jsonl", trace)
    assert (tmp_path / "copy.jsonl").read_bytes() == gzip.decompress(path.read_bytes())


def test_the_shipped_trace_has_its_licence_beside_it() -> None:
    folder = importlib.resources.files("ninfer_pool.sim") / "traces"
    with importlib.resources.as_file(folder / "claude_code_side_requests.jsonl") as path:
        trace = read_trace(path)
    assert (len(trace.requests), trace.name) == (1109, "claude_code_side_requests")
    assert "Apache License" in (folder / "LICENSE-claude-code.txt").read_text(encoding="utf-8")


def test_all_fields_are_read(tmp_path: Path) -> None:
    first = line(
        t=1,
        boundaries=[[50, "system"], [100, "turn"], [100, "response"]],
        media=[[10, 20, "d1"], [20, 30, "d2"]],
        salt="tenant",
        retain=False,
    )
    path = tmp_path / "one.jsonl"
    path.write_text(text(first, line(id=1, parent=0, shared=110, input=120)))
    assert read_trace(path).requests == (
        TraceRequest(
            id=0,
            t=1.0,
            session="a",
            kind="main",
            parent=None,
            shared=0,
            input=100,
            output=10,
            boundaries=((50, "system"), (100, "turn"), (100, "response")),
            salt="tenant",
            retain=False,
            media=((10, 20, "d1"), (20, 30, "d2")),
        ),
        TraceRequest(
            id=1, t=1.0, session="a", kind="main", parent=0, shared=110, input=120, output=10
        ),
    )
    assert read_trace(str(path)).input_tokens == 220


@pytest.mark.parametrize(
    ("field", "changes", "wanted"),
    [
        ("id", {"id": 1}, "0 (ids count"),
        ("id", {"id": False}, "0 (ids count"),
        ("id", {"id": 0.0}, "0 (ids count"),
        ("t", {"t": float("nan")}, "a finite number"),
        ("t", {"t": float("inf")}, "a finite number"),
        ("t", {"t": -1}, "a finite number"),
        ("t", {"t": True}, "a finite number"),
        ("t", {"t": "1"}, "a finite number"),
        ("t", {"t": 10**400}, "a finite number"),
        ("session", {"session": None}, "a string"),
        ("kind", {"kind": 1}, "a string"),
        ("parent", {"parent": 0}, "null on the first request"),
        ("parent", {"parent": -1}, "null on the first request"),
        ("shared", {"shared": 1}, "0 where parent is null"),
        ("shared", {"shared": -1}, "a whole number, 0 or more"),
        ("shared", {"shared": False}, "a whole number, 0 or more"),
        ("input", {"input": 0}, "a whole number, 1 or more"),
        ("input", {"input": 100.0}, "a whole number, 1 or more"),
        ("input", {"input": True}, "a whole number, 1 or more"),
        ("output", {"output": -1}, "a whole number, 0 or more"),
        ("output", {"output": None}, "a whole number, 0 or more"),
        ("boundaries", {"boundaries": {}}, "a list"),
        ("boundaries", {"boundaries": [5]}, "[position, kind]"),
        ("boundaries", {"boundaries": [[5]]}, "[position, kind]"),
        ("boundaries", {"boundaries": [[0, "system"]]}, "a whole number, 1 or more"),
        ("boundaries", {"boundaries": [[True, "system"]]}, "a whole number, 1 or more"),
        ("boundaries", {"boundaries": [[101, "system"]]}, "at most 100, the input"),
        ("boundaries", {"boundaries": [[9, "system"], [8, "turn"]]}, "9 or more"),
        ("boundaries", {"boundaries": [[9, "sytem"]]}, "one of system, turn"),
        ("boundaries", {"boundaries": [[9, ["turn"]]]}, "one of system, turn"),
        ("boundaries", {"boundaries": [[9, "frontier"]]}, "one of system, turn"),
        ("boundaries", {"boundaries": [[9, "turn"]], "media": [[8, 10, "d"]]}, "outside every"),
        ("salt", {"salt": 1}, "a string"),
        ("salt", {"salt": ""}, "1 to 128 characters"),
        ("salt", {"salt": "a" * 129}, "1 to 128 characters"),
        ("salt", {"salt": "\ud800"}, "valid Unicode"),
        ("retain", {"retain": 1}, "true or false"),
        ("retain", {"retain": None}, "true or false"),
        ("media", {"media": "x"}, "a list"),
        ("media", {"media": [[0, 5]]}, "[begin, end, digest]"),
        ("media", {"media": [[5, 5, "d"]]}, "begin < end <= 100"),
        ("media", {"media": [[5, 4, "d"]]}, "begin < end <= 100"),
        ("media", {"media": [[90, 101, "d"]]}, "begin < end <= 100"),
        ("media", {"media": [[-1, 5, "d"]]}, "a whole number, 0 or more"),
        ("media", {"media": [[0, 5, "d"], [4, 6, "d"]]}, "begin at 5 or later"),
        ("media", {"media": [[0, 5, ""]]}, "a digest"),
        ("media", {"media": [[0, 5, None]]}, "a digest"),
    ],
)
def test_a_broken_field_is_named(
    field: str, changes: dict[str, Any], wanted: str, tmp_path: Path
) -> None:
    message = refusal(tmp_path / "bad.jsonl", text(line(**changes)))
    assert f", line 2, field {field}: " in message
    assert "must be " in message
    assert wanted in message


@pytest.mark.parametrize(
    ("field", "changes", "wanted"),
    [
        ("id", {"id": 0}, "1 (ids count"),
        ("id", {"id": 2}, "1 (ids count"),
        ("t", {"t": 0.5}, "1.0 or later"),
        ("parent", {"parent": 1}, "the id of an earlier request, 0 to 0"),
        ("parent", {"parent": 7}, "the id of an earlier request, 0 to 0"),
        ("parent", {"parent": False}, "the id of an earlier request, 0 to 0"),
        ("shared", {"shared": 111, "input": 200}, "at most 110, the full sequence of parent 0"),
        ("shared", {"shared": 100, "input": 99}, "at most 99, the input"),
    ],
)
def test_a_broken_relation_is_named(
    field: str, changes: dict[str, Any], wanted: str, tmp_path: Path
) -> None:
    second = line(**{"id": 1, "parent": 0, **changes})
    message = refusal(tmp_path / "bad.jsonl", text(line(), second))
    assert f", line 3, field {field}: " in message
    assert wanted in message


@pytest.mark.parametrize("name", list(line()))
def test_a_missing_field_is_named(name: str, tmp_path: Path) -> None:
    message = refusal(tmp_path / "bad.jsonl", text(line(**{name: ...})))
    assert f"line 2, field {name}: missing" in message


@pytest.mark.parametrize(
    ("field", "header"),
    [
        ("format", {"version": 1}),
        ("format", {"format": "other", "version": 1}),
        ("format", line()),
        ("version", {"format": "ninfer-pool-trace"}),
        ("version", {"format": "ninfer-pool-trace", "version": 2}),
        ("version", {"format": "ninfer-pool-trace", "version": True}),
        ("version", {"format": "ninfer-pool-trace", "version": "1"}),
        ("notes", {"format": "ninfer-pool-trace", "version": 1, "notes": 5}),
    ],
)
def test_a_header_that_is_not_one_is_named(
    field: str, header: dict[str, Any], tmp_path: Path
) -> None:
    message = refusal(tmp_path / "bad.jsonl", text(line(), header=header))
    assert f", line 1, field {field}: " in message


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b"", "line 1: the file is empty"),
        (b"\n \n", "line 1: the file is empty"),
        (HEADER.encode(), "at least one request"),
        (b"\x00\xff\xfe\x80" * 9, "line 1: not UTF-8 text"),
        (HEADER.encode() + b"\n{\xff}\n", "line 2: not UTF-8 text"),
        (b"\x00" * 40, "line 1: not valid JSON"),
        (b"\x89PNG\r\n\x1a\n", "line 1: not UTF-8 text"),
        (b"\x1f\x8b\x08\x00garbage", "damaged gzip data"),
        (gzip.compress(HEADER.encode() * 99)[:-20], "damaged gzip data"),
        (text(line())[:-9], "line 2: not valid JSON"),
        (HEADER + "\n[1]\n", "line 2: not a JSON object"),
        (HEADER + "\n7\n", "line 2: not a JSON object"),
        (HEADER + "\n" + "[" * 100_000, "line 2: not valid JSON"),
        (f"{HEADER}\n\n{json.dumps(line())}\n", "line 2: blank"),
        (f"\n{HEADER}\n{json.dumps(line())}\n", "line 1: blank"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(
    content: str | bytes, wanted: str, tmp_path: Path
) -> None:
    assert wanted in refusal(tmp_path / "bad.jsonl", content)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.jsonl", tmp_path):
        with pytest.raises(TraceError, match="cannot be read"):
            read_trace(path)


@pytest.mark.parametrize(
    "content",
    [
        text(line()) + "\n  \n",
        text(line()).replace("\n", "\r\n"),
        text(line())[:-1],
        "\ufeff" + text(line()),
        text(line(comment="kept by its producer")),
        text(line(session="a\u2028b")).replace("\\u2028", "\u2028"),
    ],
    ids=["blank end", "CRLF", "no last newline", "BOM", "unknown field", "line separator"],
)
def test_harmless_differences_are_read(content: str, tmp_path: Path) -> None:
    path = tmp_path / "good.jsonl"
    path.write_bytes(content.encode())
    assert read_trace(path).requests[0].input == 100


def test_the_same_placeholders_may_stand_for_another_image(tmp_path: Path) -> None:
    path = tmp_path / "media.jsonl"
    other = line(id=1, parent=0, shared=100, media=[[10, 20, "other"]], salt="other")
    path.write_text(text(line(media=[[10, 20, "one"]]), other))
    assert [r.media[0][2] for r in read_trace(path).requests] == ["one", "other"]


def test_nothing_is_half_written(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    path.write_text("what was there")
    first = TraceRequest(id=1, t=0.0, session="", kind="", parent=None, shared=0, input=1, output=0)
    bad = Trace(name="bad", requests=(first,))
    with pytest.raises(TraceError, match="line 2, field id"):
        write_trace(path, bad)
    with pytest.raises(TraceError, match="line 2, field id"):
        check_trace(bad)
    assert [p.name for p in tmp_path.iterdir()] == ["kept.jsonl"]
    assert path.read_text() == "what was there"


def test_a_target_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    good = read_trace(DATA / "claude_code_8_lanes.jsonl.gz")
    for path in (tmp_path / "absent" / "out.jsonl", file / "out.jsonl", tmp_path):
        with pytest.raises(TraceError, match="cannot be written"):
            write_trace(path, good)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("folder/eight.jsonl", "eight"),
        ("eight.jsonl.gz", "eight"),
        ("v1.eight.jsonl", "v1.eight"),
        ("eight", "eight"),
        ("eight.gz", "eight"),
        (".hidden", ".hidden"),
        ("bad\udcff.jsonl", "bad\ufffd"),
    ],
)
def test_a_trace_is_named_after_its_file(path: str, name: str) -> None:
    assert trace_name(Path(path)) == name
