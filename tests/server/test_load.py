"""Many clients at once, who come and go as they please, on a server with far too little room."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.server.raw import answers, ask, connected, request
from tests.server.talks import prose
from tests.server.world import MODEL, Server, serve

CLIENTS, LANES, TALKS = 8, 3, 9
SALTS = (None, None, "tenant one", "zweiter Mandant ü")
CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
REFUSALS = {CHAT: 503, COMPLETIONS: 503, MESSAGES: 529}


def body(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A request of some conversation at some turn, in some dialect."""
    path, talk, turns = rng.choice((CHAT, COMPLETIONS, MESSAGES)), rng.randrange(TALKS), 1
    while turns < 6 and rng.random() < 0.6:
        turns += 1
    fields: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": rng.choice((1, 4, 12, 30)),
        "temperature": 0,
        "stream": rng.random() < 0.6,
        "cache_salt": rng.choice(SALTS),
        "retain_prefix": rng.random() < 0.7,
        "priority": rng.choice((-1, 0, 0, 3)),
        "session_id": f"talk {talk}",
    }
    if rng.random() < 0.1:
        fields["ttl_seconds"] = 0.05
    texts = [prose(100 * talk + turn, 40) for turn in range(turns)]
    if path == COMPLETIONS:
        return path, {**fields, "prompt": "\n".join(texts)}
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
    if turns % 2 == 0:
        messages.append({"role": "user", "content": "Go on."})
    return path, {**fields, "messages": messages}


@dataclass
class Crowd:
    """Clients with seeds of their own, who together send a number of requests."""

    server: Server
    seed: int
    most: int
    told: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=count)

    def run(self) -> None:
        """Let all clients send what they have to, at the same time."""
        threads = [threading.Thread(target=self._client, args=(n,)) for n in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=600)
            assert not thread.is_alive(), "a request never ended"

    def _client(self, number: int) -> None:
        rng = random.Random(1000 * self.seed + number)
        leave = (self._leave_early, self._leave_in_mid_answer, self._leave_in_mid_question)
        acts = (*[self._listen] * 6, *leave, self._meddle)
        try:
            while next(self._numbers) < self.most:
                rng.choice(acts)(rng)
        except Exception as error:
            self.faults.append(f"client {number}: {error!r}")

    def _listen(self, rng: random.Random) -> None:
        path, asked = body(rng)
        with connected(self.server, timeout=120) as line:
            line.sendall(request(path, asked))
            told = b"".join(iter(lambda: line.recv(65536), b""))
        answer = answers(told)[0]
        if answer.status == REFUSALS[path]:
            self.told["refused"] += 1
            time.sleep(0.1)
            self._listen(rng)
        elif answer.status != 200:
            self.faults.append(f"{path}: {told[:500]!r}")
        elif asked["stream"]:
            end = b"message_stop" if path == MESSAGES else b"data: [DONE]"
            self.told["streams"] += 1
            if end not in told or b'"error"' in told:
                self.faults.append(f"{path}: {told[-500:]!r}")
        else:
            self.told["bodies"] += 1
            assert answer.json["usage"]

    def _leave_early(self, rng: random.Random) -> None:
        """Leave before there is a token, mostly while the request waits for a lane."""
        with connected(self.server) as line:
            line.sendall(request(*body(rng)))
            time.sleep(rng.choice((0, 0, 0.01, 0.05)))
            self._hang_up(line, rng)

    def _leave_in_mid_answer(self, rng: random.Random) -> None:
        path, asked = body(rng)
        with connected(self.server, timeout=120) as line:
            line.sendall(request(path, {**asked, "stream": True, "max_tokens": 60}))
            for _ in range(rng.randrange(1, 5)):
                line.recv(512)
            self._hang_up(line, rng)

    def _leave_in_mid_question(self, rng: random.Random) -> None:
        data = request(*body(rng))
        with connected(self.server) as line:
            line.sendall(data[: rng.randrange(len(data))])
            self._hang_up(line, rng)

    def _hang_up(self, line: socket.socket, rng: random.Random) -> None:
        if rng.random() < 0.5:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        line.close()
        self.told["left"] += 1

    def _meddle(self, rng: random.Random) -> None:
        """Look at the pool, and take, pin and unpin entries that requests resume from."""
        salt = rng.choice(SALTS)
        salted = [f"X-Cache-Salt: {salt.encode().decode('latin-1')}"] if salt is not None else []
        shown = ask(self.server, "/pool", b"", *salted, method="GET").json
        for entry in rng.sample(shown["entries"], min(3, len(shown["entries"]))):
            path = f"/pool/entries/{entry['key']}"
            acts = (("DELETE", path), ("GET", path), ("POST", f"{path}/pin"))
            for method, at in (rng.choice(acts), ("DELETE", f"{path}/pin")):
                status = ask(self.server, at, b"", *salted, method=method).status
                if status not in (200, 404, 409):
                    self.faults.append(f"{method} {at}: {status}")
        self.told["meddled"] += 1


