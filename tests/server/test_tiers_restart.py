"""A server that is told to stop, or killed, and what the next one finds: real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from ninfer_pool.cli import main
from tests.server.processes import ENDLESS, Process, started, streaming, unix
from tests.server.talks import Message, said, system
from tests.server.test_agreement import DONE
from tests.server.world import Server, cached, chat_body, serve

pytestmark = unix
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name} to a file, and says what came of it",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
    for name in ("read", "write", "search")
]
AGENT = system("You are an agent that works on files with care, one step after the other. " * 4)
SLACK = 15
"""Seconds that a busy machine may take longer."""
RESULT = "line one of the file says that the sea was calm and that the ship went on. " * 3


def step(messages: list[Message], number: int) -> list[Message]:
    """The messages of an agent's next request: its call of a tool, and what came of it."""
    call = {"name": "read", "arguments": json.dumps({"path": f"part-{number}.txt"})}
    called = {"id": f"call_{number}", "type": "function", "function": call}
    asked = {"role": "assistant", "content": None, "tool_calls": [called]}
    return [
        *messages,
        asked,
        {"role": "tool", "tool_call_id": f"call_{number}", "content": f"{number}: {RESULT}"},
    ]


def ask(url: str, messages: list[Message]) -> dict[str, Any]:
    body = chat_body(*messages, tools=TOOLS, max_tokens=12)
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def told(body: dict[str, Any]) -> tuple[Any, ...]:
    """What a restart must not change of an answer."""
    return said(body), body["usage"]["completion_tokens"], cached(body), body["pool"]["exact"]


def conversation(server: Server, steps: int) -> list[dict[str, Any]]:
    """An agent's requests, answered by a server that nobody stops."""
    messages: list[Message] = [AGENT, {"role": "user", "content": "Read all parts of the story."}]
    bodies = []
    for number in range(steps):
        bodies.append(ask(server.url, messages))
        messages = step(messages, number)
    return bodies


def stopped(process: Process) -> str:
    """Its last line, once it was told to stop and has done so in time."""
    begun = time.monotonic()
    process.inner.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    assert time.monotonic() - begun < 30
    assert process.err == []
    return process.out[-1]


def test_an_agent_goes_on_after_its_server_was_stopped(tmp_path: Path) -> None:
    with serve(lanes=4) as whole:
        expected = conversation(whole, 4)
    below = ("--disk-dir", str(tmp_path / "store"), "--disk-budget", "256MiB")
    messages: list[Message] = [AGENT, {"role": "user", "content": "Read all parts of the story."}]
    with started(*below) as process:
        assert "; empty; indexed in " in process.said("disk tier ")
        for number in range(2):
            assert told(ask(process.url, messages)) == told(expected[number])
            messages = step(messages, number)
        last = stopped(process)
        assert re.fullmatch(r"stopped: 1 entries on disk \(.*\), 0 not written\n", last)
    assert main(["store", "verify", str(tmp_path / "store")]) == 0
    with started(*below) as process:
        found = process.said("disk tier ")
        assert re.search(r"1 entries with \d+ checkpoints found, .* 0 damaged; indexed in", found)
        for number in range(2, 4):
            body = ask(process.url, messages)
            assert told(body) == told(expected[number])
            assert body["pool"]["tier"] == ("disk" if number == 2 else "device")
            assert f"tier={body['pool']['tier']}" in process.said(f"[req {number - 1}] done")
            messages = step(messages, number)
        assert stopped(process).endswith("0 not written\n")
    assert DONE.match(process.out[-2])


def entries(url: str) -> dict[str, str]:
    """The tier of every entry, by key."""
    shown = httpx.get(f"{url}/pool", timeout=60).json()
    return {entry["key"]: entry["tier"] for entry in shown["entries"]}


def resumes_as_it_was(url: str, text: str, answer: str) -> None:
    """A prompt that was asked in another life, whole from where it was kept."""
    body = ask(url, [{"role": "user", "content": text}])
    assert body["choices"][0]["message"]["content"] == answer
    assert body["pool"]["tier"] in ("disk", "device")
    assert cached(body) == body["usage"]["prompt_tokens"]


