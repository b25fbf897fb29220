"""The request log: what a line says, what it never says, and what it survives."""

from __future__ import annotations

import errno
import json
import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ninfer_pool.errors import ConfigError
from ninfer_pool.server.chat_request import Control
from ninfer_pool.server.request_log import Arrival, RequestLog, common_tokens, console_line
from ninfer_pool.server.request_matching import Known, RequestMatcher, Tags
from ninfer_pool.sim.converters import convert
from tests.server.made_reports import report, unheard

CHAT = "/v1/chat/completions"


def arrive(log: RequestLog, tokens: Sequence[int], **options: Any) -> Arrival:
    chosen = {"endpoint": CHAT, "arrived": 1000.0, **options}
    return log.arrive(1, tokens, **chosen)


def serve(
    log: RequestLog, tokens: Sequence[int], output: Sequence[int] = (), **options: Any
) -> None:
    """Log a request from arrival to end; return its id."""
    arrival = arrive(log, tokens, **options)
    log.finish(arrival, report(), output=output)


def lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a log that are requests, in order of arrival."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted((each for each in records if "id" in each), key=lambda each: each["id"])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "requests.jsonl"


# --- the console ----------------------------------------------------------------------------------


def test_the_console_line_is_as_it_is_promised() -> None:
    line = console_line(report(12))
    begin = "[req 12] done prompt=100 cache=60 reuse=restore_turn_checkpoint ttft=12.3ms reason=hit"
    assert line == f"{begin} out=20 finish=stop total=1500.0ms"
    assert re.fullmatch(r"\[req \d+\] done( \w+=\S+)+", line)


def test_a_request_without_a_token_has_no_time_of_the_first() -> None:
    assert " ttft=- reason=no_entry out=0 finish=cancelled " in console_line(unheard())


# --- what a line says -----------------------------------------------------------------------------


def test_a_line_says_what_the_prompt_shares_and_what_happened(path: Path) -> None:
    log = RequestLog(path)
    serve(log, range(50), [7, 8, 9])
    arrival = arrive(log, [*range(50), 7, 8, 1, 2], endpoint="/v1/messages", arrived=1009.5)
    log.finish(arrival, report(2), output=[3], boundaries=[(20, "system"), (54, "turn")])
    first, second = lines(path)
    assert (first["parent"], first["shared"], first["input"], first["output"]) == (None, 0, 50, 3)
    assert (second["parent"], second["shared"]) == (0, 52)
    assert (second["input"], second["output"], second["t"]) == (54, 1, 1009.5)
    assert second["boundaries"] == [[20, "system"], [54, "turn"]]
    assert (first["kind"], second["kind"]) == ("chat", "messages")
    assert (second["cached"], second["reuse"]) == (60, "restore_turn_checkpoint")
    assert (second["ttft_ms"], second["queue_ms"], second["total_ms"]) == (12.3, 2.0, 1500.0)
    assert (second["reason"], second["finish"], second["exact"]) == ("hit", "stop", True)


def test_tokens_may_be_an_array(path: Path) -> None:
    log = RequestLog(path)
    serve(log, np.arange(9, dtype=np.int32))  # type: ignore[arg-type]
    assert arrive(log, range(20)).shared == 9


def test_the_header_names_the_run(path: Path) -> None:
    RequestLog(path).close()
    RequestLog(path).close()
    first, second = map(json.loads, path.read_text().splitlines())
    assert first["format"] == second["format"] == "ninfer-pool-server-log"
    assert first["version"] == 1
    assert first["run"] != second["run"]


def test_lines_come_in_order_of_ending_and_ids_in_order_of_arrival(path: Path) -> None:
    log = RequestLog(path)
    one, two = arrive(log, range(9)), arrive(log, range(5))
    log.finish(two, report(2), output=[])
    log.finish(one, report(1), output=[])
    written = [json.loads(line).get("id") for line in path.read_text().splitlines()]
    assert written == [None, 1, 0]
    assert [line["parent"] for line in lines(path)] == [None, 0]


