"""HTTP that no good client speaks: each is answered as it should be, at no cost to others."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from tests.server.raw import answers, ask, connected, request, talk
from tests.server.refusals import (
    BODIES,
    CHAT,
    MESSAGES,
    MOST_BYTES,
    body_of,
    error_of,
    sturdy,
    unharmed,
)
from tests.server.world import MODEL, Server, chat_body


@pytest.fixture(scope="module")
def world() -> Iterator[Server]:
    with sturdy() as server:
        yield server


@pytest.fixture
def server(world: Server) -> Iterator[Server]:
    with unharmed(world) as found:
        yield found


# -- what is not there ----------------------------------------------------------------------


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", ["gpt-5", "", "NINFER-TINY", f"{MODEL} ", f"{MODEL}/../x", "ⓝ"])
def test_an_unknown_model(server: Server, path: str, name: str) -> None:
    error = error_of(ask(server, path, body_of(path, model=name)), path, status=404)
    if path.startswith(MESSAGES):
        assert error["type"] == "not_found_error"
    else:
        assert (error["code"], error["param"]) == ("model_not_found", "model")


def test_a_second_name_is_told_back(server: Server) -> None:
    assert server.chat("Hi.", model="another")["model"] == "another"
    names = [each["id"] for each in server.get("/v1/models")["data"]]
    assert names == [MODEL, "another"]
    for name in (*names, "none", "a/b", "%2e%2e"):
        status = 200 if name in names else 404
        assert server.http.get(f"/v1/models/{name}").status_code == status


@pytest.mark.parametrize(
    ("method", "path", "status", "allowed"),
    [
        ("GET", CHAT, 405, "POST"),
        ("DELETE", MESSAGES, 405, "POST"),
        ("PUT", "/pool", 405, "GET, HEAD"),
        ("POST", "/pool/entries", 405, "DELETE"),
        ("PATCH", f"/pool/entries/{'0' * 32}", 405, "DELETE, GET, HEAD"),
        ("GET", f"/pool/entries/{'0' * 32}/pin", 405, "DELETE, POST"),
        ("OPTIONS", CHAT, 405, "POST"),
        ("POST", "/v1/embeddings", 404, None),
        ("POST", "/v1/messages/batches", 404, None),
        ("GET", "/v1", 404, None),
        ("POST", "/v1/chat/completions%00", 404, None),
        ("GET", f"/pool/entries/{'0' * 32}", 404, None),
        ("DELETE", "/pool/entries/%ff", 404, None),
        ("POST", "/pool/entries/x/pin", 404, None),
        ("DELETE", "/pool/entries/x/pin", 404, None),
    ],
)
def test_wrong_methods_and_paths(
    server: Server, method: str, path: str, status: int, allowed: str | None
) -> None:
    answer = ask(server, path, method=method)
    error_of(answer, path, status=status)
    assert answer.headers.get("allow") == allowed


@pytest.mark.parametrize("up", ["..", "%2e%2e", "..%2f..", "%252e%252e", ".%00.", "..\\.."])
def test_no_path_leads_out_of_the_page_s_folder(server: Server, up: str) -> None:
    for path in (f"/{up}/app.py", f"/page/{up}/app.py", f"/page.js/{up}/app.py", f"/{up}"):
        answer = ask(server, path, method="GET")
        error_of(answer, path, status=404)


def test_nothing_that_a_client_says_becomes_a_header(server: Server) -> None:
    for path in ("/v1/models/a%0d%0aSet-Cookie:%20a=b", "/%0d%0aX-Mine:%201/", "/pool/entries/%0a"):
        answer = ask(server, path, b"", "Origin: http://127.0.0.1", method="GET")
        assert set(answer.headers) <= {
            *("date", "server", "content-length", "content-type", "connection", "location")
        }, path
        if "location" in answer.headers:
            assert answer.headers["location"].startswith("http://127.0.0.1/")


# -- clients that stop half-way -------------------------------------------------------------


def reset(line: socket.socket) -> None:
    """Hang up as a machine that has crashed."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    line.close()


@pytest.mark.parametrize("cut", [0, 1, 30, 120, 190])
def test_a_client_that_leaves_before_its_request_is_whole(server: Server, cut: int) -> None:
    data = request(CHAT, chat_body("Hi."))
    for leave in (socket.socket.close, reset):
        with connected(server) as line:
            line.sendall(data[:cut])
            leave(line)


def test_requests_that_never_get_whole_hold_nobody_up(server: Server) -> None:
    data = request(CHAT, chat_body("Hi."))
    lines = [connected(server) for _ in range(20)]
    for at, each in enumerate(lines):
        each.__enter__().sendall(data[: 5 + 8 * at])
    begun = time.monotonic()
    server.chat("Hello.", max_tokens=2)
    assert time.monotonic() - begun < 10
    for each in lines:
        each.__exit__(None, None, None)