def test_what_was_on_disk_outlives_a_server_that_is_killed(
    tmp_path: Path, *, long_run: bool
) -> None:
    store = tmp_path / "store"
    below = ("--disk-dir", str(store), "--disk-budget", "256MiB", "--kv-budget", "5MiB")
    answers: dict[str, tuple[str, str]] = {}
    committed: set[str] = set()
    for life in range(8 if long_run else 2):
        with started(*below) as process:
            assert " 0 damaged" in (line := process.said("disk tier ")) or "; empty" in line
            before = entries(process.url)
            assert committed <= before.keys()
            assert set(before.values()) <= {"disk"}
            for number in range(8):
                text = f"Life {life}, question {number}: what of the sea? " * 12
                body = ask(process.url, [{"role": "user", "content": text}])
                answers[body["pool"]["key"]] = text, body["choices"][0]["message"]["content"]
            for key in sorted(committed & answers.keys())[:3]:
                resumes_as_it_was(process.url, *answers[key])
            committed = {key for key, tier in entries(process.url).items() if tier == "disk"}
            assert committed
            with streaming(process, {**ENDLESS, "max_tokens": 400}):
                process.inner.kill()
            assert process.wait(30) == 128 + signal.SIGKILL
            assert "Traceback" not in "".join(process.err)
    with started(*below) as process:
        found = entries(process.url)
        assert committed <= found.keys()
        for key in sorted(found.keys() & answers.keys())[:6]:
            resumes_as_it_was(process.url, *answers[key])
        stopped(process)
    assert main(["store", "verify", str(store)]) == 0
    assert not [path for path in store.rglob("*") if path.name.startswith((".", "tmp"))]


def test_it_ends_in_the_time_that_was_stated_and_a_second_signal_at_once(tmp_path: Path) -> None:
    below = ("--disk-dir", str(tmp_path / "store"), "--disk-budget", "256MiB")
    with started("--shutdown-seconds", "3", *below) as process:
        ask(process.url, [{"role": "user", "content": "Good morning."}])
        with streaming(process, ENDLESS) as lines:
            begun = time.monotonic()
            process.inner.send_signal(signal.SIGTERM)
            assert "stopping" in "".join(lines)
            assert process.wait(30) == 0
            assert time.monotonic() - begun < 3 + SLACK
        assert "requests have 1 seconds" in "".join(process.out)
        assert process.out[-1].endswith(" 0 not written\n")
    with started(*below) as process, streaming(process, ENDLESS):
        process.inner.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        begun = time.monotonic()
        process.inner.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
        assert time.monotonic() - begun < SLACK
        assert process.out[-1].startswith("stopped: ")
        assert "Traceback" not in "".join(process.err)


HANGING = """
import pathlib, sys, time
from ninfer_pool.cli import main
from ninfer_pool.tiers.disk.files import Files
inner = Files.sync
def sync(self, file):
    while pathlib.Path({trigger!r}).exists():
        time.sleep(0.01)
    inner(self, file)
Files.sync = sync
raise SystemExit(main(sys.argv[1:]))
"""


def test_a_disk_that_hangs_does_not_keep_a_server_from_ending_in_time(tmp_path: Path) -> None:
    trigger, store = tmp_path / "hang", tmp_path / "store"
    command = (sys.executable, "-c", HANGING.format(trigger=str(trigger)), "serve")
    below = ("--disk-dir", str(store), "--disk-budget", "256MiB")
    with started("--shutdown-seconds", "2", *below, command=command) as process:
        ask(process.url, [{"role": "user", "content": "Good morning."}])
        trigger.touch()
        begun = time.monotonic()
        process.inner.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert time.monotonic() - begun < 2 + SLACK
        said = process.out[-1]
        assert re.fullmatch(r"stopped: 0 entries on disk \(.*\), 1 not written\n", said)
    assert main(["store", "verify", str(store)]) == 0


def test_a_folder_is_free_again_when_its_server_was_killed(tmp_path: Path) -> None:
    below = ("--disk-dir", str(tmp_path / "store"), "--disk-budget", "64MiB")
    with started(*below) as process:
        assert process.url
        os.kill(process.inner.pid, signal.SIGKILL)
        process.wait(30)
        assert main(["store", "ls", str(tmp_path / "store")]) == 0