def test_a_prompt_that_came_too_early_is_told_of_what_was_generated(path: Path) -> None:
    log = RequestLog(path)
    one = arrive(log, range(9))
    two = arrive(log, [*range(9), 50, 51, 52])
    three = arrive(log, [*range(9), 60])
    log.finish(one, report(1), output=[50, 51, 99])
    log.finish(two, report(2), output=[])
    log.finish(three, report(3), output=[])
    assert [(line["parent"], line["shared"]) for line in lines(path)[1:]] == [(0, 11), (1, 9)]


def test_what_two_requests_generated_alike_is_shared_through_the_first(path: Path) -> None:
    log = RequestLog(path)
    serve(log, range(9), [50, 51])
    serve(log, range(9), [50, 51, 52])
    serve(log, [*range(9), 50, 51])
    serve(log, [*range(9), 50, 51, 52, 53])
    serve(log, [*range(9), 99])
    told = [(line["parent"], line["shared"]) for line in lines(path)[1:]]
    assert told == [(0, 9), (0, 11), (1, 12), (3, 9)]


def test_time_never_goes_back_in_the_order_of_arrival(path: Path) -> None:
    log = RequestLog(path)
    serve(log, [1], arrived=2000.0)
    serve(log, [2], arrived=1500.0)
    assert [line["t"] for line in lines(path)] == [2000.0, 2000.0]


# --- who ------------------------------------------------------------------------------------------


def test_sessions_and_tenants_are_numbers(path: Path) -> None:
    log = RequestLog(path)
    for salt, hint in (("x", "mine"), ("x", "mine"), ("y", "mine"), (None, "mine"), (None, None)):
        serve(log, [hash((salt, hint)) % 1000], salt=salt, hint=hint)
    told = [(line["tenant"], line["session"]) for line in lines(path)]
    assert told[0] == told[1]
    assert [tenant for tenant, _ in told] == ["t1", "t1", "t2", None, None]
    assert len({session for _, session in told}) == 4


def test_without_a_hint_a_prompt_has_the_session_that_it_goes_on_from(path: Path) -> None:
    log = RequestLog(path)
    serve(log, range(9), [20, 21])
    serve(log, [*range(9), 20, 21, 22])
    serve(log, [*range(5), 99])
    serve(log, [*range(9), 20, 21, 22], salt="other")
    sessions = [line["session"] for line in lines(path)]
    assert sessions[0] == sessions[1]
    assert len(set(sessions)) == 3


def test_no_secret_is_written(path: Path) -> None:
    log = RequestLog(path)
    control = Control(salt="the-salt", hint="the-hint")
    arrival = arrive(log, [314159, 271828], salt=control.salt, hint=control.hint)
    log.finish(arrival, report(control=control, stop_string="the-stop"), output=[161803])
    text = path.read_text()
    for secret in ("the-salt", "the-hint", "the-stop", "a-key-of-the-pool"):
        assert secret not in text
    for token in ("314159", "271828", "161803"):
        assert token not in text


def test_a_name_is_the_same_while_it_is_remembered() -> None:
    tags = Tags("s", most=2)
    assert [tags.of(name) for name in ("a", "b", "a", "c", "a", "b")] == [
        "s1",
        "s2",
        "s1",
        "s3",
        "s1",
        "s4",
    ]
    assert tags.of("\ud800") == "s5"


# --- bounded memory -------------------------------------------------------------------------------


def test_the_oldest_is_dropped_and_the_line_says_so(path: Path) -> None:
    log = RequestLog(path, most_tokens=200)
    serve(log, range(90))
    for start in range(1000, 1400, 100):
        serve(log, range(start, start + 60))
    serve(log, range(90))
    assert lines(path)[-1]["parent"] is None
    assert lines(path)[-1]["forgotten"] > 0
    assert lines(path)[0]["forgotten"] == 0


