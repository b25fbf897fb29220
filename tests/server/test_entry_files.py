"""One entry as a file: downloaded, kept, and uploaded to where its weights are."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ninfer_pool.server import files
from tests.server.talks import Talk, prose, system, watched
from tests.server.tiered import on_disk
from tests.server.world import Server, cached, serve


@pytest.fixture(autouse=True)
def travelling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder where files lie while they travel; empty again at the end."""
    folder = tmp_path_factory.mktemp("travelling")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        yield folder
    until = time.monotonic() + 30
    while list(folder.iterdir()):
        assert time.monotonic() < until, list(folder.rglob("*"))
        time.sleep(0.01)


@pytest.fixture(scope="module")
def _sender() -> Iterator[Server]:
    with serve(lanes=2) as server:
        yield server


@pytest.fixture(scope="module")
def _receiver() -> Iterator[Server]:
    with serve(lanes=2) as server:
        yield server


@pytest.fixture
def sender(_sender: Server) -> Server:
    """A server that has a conversation, empty."""
    _sender.runner.pool.clear()
    return _sender


@pytest.fixture
def receiver(_receiver: Server) -> Server:
    """Another one, empty, of the same model."""
    _receiver.runner.pool.clear()
    return _receiver


def held(server: Server, **fields: Any) -> tuple[Talk, str]:
    """A conversation of two turns, and its key."""
    talk = Talk(server, [system(prose(1, 120))], fields)
    talk.turn("What is told of it?")
    return talk, talk.turn("And then?")["pool"]["key"]


def file_of(server: Server, key: str, query: str = "", **headers: str) -> bytes:
    answer = server.http.get(f"/pool/entries/{key}/file{query}", headers=headers)
    assert answer.status_code == 200, answer.text
    assert f"{key}.safetensors" in answer.headers["content-disposition"]
    return answer.content


def payload_of(data: bytes) -> bytes:
    """What follows the header, which also says when the file was made."""
    return data[8 + int.from_bytes(data[:8], "little") :]


def send(server: Server, data: bytes, **headers: str) -> Any:
    return server.http.post("/pool/entries/file", content=data, headers=headers)


def refusal(answer: Any, status: int, *words: str) -> None:
    assert answer.status_code == status, answer.text
    message = answer.json()["error"]["message"]
    for word in words:
        assert word in message
    assert "/" not in message.replace("GET /pool/entries/{key}/file", ""), "no path of the server's"


def test_a_conversation_moves_to_another_server(sender: Server, receiver: Server) -> None:
    talk, key = held(sender)
    before = sender.get(f"/pool/entries/{key}")["entry"]
    data = file_of(sender, key)
    told = send(receiver, data)
    assert told.status_code == 200, told.text
    points = [
        {"position": each["position"], "kind": each["kind"]}
        for each in before["checkpoints"]
        if not each["superseded"]
    ]
    assert (told.json()["key"], told.json()["tokens"]) == (key, before["tokens"])
    assert [each for each in points if each not in told.json()["checkpoints"]] == []
    moved = Talk(receiver, list(talk.messages))
    with watched(sender) as here, watched(receiver) as there:
        stayed, went = talk.turn("And at last?"), moved.turn("And at last?")
        assert cached(went) == cached(stayed) > 0
        assert there.bits(went) == here.bits(stayed)
    sender.idle()
    receiver.idle()


def test_a_file_changes_nothing_where_it_came_from(sender: Server) -> None:
    _, key = held(sender)
    sender.idle()
    pool = sender.runner.pool
    before = pool.entries(), pool.stats()
    data = file_of(sender, key)
    assert (pool.entries(), pool.stats()) == before
    assert send(sender, data).json()["key"] == key
    assert [info.key for info in pool.entries()] == [before[0][0].key]


def test_a_file_without_tokens_can_be_kept_and_not_loaded(sender: Server, receiver: Server) -> None:
    _, key = held(sender)
    whole, without = file_of(sender, key), file_of(sender, key, "?tokens=false")
    assert len(without) < len(whole)
    again = file_of(sender, key, "?tokens=true")
    assert payload_of(again) == payload_of(whole) != payload_of(without)
    refusal(send(receiver, without), 400, "tokens")
    answer = sender.http.get(f"/pool/entries/{key}/file?tokens=no")
    refusal(answer, 400, "tokens: 'no'; needs true or false")


