"""Faults of our own: whoever waits is told at once, and the others go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from ninfer_pool.server.output_parser import OutputParser
from ninfer_pool.server.service import Service
from tests.server.raw import ask
from tests.server.world import Server, chat_body, serve

PATHS = {"/v1/chat/completions": 503, "/v1/completions": 503, "/v1/messages": 529}


@pytest.fixture
def server() -> Iterator[Server]:
    with serve(lanes=3) as found:
        yield found
        if found.service.engine.failure is None:
            found.chat("Still here?")
            found.idle()


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("broken on purpose")


def test_text_that_cannot_be_told_ends_its_request(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    for method in ("push", "finish"):
        with mock.patch.object(OutputParser, method, broken):
            whole = server.http.post("/v1/chat/completions", json=chat_body("Hi."))
            stream = server.http.post("/v1/chat/completions", json=chat_body("Hi.", stream=True))
            server.idle()
        assert whole.status_code == 500
        assert '"error"' in stream.text
        assert "purpose" not in whole.text + stream.text
        assert "finish=error" in server.lines[-1]
    assert "broken on purpose" in caplog.text


@pytest.mark.parametrize("what", ["metrics", "_print"])
def test_an_end_that_cannot_be_noted_is_told_all_the_same(
    server: Server, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    with mock.patch.object(server.service, what, mock.Mock(side_effect=broken, note=broken)):
        assert server.chat("Hi.")["usage"]
        server.idle()
    assert "broken on purpose" in caplog.text


@pytest.mark.parametrize("method", ["admit", "prefill", "decode", "finish"])
def test_a_step_that_fails_fails_its_request_alone(server: Server, method: str) -> None:
    with mock.patch.object(type(server.runner), method, broken):
        answer = server.http.post("/v1/chat/completions", json=chat_body("Hi."))
        stream = server.http.post("/v1/chat/completions", json=chat_body("Hi.", stream=True))
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert '"error"' in stream.text
    server.idle()
    assert server.runner.pool.running == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_loop_that_ends_leaves_nobody_waiting(server: Server) -> None:
    statuses: list[int] = []

    def wait() -> None:
        body = {"prompt": "a b c", "max_tokens": 3000, "temperature": 1.5, "seed": 3}
        statuses.append(server.http.post("/v1/completions", json=body).status_code)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 30
    while server.service.engine.running < 3:
        assert time.monotonic() < until
        time.sleep(0.005)
    with mock.patch.object(server.service.engine, "step", broken):
        for thread in threads:
            thread.join(timeout=30)
    assert statuses == [500, 500, 500]
    assert server.http.get("/health").status_code == 503
    for path, status in PATHS.items():
        fields = {"prompt": "Hi."} if path == "/v1/completions" else chat_body("Hi.")
        answer = server.http.post(path, json={"max_tokens": 1, **fields})
        assert answer.status_code == status
        assert "failed" in answer.text
    assert not server.service.live


def test_an_endpoint_that_fails_says_so_in_the_shape_of_its_client(server: Server) -> None:
    with mock.patch.object(Service, "prepare", broken):
        for path in PATHS:
            answer = ask(server, path, chat_body("Hi."))
            assert answer.status == 500
            assert answer.json["error"]["message"] == "a fault of the server's own"


def test_what_is_pinned_makes_room_for_nobody_and_waiting_would_not_help() -> None:
    with serve(kv_budget="1MiB", lanes=2) as server:
        for number in range(30):
            body = chat_body(f"{number} " + "word " * 60)
            answer = server.http.post("/v1/chat/completions", json=body)
            if answer.status_code != 200 or answer.json()["pool"]["key"] is None:
                break
            server.http.post(f"/pool/entries/{answer.json()['pool']['key']}/pin")
        large = chat_body("other " * 150)
        for path, status in PATHS.items():
            fields = {"prompt": "other " * 150} if path == "/v1/completions" else large
            for stream in (False, True):
                body = {"max_tokens": 1, **fields, "stream": stream}
                refused = server.http.post(path, json=body)
                assert refused.status_code == status
                assert "unpin" in refused.text
        for entry in server.get("/pool")["entries"]:
            server.http.delete(f"/pool/entries/{entry['key']}/pin")
        assert server.http.post("/v1/chat/completions", json=large).status_code == 200
        server.idle()
