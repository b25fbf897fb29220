"""`ninfer-pool serve` as people start and stop it: another process, signals, options."""

from __future__ import annotations

import argparse
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from ninfer_pool.cli import main
from ninfer_pool.errors import UsageError
from ninfer_pool.server.command import listen, make_runner, settings_of
from ninfer_pool.server.options import add_serve, check_options
from tests.server.processes import COMMAND, ENDLESS, SMALL, started, streaming, unix
from tests.server.world import MODEL, Server, cached, chat_body, events, running

DRAIN_SECONDS = 10
"""A third of the time that a server takes to end."""


# -- starting and stopping ------------------------------------------------------------------


@unix
def test_a_server_from_its_first_line_to_its_last(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    options = ("--model-id", "one", "--model-id", "two", "--no-thinking", "--lanes", "2")
    more = ("--default-max-tokens", "3", "--max-entries", "2", "--request-log-jsonl", str(log))
    with started(*options, *more) as process:
        assert process.url.startswith("http://127.0.0.1:")
        assert process.out[0] == "loading one …\n"
        assert process.said("one on http://").count("\n") == 1
        capacity = process.said("pool: ")
        assert "tokens of KV" in capacity
        assert "conversations" in capacity
        assert "at most 2 entries; 2 lanes, policy default" in capacity
        with httpx.Client(base_url=process.url, timeout=60) as client:
            assert client.get("/health").json() == {"status": "ok"}
            for _ in range(2):
                body = {"model": "two", "messages": [{"role": "user", "content": "Hello."}]}
                answer = client.post("/v1/chat/completions", json=body).json()
                assert answer["usage"]["completion_tokens"] <= 3
                assert "reasoning_content" not in answer["choices"][0]["message"]
        assert "reuse=full_reset" in process.said("[req 1] done")
        assert "reason=hit" in process.said("[req 2] done")
        with streaming(process, {**ENDLESS, "max_tokens": 100}) as lines:
            process.inner.send_signal(signal.SIGTERM)
            told = events("\n".join(lines))
        assert sum(len(event["choices"][0].get("text") or "") for event in told if event["choices"])
        assert "error" not in told[-1]
        assert process.wait(DRAIN_SECONDS) == 0
        assert process.err == []
        assert "finish=length" in process.out[-1]
    written = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["request"] for line in written if "request" in line] == [1, 2, 3]
    assert main(["trace", "convert", "--from", "server-log", str(log), str(tmp_path / "t")]) == 0
    assert main(["trace", "info", str(tmp_path / "t")]) == 0


@unix
def test_two_at_once_and_the_second_signal() -> None:
    with started() as first, started("--model-id", "other") as second:
        assert first.url != second.url
        names = [httpx.get(f"{p.url}/v1/models").json()["data"][0]["id"] for p in (first, second)]
        assert names == [MODEL, "other"]
        port = first.url.rpartition(":")[2]
        taken = subprocess.run((*COMMAND, "--port", port), capture_output=True, text=True)
        assert taken.returncode == 2
        assert f"127.0.0.1:{port}" in taken.stderr
        for process, told in ((first, signal.SIGINT), (second, signal.SIGTERM)):
            with streaming(process, ENDLESS) as lines:
                process.inner.send_signal(told)
                time.sleep(0.3)
                process.inner.send_signal(told)
                assert "stopping" in events("\n".join(lines))[-1]["error"]["message"]
            assert process.wait(DRAIN_SECONDS / 2) in (130, 143)
            assert process.err == []
            assert "finish=cancelled" in process.out[-1]


@unix
def test_one_signal_gives_requests_the_time_that_is_stated(*, long_run: bool) -> None:
    if not long_run:
        pytest.skip(f"takes {DRAIN_SECONDS} seconds; needs --long")
    with started() as process, streaming(process, ENDLESS) as lines:
        begun = time.monotonic()
        process.inner.send_signal(signal.SIGTERM)
        last = events("\n".join(lines))[-1]
        assert DRAIN_SECONDS - 1 < time.monotonic() - begun < DRAIN_SECONDS + 5
        assert "stopping" in last["error"]["message"]
        assert process.wait(5) == 0
        assert "Traceback" not in "".join(process.err)


