"""HTTP as no library would send it: bytes into a socket, and what comes back."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.server.world import Server


@dataclass(frozen=True)
class Answer:
    """One answer, taken apart; header names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body's value."""
        return json.loads(self.body)


@contextmanager
def connected(server: Server, *, timeout: float = 30) -> Iterator[socket.socket]:
    """A connection of its own."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=timeout) as found:
        yield found


def talk(server: Server, data: bytes, *, timeout: float = 30) -> bytes:
    """Send bytes, and return all that comes until the server hangs up."""
    with connected(server, timeout=timeout) as line:
        line.sendall(data)
        return b"".join(iter(lambda: line.recv(65536), b""))


def receive(line: socket.socket) -> Answer:
    """Wait for one whole answer on a connection that stays open."""
    data = b""
    while True:
        more = line.recv(65536)
        data += more
        if not more or (b"\r\n\r\n" in data and _whole(answers(data)[-1])):
            return answers(data)[0]


def _whole(answer: Answer) -> bool:
    return len(answer.body) == int(answer.headers.get("content-length", 0))


def request(
    path: str,
    body: Any = b"",
    *headers: str,
    method: str = "POST",
    version: str = "1.1",
    length: int | None = None,
    keep: bool = False,
) -> bytes:
    """The bytes of a request; ``length``: what it says of its body, None: the truth."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/{version}", "Host: 127.0.0.1", *headers]
    lines += [] if keep else ["Connection: close"]
    lines += [f"Content-Length: {len(data) if length is None else length}"]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + data


def answers(data: bytes) -> list[Answer]:
    """Take answers with stated lengths apart, one after another."""
    found = []
    while data:
        head, _, rest = data.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines)
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        status = int(first.split()[1])
        size = int(headers.get("content-length", 0 if status == 100 else len(rest)))
        found.append(Answer(status, headers, rest[:size]))
        data = rest[size:]
    return found


def ask(server: Server, path: str, body: Any = b"", *headers: str, **options: Any) -> Answer:
    """Send one request on a connection of its own."""
    (answer,) = answers(talk(server, request(path, body, *headers, **options)))
    return answer