def wanted_pages(server: Server) -> int:
    """Pages that everything the clients may ever send would take."""
    prompts = [prose(100 * talk + turn, 40) for talk in range(TALKS) for turn in range(6)]
    tokens = sum(len(server.runner.tokenizer.encode(prompt)) for prompt in prompts)
    config = server.runner.pool.config
    kinds = 2 * len(set(SALTS))  # chats and raw text, for each tenant
    images = 2 * len(prompts) * config.image_pages
    return kinds * (tokens // config.page_tokens + images)


@pytest.fixture(scope="module")
def wanted_bytes() -> int:
    """What the clients would like to have."""
    with serve() as server:
        return wanted_pages(server) * server.runner.pool.config.page_bytes


def tasks() -> list[asyncio.Task[Any]]:
    """Tasks of any loop that are not done."""
    found = [each for each in gc.get_objects() if issubclass(type(each), asyncio.Task)]
    return [each for each in found if not each.done()]


def open_files() -> int:
    """File descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def resident_bytes() -> int:
    """Memory of this process."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def settled(read: Callable[[], int], most: int) -> int:
    """What ``read`` says once it is no more than ``most``, or what it says after some seconds."""
    until = time.monotonic() + 10
    while (found := read()) > most and time.monotonic() < until:
        time.sleep(0.02)
    return found


def emptied(server: Server) -> None:
    """Remove every entry; all that there was must be free again."""
    server.idle()
    assert server.http.delete("/pool/entries").status_code == 200
    pool = server.get("/pool")
    assert pool["entries"] == []
    assert pool["running"] == pool["queued"] == 0
    assert pool["pages"]["free"] == pool["pages"]["total"]
    assert pool["bytes"]["retained"] == pool["bytes"]["pinned"] == pool["bytes"]["running"] == 0
    server.runner.pool.check()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    ("share", "max_queue", "most", "refused_by"),
    [
        pytest.param(3, 4, 500, "server", id="a third of the room and too few chairs to wait"),
        pytest.param(80, 99, 200, "pool", id="room for hardly more than one request"),
    ],
)
def test_clients_that_come_and_go_leave_nothing_behind(
    wanted_bytes: int, share: int, max_queue: int, most: int, refused_by: str, *, long_run: bool
) -> None:
    half = most // (2 if long_run else 7)
    with serve({"max_queue": max_queue}, lanes=LANES, kv_budget=wanted_bytes // share) as server:
        emptied(server)
        at_first = open_files(), len(tasks())
        first = crowd(server, seed=1, most=half)
        emptied(server)
        gc.collect()
        blocks, resident = sys.getallocatedblocks(), resident_bytes()
        second = crowd(server, seed=2, most=half)
        emptied(server)
        assert settled(open_files, at_first[0]) <= at_first[0]
        assert settled(lambda: len(tasks()), at_first[1]) <= at_first[1]
        assert not server.service.live
        gc.collect()
        assert sys.getallocatedblocks() - blocks < 100 * half
        assert resident_bytes() - resident < 48 << 20
        counters = server.get("/pool")["counters"]
    told = first + second
    for what in ("streams", "bodies", "left"):
        assert told[what] > half / 5, f"too few {what} to say anything"
    assert counters["evictions"] > 0
    assert (told if refused_by == "server" else counters)["refused"] > 0


def crowd(server: Server, *, seed: int, most: int) -> Counter[str]:
    """Let a crowd of clients do as they like; whatever they see, it is no fault of the server."""
    clients = Crowd(server, seed=seed, most=most)
    clients.run()
    assert clients.faults == []
    return clients.told