# -- what is wrong is said in one line ------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--single-lane", "--lanes", "2"), "--lanes"),
        (("--single-lane", "--max-entries", "2"), "--max-entries"),
        (("--single-lane", "--policy", "default"), "--policy"),
        (("--single-lane", "--no-prefix-reuse"), "--no-prefix-reuse"),
        (("--draft-tokens", "2", "--spec", "none"), "--draft-tokens"),
        (("--spec", "mtp", "--draft-tokens", "0"), "--draft-tokens"),
        (("--draft-tokens", "9"), "--draft-tokens"),
        (("--port", "70000"), "--port: '70000': write a whole number from 0 to 65535"),
        (("--port", "-1"), "--port"),
        (("--lanes", "0"), "--lanes"),
        (("--lanes", "9"), "--lanes"),
        (("--max-context", "0"), "--max-context"),
        (("--max-context", "1e9"), "--max-context"),
        (("--prefill-chunk", "-5"), "--prefill-chunk"),
        (("--default-max-tokens", "many"), "--default-max-tokens"),
        (("--max-request-mib", "0"), "--max-request-mib"),
        (("--policy", "best"), "--policy"),
        (("--kv-dtype", "fp8"), "--kv-dtype"),
        (("--kv-budget", "much", "--port", "0"), "--kv-budget: "),
        (("--kv-budget", "1KiB", "--port", "0"), "--kv-budget: 1 KiB"),
        (("--max-context", "99999999", "--port", "0"), "--max-context: 99999999"),
        (("--cors", "foo"), "--cors: 'foo': write an origin"),
        (("--cors", "https://chat.example/"), "--cors"),
        (("--cors", "https://chat.example", "--cors", "Https://Chat.example"), "--cors"),
        (("--api-key", "a\nb"), "--api-key"),
        (("--api-key", ""), "--api-key"),
        (("--api-key", " x "), "--api-key"),
        (("--host-budget", "much"), "--host-budget: 'much' is not a size"),
        (("--host-budget", "1KiB", "--port", "0", *SMALL), "--host-budget: 1024; one page and"),
        (("--disk-dir", "x"), "--disk-dir: --disk-budget is not given; needs both"),
        (("--disk-budget", "1GiB"), "--disk-budget: --disk-dir is not given; needs both"),
        (("--host-budget", "1GiB", "--single-lane"), "--host-budget: with --single-lane"),
        (
            ("--disk-dir", "x", "--disk-budget", "1GiB", "--no-prefix-reuse"),
            "--disk-dir: with --no-prefix-reuse",
        ),
        (("--shutdown-seconds", "0"), "--shutdown-seconds: '0': write a whole number from 1"),
        (("--host", "no.such.host.invalid", "--port", "0"), "--host"),
        (("--model", "no-such-folder", "--port", "0"), "no-such-folder"),
        (("--device", "tpu", "--port", "0"), "tpu"),
        (("--request-log-jsonl", "no-such/x", "--port", "0", *SMALL), "no-such/x"),
        (("--nonsense",), "--nonsense (see ninfer-pool serve --help)"),
        (("word",), "word"),
    ],
)
def test_options_that_cannot_be(
    options: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *options]) == 2
    told = capsys.readouterr()
    assert told.out == "" or re.fullmatch(r"loading \S+ …\n", told.out)
    assert told.err.startswith("ninfer-pool: error: ")
    assert told.err.count("\n") == 1
    assert named in told.err