def test_a_tenants_entry_moves_under_its_salt_alone(sender: Server, receiver: Server) -> None:
    talk, key = held(sender, cache_salt="mine")
    mine = {"x-cache-salt": "mine"}
    for headers in ({}, {"x-cache-salt": "other"}):
        answer = sender.http.get(f"/pool/entries/{key}/file", headers=headers)
        refusal(answer, 404, "no entry has the key")
    data = file_of(sender, key, **mine)
    for headers in ({}, {"x-cache-salt": "other"}):
        refusal(send(receiver, data, **headers), 403, "cache_salt: not that of the file")
    assert receiver.runner.pool.entries() == []
    assert send(receiver, data, **mine).status_code == 200
    moved = Talk(receiver, list(talk.messages), {"cache_salt": "mine"})
    assert cached(moved.turn("And at last?")) > 0
    other = Talk(receiver, list(talk.messages))
    assert cached(other.turn("And at last?")) == 0
    _, open_key = held(sender)
    refusal(send(receiver, file_of(sender, open_key), **mine), 403, "send none")


def test_what_is_no_file_of_an_entry_is_refused(sender: Server, receiver: Server) -> None:
    _, key = held(sender)
    data = file_of(sender, key)
    flipped = bytearray(data)
    flipped[-100] ^= 1
    refusal(send(receiver, b""), 400, "file: empty")
    for bad in (b"{}", b"\xff" * 100, data[:-1], data + b"\0", data[: len(data) // 2], flipped):
        refusal(send(receiver, bytes(bad)), 400, "file: ")
    receiver.idle()
    assert receiver.runner.pool.entries() == []
    assert send(receiver, data).status_code == 200


def test_a_file_of_another_model_is_refused(sender: Server) -> None:
    _, key = held(sender)
    data = file_of(sender, key)
    with serve(lanes=2, kv_dtype="bf16") as other:
        refusal(send(other, data), 400, "file: ")
        assert other.runner.pool.entries() == []


def test_what_is_too_large_is_refused_before_it_is_there(
    receiver: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert files.most_bytes(receiver.service) > receiver.get("/pool")["bytes"]["total"]
    monkeypatch.setattr(files, "most_bytes", lambda _: 1000)
    refusal(send(receiver, b"x" * 1001), 413, "more than 1000 bytes")
    chunks = (b"x" * 600 for _ in range(2))
    answer = receiver.http.post("/pool/entries/file", content=chunks)
    refusal(answer, 413, "more than 1000 bytes")


def test_a_client_that_leaves_leaves_nothing(sender: Server, receiver: Server) -> None:
    _, key = held(sender)
    data = file_of(sender, key)
    host, port = receiver.url.removeprefix("http://").split(":")
    head = (
        f"POST /pool/entries/file HTTP/1.1\r\nHost: {host}\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + data[: len(data) // 2])
    host, port = sender.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"GET /pool/entries/{key}/file HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert connection.recv(10)
    receiver.idle()
    assert receiver.runner.pool.entries() == []


def test_no_room_for_the_file(
    sender: Server, receiver: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, key = held(sender)
    data = file_of(sender, key)
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "mkdtemp", lambda **_: (_ for _ in ()).throw(OSError(28, "full")))
        refusal(sender.http.get(f"/pool/entries/{key}/file"), 507, "full")
        refusal(send(receiver, data), 507, "full")
    refusal(sender.http.get("/pool/entries/none/file"), 404, "no entry has the key")
    refusal(sender.http.get("/pool/entries/file"), 404, "no entry has the key")


def test_where_nothing_is_kept_nothing_is_loaded(sender: Server) -> None:
    _, key = held(sender)
    data = file_of(sender, key)
    with serve({"retain": False, "read": False}) as server:
        refusal(send(server, data), 409, "--no-prefix-reuse")


def test_the_key_is_asked_for() -> None:
    with serve({"api_key": "secret"}) as server:
        assert send(server, b"x").status_code == 401
        assert server.http.get("/pool/entries/x/file").status_code == 401


def test_an_entry_that_lies_on_disk_alone_is_a_file_as_well(
    receiver: Server, tmp_path: Path
) -> None:
    options = {"lanes": 2, **on_disk(tmp_path / "store")}
    with serve(**options) as server:
        talk, key = held(server)
    with serve(**options) as server:
        assert server.get(f"/pool/entries/{key}")["entry"]["tier"] == "disk"
        data = file_of(server, key)
        assert server.http.delete(f"/pool/entries/{key}").status_code == 200
        assert server.get("/pool")["entries"] == []
        assert send(server, data).json()["key"] == key
        talk.server = server
        assert cached(talk.turn("And at last?")) > 0
    assert send(receiver, data).json()["key"] == key