def test_what_is_used_is_remembered() -> None:
    known, matcher = Known(9, "s1", None), RequestMatcher(most_tokens=200)
    data = np.arange(40, dtype=np.int32).tobytes()
    for number in range(100):
        shared, parent = matcher.match(data)
        assert (shared, parent) == ((40, number - 2 + 1) if number else (0, None))
        matcher.add(data, number, known)
        matcher.add(np.full(1, 100 + number, dtype=np.int32).tobytes() * 30, 1000, known)
        held = matcher._young.tree.units + matcher._old.tree.units
        assert held <= 200


def test_a_sequence_longer_than_what_is_remembered_is_remembered_in_part() -> None:
    matcher = RequestMatcher(most_tokens=100)
    data = np.arange(300, dtype=np.int32).tobytes()
    matcher.add(data, 0, Known(300, "s1", None))
    assert matcher.match(data) == (50, 0)
    assert matcher.dropped == 250


def test_requests_are_bounded_however_few_tokens_they_bring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ninfer_pool.server.request_matching.MOST_KNOWN", 10)
    matcher = RequestMatcher(most_tokens=10**6)
    for number in range(100):
        matcher.add(b"abcd", number, Known(1, "s1", None))
        assert matcher.known(number).session == "s1"
        assert len(matcher._young.known) + len(matcher._old.known) <= 20


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [([], [1], 0), ([1, 2, 3], [1, 2], 2), ([1, 2], [1, 3], 1), ([5], [4], 0)],
)
def test_common_tokens(one: list[int], other: list[int], common: int) -> None:
    left, right = (np.array(each, dtype=np.int32).tobytes() for each in (one, other))
    assert common_tokens(left, right) == common


# --- the file -------------------------------------------------------------------------------------


@pytest.mark.skipif(os.name == "nt", reason="permissions are POSIX'")
def test_only_its_owner_can_read_the_file(path: Path) -> None:
    old = os.umask(0)
    try:
        RequestLog(path).close()
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"request log: .*absent.*cannot be opened"):
        RequestLog(tmp_path / "absent" / "log.jsonl")


def test_a_line_that_broke_off_is_ended_before_the_next_run(path: Path) -> None:
    log = RequestLog(path)
    serve(log, range(9))
    log.close()
    with path.open("ab") as file:
        file.write(b'{"run":"x","id":1,"requ')
    serve(RequestLog(path), range(9))
    assert len(convert("server-log", path).requests) == 2


class FullDisk:
    """`os.write` that has room for so many bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.room = room
        self._write = os.write
        monkeypatch.setattr(os, "write", self)

    def __call__(self, file: int, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = self._write(file, data[: self.room])
        self.room -= done
        return done


@pytest.mark.parametrize("room", [0, 1, 40, 130, 200, 600, 700])
def test_a_full_disk_fails_no_request(
    room: int, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        disk = FullDisk(patch, room)
        log = RequestLog(path)
        for start in range(5):
            serve(log, range(start, start + 9))
        lost = log.lost
        disk.room = 10**6
        serve(log, range(40, 50))
    assert lost == 5 - (room > 550)
    assert log.lost == lost
    complaints = capsys.readouterr().err.splitlines()
    assert len(complaints) == 1
    assert "No space left on device" in complaints[0]
    assert str(path) in complaints[0]
    trace = convert("server-log", path)
    assert len(trace.requests) == 6 - lost


def test_after_closing_lines_are_lost_and_nothing_else(path: Path) -> None:
    log = RequestLog(path)
    arrival = arrive(log, range(9))
    log.close()
    log.close()
    log.finish(arrival, report(), output=[])
    assert log.lost == 1
    assert not lines(path)


def test_threads_write_whole_lines(path: Path) -> None:
    log = RequestLog(path)

    def work(begin: int) -> None:
        for number in range(40):
            serve(log, [*range(begin, begin + 20), number], [1, 2])

    threads = [threading.Thread(target=work, args=(100 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [line["id"] for line in lines(path)] == list(range(160))
    assert len(convert("server-log", path).requests) == 160