def test_help_is_fast_because_it_loads_no_model_library() -> None:
    code = (
        "import sys; from ninfer_pool.cli import main\n"
        "try: main(['serve', '--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'starlette', 'uvicorn', 'pydantic', 'tokenizers', 'prometheus_client'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    for option in ("--api-key", "--single-lane", "--request-log-jsonl", "--draft-tokens"):
        assert option in told.stdout


def test_a_port_is_taken_once() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(UsageError, match=f"127.0.0.1:{port}"):
            listen("127.0.0.1", port)


def test_ipv6() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        listener = listen("::1", 0)
    except UsageError as error:
        pytest.skip(str(error))
    with listener:
        assert listener.family is socket.AF_INET6


# -- options mean what they say -------------------------------------------------------------


def parsed(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_serve(parser)
    args = parser.parse_args([*SMALL, *options])
    check_options(args)
    return args


@contextmanager
def served(*options: str) -> Iterator[Server]:
    """A server in this process that the options ask for."""
    args = parsed(*options)
    with running(make_runner(args), settings_of(args)) as server:
        yield server


def test_max_context() -> None:
    with served("--max-context", "256") as server:
        assert server.get("/v1/models")["data"][0]["max_model_len"] == 256
        answer = server.http.post("/v1/chat/completions", json=chat_body("word " * 300))
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        # What a request does not say must not make it too long.
        free = server.http.post("/v1/completions", json={"prompt": [5] * 250})
        assert free.json()["usage"]["completion_tokens"] <= 6


def test_prefill_chunk_and_min_chunk() -> None:
    with served("--prefill-chunk", "64", "--min-chunk", "16") as server:
        config = server.runner.pool.config
        assert (config.grid, config.min_chunk) == (64, 16)


@pytest.mark.parametrize(
    ("options", "drafts"),
    [
        ((), 0),
        (("--spec", "none"), 0),
        (("--spec", "mtp"), 3),
        (("--spec", "mtp", "--draft-tokens", "2"), 2),
        (("--draft-tokens", "4"), 4),
    ],
)
def test_draft_tokens(options: tuple[str, ...], drafts: int) -> None:
    with served(*options) as server:
        assert server.runner.executor.draft_tokens == drafts
        timings = server.chat("Tell me of the sea.", max_tokens=24)["timings"]
        assert (timings.get("draft_n", 0) > 0) == (drafts > 0)


def test_single_lane_keeps_what_it_ran_last_whatever_a_request_says() -> None:
    with served("--single-lane") as server:
        counts = [
            cached(server.chat(text, retain_prefix=False)) for text in ("One.", "Two.", "One.")
        ]
        assert counts == [0, 0, 0]
        assert cached(server.chat("One.")) > 0
        pool = server.get("/pool")
        assert (len(pool["lanes"]), len(pool["entries"]), pool["single_lane"]) == (1, 1, True)


def test_no_prefix_reuse() -> None:
    with served("--no-prefix-reuse") as server:
        assert [cached(server.chat("Hello.")) for _ in range(3)] == [0, 0, 0]
        assert server.get("/pool")["entries"] == []


def test_thinking_is_a_default_that_a_request_may_change() -> None:
    with served("--no-thinking") as server:
        default, asked = server.chat("Hi."), server.chat("Hi.", enable_thinking=True)
        assert "reasoning_content" not in default["choices"][0]["message"]
        assert asked["choices"][0]["message"]["reasoning_content"]


def test_max_entries_and_max_request_mib() -> None:
    with served("--max-entries", "2", "--max-request-mib", "1") as server:
        for text in ("One.", "Two.", "Three."):
            server.chat(text)
        assert len(server.get("/pool")["entries"]) == 2
        answer = server.http.post("/v1/chat/completions", content=b" " * ((1 << 20) + 1))
        assert answer.status_code == 413


def test_the_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NINFER_POOL_API_KEY", "secret")
    assert settings_of(parsed()).api_key == "secret"
    assert settings_of(parsed("--api-key", "other")).api_key == "other"
    monkeypatch.setenv("NINFER_POOL_API_KEY", "")
    assert settings_of(parsed()).api_key is None