def test_a_reader_that_does_not_read_holds_nobody_up(server: Server) -> None:
    body = chat_body("Tell me all.", stream=True, max_tokens=600, temperature=1.5, seed=3)
    with connected(server) as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.sendall(request(CHAT, body))
        for number in range(5):
            server.chat(f"Hello {number}.")
        server.idle()  # the request has ended, though its answer was not read
        told = b"".join(iter(lambda: line.recv(65536), b""))
    assert b"data: [DONE]" in told


# -- HTTP as it is seldom spoken ------------------------------------------------------------


def test_http_1_0(server: Server) -> None:
    data = json.dumps(chat_body("Hi.")).encode()
    head = f"POST {CHAT} HTTP/1.0\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    (answer,) = answers(talk(server, head + data))
    assert (answer.status, answer.headers["connection"]) == (200, "close")
    stream = json.dumps(chat_body("Hi.", stream=True)).encode()
    head = f"POST {CHAT} HTTP/1.0\r\nContent-Length: {len(stream)}\r\n\r\n".encode()
    (answer,) = answers(talk(server, head + stream))
    assert "transfer-encoding" not in answer.headers  # which that version does not know
    assert answer.body.rstrip().endswith(b"data: [DONE]")


def test_requests_sent_ahead_are_answered_in_order(server: Server) -> None:
    asks = [
        request("/health", method="GET", keep=True),
        request(CHAT, chat_body("Hi."), keep=True),
        request(MESSAGES, b"{", keep=True),
        request("/nowhere", method="GET"),
    ]
    found = answers(talk(server, b"".join(asks)))
    assert [each.status for each in found] == [200, 200, 400, 404]
    assert "choices" in found[1].json


def test_what_follows_a_refused_body_on_a_connection_is_no_request(server: Server) -> None:
    inner = request("/pool/entries", method="DELETE")
    key = server.chat("Stay.")["pool"]["key"]
    smuggled = request(CHAT, inner + b" " * (MOST_BYTES + 1), keep=True)
    with connected(server) as line:
        line.sendall(smuggled)
        assert line.recv(65536).startswith(b"HTTP/1.1 413 ")
    assert server.get(f"/pool/entries/{key}")["entry"]["key"] == key


def test_head_is_get_without_a_body(server: Server) -> None:
    for path in ("/health", "/", "/pool", "/metrics", "/v1/models", f"/v1/models/{MODEL}"):
        told = talk(server, request(path, method="HEAD"))
        head, _, body = told.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), path
        assert body == b""


def test_a_client_that_waits_to_be_told_to_go_on(server: Server) -> None:
    data = request(CHAT, chat_body("Hi."), "Expect: 100-continue")
    head, _, body = data.partition(b"\r\n\r\n")
    with connected(server) as line:
        line.sendall(head + b"\r\n\r\n")
        assert line.recv(65536).startswith(b"HTTP/1.1 100 ")
        line.sendall(body)
        assert line.recv(65536).startswith(b"HTTP/1.1 200 ")
    large = request(CHAT, b"", "Expect: 100-continue", length=MOST_BYTES + 1)
    assert talk(server, large).startswith(b"HTTP/1.1 413 ")  # it is spared the sending


@pytest.mark.parametrize("accept", ["", "*/*", ";;;", "text/plain;q=x", "a/b", "é", "x" * 5000])
def test_whatever_a_client_accepts(server: Server, accept: str) -> None:
    for path in ("/metrics", "/pool", "/"):
        answer = ask(server, path, b"", f"Accept: {accept}", method="GET")
        assert answer.status == 200
    for kind in ("text/html", "application/xml", "multipart/form-data"):
        data = request(CHAT, chat_body("Hi."), f"Accept: {accept}", f"Content-Type: {kind}")
        assert answers(talk(server, data))[0].status == 200


def test_headers_that_are_no_text(server: Server) -> None:
    headers = [f"X-{name}: \xff\xfe\x80" for name in ("Session-Id", "Prompt-Cache-Key", "Any")]
    assert ask(server, CHAT, chat_body("Hi."), *headers).status == 200
    for name in ("Priority", "TTL-Seconds", "Retain-Prefix", "Reasoning-Effort"):
        answer = ask(server, CHAT, chat_body("Hi."), f"X-{name}: \xff")
        error_of(answer, CHAT, status=400)
    for line in (b"X: a\0b", b"X : a", b": a", b"X", b"\xff: a", b"X: a\rb"):
        data = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n" + line + b"\r\n\r\n"
        assert talk(server, data).startswith(b"HTTP/1.1 400 "), line


def test_what_is_no_http(server: Server) -> None:
    for data in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ):
        with connected(server) as line:
            line.sendall(data + b"\r\n\r\n")
            line.shutdown(socket.SHUT_WR)
            told = line.recv(65536)
        assert told == b"" or told.startswith(b"HTTP/1.1 4")
