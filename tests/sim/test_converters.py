"""Public traces become traces: who continues whom, by how much, and what is refused."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer_pool.errors import TraceError
from ninfer_pool.sim.convert.blocks import BlockTrie
from ninfer_pool.sim.convert.radix import RadixTree
from ninfer_pool.sim.converters import SOURCES, convert
from ninfer_pool.sim.trace import TraceRequest, read_trace, write_trace
from tests.sim.made_traces import DATA

KVCT = DATA / "kvct_trace_0291.json.gz"
Shape = tuple[int | None, int]


def lines(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def mooncake(length: int, blocks: list[int], *, at: float = 0, output: int = 9) -> dict[str, Any]:
    return {
        "timestamp": at,
        "input_length": length,
        "output_length": output,
        "hash_ids": blocks,
    }


def session(*requests: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "id": "one",
        "block_size": 64,
        "hash_id_scope": "local",
        "tool_tokens": 60,
        "system_tokens": 40,
        "requests": list(requests),
        **changes,
    }


def step(length: int, blocks: list[int], **changes: Any) -> dict[str, Any]:
    record = {
        "t": 0.0,
        "type": "s",
        "model": "m",
        "in": length,
        "out": 50,
        "hash_ids": blocks,
        "output_types": ["text", "thinking", "tool_use"],
        "stop": "tool_use",
    }
    return {**record, **changes}


def shapes(requests: tuple[TraceRequest, ...]) -> list[Shape]:
    return [(request.parent, request.shared) for request in requests]


def of_session(folder: Path, *requests: dict[str, Any], **changes: Any) -> list[Shape]:
    path = folder / "one.json"
    path.write_text(json.dumps(session(*requests, **changes)))
    return shapes(convert("kv-cache-tester", path).requests)


# --- any source -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "path"), [("mooncake", DATA / "mooncake_excerpt.jsonl"), ("kv-cache-tester", KVCT)]
)
def test_a_converted_file_is_a_valid_trace(source: Any, path: Path, tmp_path: Path) -> None:
    trace = convert(source, path)
    write_trace(tmp_path / f"{trace.name}.jsonl", trace)
    assert read_trace(tmp_path / f"{trace.name}.jsonl") == trace
    assert source in str(trace.header["notes"])


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("content", [b"", b"\x80\x00", b"{", b"[]\n", b"{}\n", b'{"a":1,'])
def test_what_is_no_such_file_is_refused(source: Any, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"bad\.json") as caught:
        convert(source, path)
    assert "\n" not in str(caught.value)
    with pytest.raises(TraceError, match="cannot be read"):
        convert(source, tmp_path / "absent.json")


def test_an_unknown_source_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="must be one of mooncake, kv-cache-tester, openai-jsonl"):
        convert("other", tmp_path)  # type: ignore[arg-type]


# --- mooncake -------------------------------------------------------------------------------------


def test_mooncake_shares_common_blocks_with_the_most_recent(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "m.jsonl",
        mooncake(1300, [1, 2, 3]),
        mooncake(1100, [1, 2, 4], at=500),
        mooncake(2000, [1, 2, 5, 6], at=1500),
        mooncake(1024, [7, 2], at=1500),
    )
    trace = convert("mooncake", path)
    assert shapes(trace.requests) == [(None, 0), (0, 1024), (1, 1024), (None, 0)]
    assert [request.t for request in trace.requests] == [0.0, 0.5, 1.5, 1.5]
    assert [request.session for request in trace.requests] == ["s0", "s0", "s0", "s3"]
    assert [request.output for request in trace.requests] == [9, 9, 9, 9]


def test_mooncake_last_block_counts_as_far_as_both_reach(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "m.jsonl",
        mooncake(700, [1, 2]),
        mooncake(700, [1, 2]),
        mooncake(1000, [1, 2]),
        mooncake(600, [1, 2]),
    )
    assert shapes(convert("mooncake", path).requests) == [(None, 0), (0, 700), (1, 700), (2, 600)]


def test_mooncake_lines_out_of_order_are_sorted(tmp_path: Path) -> None:
    path = lines(tmp_path / "m.jsonl", mooncake(600, [1, 2], at=9), mooncake(600, [1, 3], at=3))
    assert [request.t for request in convert("mooncake", path).requests] == [0.003, 0.009]


def test_mooncake_agrees_with_a_search_over_all_pairs() -> None:
    path = DATA / "mooncake_excerpt.jsonl"
    rows = [json.loads(text) for text in path.read_text().splitlines()]
    trace = convert("mooncake", path)
    for request, row in zip(trace.requests, rows, strict=True):
        depths = [_common(row["hash_ids"], other["hash_ids"]) for other in rows[: request.id]]
        deepest = max(depths, default=0)
        if not deepest:
            assert request.parent is None
            continue
        parent = max(id for id, depth in enumerate(depths) if depth == deepest)
        reach = min(deepest * 512, row["input_length"], rows[parent]["input_length"])
        assert (request.parent, request.shared) == (parent, reach)


def _common(left: list[int], right: list[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("timestamp", {"timestamp": -1}),
        ("timestamp", {"timestamp": None}),
        ("input_length", {"input_length": 0}),
        ("input_length", {"input_length": True}),
        ("output_length", {"output_length": 1.5}),
        ("hash_ids", {"hash_ids": [1, 2, 3]}),
        ("hash_ids", {"hash_ids": [1, "2"]}),
        ("hash_ids", {"hash_ids": 3}),
    ],
)
def test_mooncake_malformed_line_is_named(
    field: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    path = lines(tmp_path / "m.jsonl", mooncake(600, [1, 2]), {**mooncake(600, [1, 2]), **changes})
    with pytest.raises(TraceError, match=f"line 2, field {field}: "):
        convert("mooncake", path)


# --- kv-cache-tester ------------------------------------------------------------------------------


def test_a_tool_loop_goes_on_from_the_answer(tmp_path: Path) -> None:
    found = of_session(tmp_path, step(200, [1, 2, 3]), step(300, [1, 2, 3, 4], t=5.0))
    assert found == [(None, 0), (0, 250)]


def test_reasoning_is_stripped_after_the_end_of_a_turn(tmp_path: Path) -> None:
    ended = step(200, [1, 2, 3], stop="end_turn")
    assert of_session(tmp_path, ended, step(300, [1, 2, 3, 4]))[1] == (0, 200)
    plain = {**ended, "output_types": ["text"]}
    assert of_session(tmp_path, plain, step(300, [1, 2, 3, 4]))[1] == (0, 250)


def test_an_answer_too_long_for_the_next_prompt_is_not_kept(tmp_path: Path) -> None:
    first = step(200, [1, 2, 3], out=100)
    assert of_session(tmp_path, first, step(300, [1, 2, 3, 4]))[1] == (0, 200)
    assert of_session(tmp_path, first, step(301, [1, 2, 3, 4]))[1] == (0, 300)


def test_only_one_prompt_goes_on_with_an_answer(tmp_path: Path) -> None:
    found = of_session(
        tmp_path, step(200, [1, 2, 3]), step(300, [1, 2, 3, 4]), step(300, [1, 2, 3, 5])
    )
    assert found == [(None, 0), (0, 250), (0, 200)]


def test_other_blocks_part_where_they_do(tmp_path: Path) -> None:
    found = of_session(
        tmp_path, step(200, [1, 2, 3]), step(400, [1, 2, 7, 8]), step(200, [1, 2, 3])
    )
    assert found == [(None, 0), (0, 128), (0, 200)]


def test_unknown_blocks_make_no_continuation(tmp_path: Path) -> None:
    assert of_session(tmp_path, step(200, [1, 2]), step(400, [1, 2, 3]))[1] == (0, 128)


def test_sub_agents_are_conversations_of_their_own(tmp_path: Path) -> None:
    inner = [step(200, [11, 12, 13]), step(300, [11, 12, 13, 14], t=1.0)]
    agent = {
        "t": 4.0,
        "type": "subagent",
        "agent_id": "a1",
        "requests": inner,
        "tool_tokens": 50,
        "system_tokens": 20,
    }
    path = tmp_path / "one.json"
    last = step(300, [1, 2, 3, 4], t=4.5)
    path.write_text(json.dumps(session(step(200, [1, 2, 3]), agent, last)))
    requests = convert("kv-cache-tester", path).requests
    assert [(r.t, r.session, r.kind, r.parent, r.shared) for r in requests] == [
        (0.0, "one", "main", None, 0),
        (4.0, "one/a1", "subagent", None, 0),
        (4.5, "one", "main", 0, 250),
        (5.0, "one/a1", "subagent", 1, 250),
    ]
    assert [r.boundaries for r in requests[:2]] == [((100, "system"),), ((70, "system"),)]


def test_a_folder_is_one_trace_by_time(tmp_path: Path) -> None:
    folder = tmp_path / "two"
    folder.mkdir()
    first = session(step(200, [1, 2, 3]), step(300, [1, 2, 3, 4], t=9.0))
    second = session(step(210, [1, 2, 3], t=3.0), step(999, [], t=4.0, model="other"), id="two")
    (folder / "a.json").write_text(json.dumps(first))
    (folder / "b.json.gz").write_bytes(gzip.compress(json.dumps(second).encode()))
    (folder / "README.md").write_text("no session")
    trace = convert("kv-cache-tester", folder)
    assert trace.name == "two"
    # Ids are local to a file: b shares only its system prompt, same model and same lengths.
    assert [(r.session, r.parent, r.shared) for r in trace.requests] == [
        ("one", None, 0),
        ("two", 0, 100),
        ("two", None, 0),
        ("one", 0, 250),
    ]
    for name in ("a.json", "b.json.gz"):
        content = {**(first if name == "a.json" else second), "hash_id_scope": "global"}
        text = json.dumps(content).encode()
        (folder / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    assert shapes(convert("kv-cache-tester", folder).requests)[1] == (0, 200)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="holds no session"):
        convert("kv-cache-tester", tmp_path)


def test_a_real_session_reuses_as_much_as_its_blocks_say(tmp_path: Path) -> None:
    shutil.copy(KVCT, tmp_path)
    trace = convert("kv-cache-tester", tmp_path / KVCT.name)
    assert (trace.name, len(trace.requests), trace.input_tokens) == (
        "kvct_trace_0291",
        32,
        2_254_119,
    )
    assert sum(request.kind == "subagent" for request in trace.requests) == 12
    shared = sum(request.shared for request in trace.requests)
    assert 0.90 < shared / trace.input_tokens < 0.91


@pytest.mark.parametrize(
    ("field", "content"),
    [
        ("requests", {"id": "one"}),
        ("requests", session()),
        ("block_size", session(step(9, []), block_size=0)),
        ("id", session(step(9, []), id=5)),
        (r"requests\[0\]", session(**{"requests": [5]})),
        (r"requests\[0\]\.in", session({"t": 0.0})),
        (r"requests\[0\]\.in", session(step(0, []))),
        (r"requests\[0\]\.t", session(step(9, [], t=float("nan")))),
        (r"requests\[0\]\.out", session(step(9, [], out=-1))),
        (r"requests\[0\]\.hash_ids", session(step(64, [1, 2]))),
        (r"requests\[0\]\.requests", session({"type": "subagent", "t": 0.0})),
        (
            r"requests\[0\]\.requests\[0\]\.in",
            session({"t": 0.0, "requests": [{"t": 0.0}]}),
        ),
    ],
)
def test_a_malformed_session_is_named(field: str, content: object, tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps(content))
    with pytest.raises(TraceError, match=rf"one\.json, field {field}: "):
        convert("kv-cache-tester", path)


# --- the two searches, against brute force --------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=12))
def test_block_trie_finds_the_deepest_and_the_newest(prompts: list[list[int]]) -> None:
    trie = BlockTrie()
    for id, prompt in enumerate(prompts):
        depths = [_common(prompt, other) for other in prompts[:id]]
        depth = max(depths, default=0)
        match = trie.match(prompt)
        assert match.depth == depth
        if depth:
            assert match.newest == max(n for n, found in enumerate(depths) if found == depth)
            ended = [n for n, p in enumerate(prompts[:id]) if p == prompt[:depth]]
            assert match.ended == max(ended, default=None)
        trie.add(prompt, id)


@given(
    st.sampled_from([1, 4]),
    st.lists(st.lists(st.sampled_from([0, 1, 256, 257]), max_size=9), max_size=12),
)
def test_radix_tree_finds_the_longest_and_the_newest(unit: int, sequences: list[list[int]]) -> None:
    tree = RadixTree(unit=unit)
    for id, sequence in enumerate(sequences):
        values = [[v % 256 if unit == 1 else v for v in s] for s in sequences[: id + 1]]
        data = b"".join(value.to_bytes(unit, "little") for value in values[-1])
        lengths = [_common(values[-1], other) for other in values[:-1]]
        longest = max(lengths, default=0)
        newest = max((n for n, length in enumerate(lengths) if length == longest), default=None)
        assert tree.match(data) == (longest, newest if longest else None)
        assert len(data) == len(sequence) * unit
        tree.add(data, id)
