"""Cached tokens are those that the model did not compute, wherever they are told."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.dialects import DIALECTS, Told, body_of, told
from tests.server.scripted import Voice, serve_scripted
from tests.server.world import Server, chat_body, events

NUMBERS = count()
DONE = re.compile(
    r"\[req (?P<number>\d+)\] done prompt=(?P<prompt>\d+) cache=(?P<cached>\d+) "
    r"reuse=(?P<reuse>\w+) ttft=(?P<ttft>[\d.]+ms|-) reason=(?P<reason>[\w:]+)"
)


@dataclass
class Watched:
    """A server, and how many tokens its model prefilled for each request."""

    server: Server
    voice: Voice
    log: Path
    computed: list[int] = field(default_factory=list)
    """Tokens of each chunk that passed through the model since it was last looked at."""

    def prefilled(self) -> int:
        """Prompt tokens that were computed since it was last asked."""
        self.server.idle()
        total = sum(self.computed)
        self.computed.clear()
        return total

    def lines(self) -> dict[int, dict[str, Any]]:
        """The log's lines by their requests' numbers."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        return {line["request"]: line for line in lines if "request" in line}


@pytest.fixture(scope="module", params=[0, 3], ids=["plain", "drafts"])
def watched(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Watched]:
    log = tmp_path_factory.mktemp("logs") / "log.jsonl"
    options = {"lanes": 2, "max_entries": 6, "draft_tokens": request.param}
    with serve_scripted(log=log, **options) as (server, voice):
        seen = Watched(server, voice, log)
        executor = server.runner.executor
        inner = executor.prefill

        def prefill(lane: int, tokens: Any, **more: Any) -> Any:
            seen.computed.append(len(tokens))
            return inner(lane, tokens, **more)

        executor.prefill = prefill  # type: ignore[method-assign]
        yield seen


def fresh() -> str:
    return f"Number {next(NUMBERS)} is a new question of more than a few words. " * 3


def streamed(path: str, text: str) -> Told:
    """Read a stream as one answer."""
    found = events(text)
    if path == "/v1/messages":
        last = next(each for each in found if each["type"] == "message_delta")
        begun = found[0]["message"]["usage"]
        assert begun["cache_read_input_tokens"] == last["usage"]["cache_read_input_tokens"]
        return told(last)
    last = next(each for each in found if "timings" in each)
    return told({**last, "usage": found[-1]["usage"]})


def ask(server: Server, path: str, text: str, **fields: Any) -> Told:
    body = body_of(path, text, **fields)
    if fields.get("stream") and path != "/v1/messages":
        body["stream_options"] = {"include_usage": True}
    answer = server.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return streamed(path, answer.text) if fields.get("stream") else told(answer.json())


def agree(watched: Watched, answer: Told) -> None:
    """Runner, answer, console, log, metrics and pool say the same of the last request."""
    server = watched.server
    assert answer.prompt - answer.cached == watched.prefilled()
    line = DONE.match(server.lines[-1])
    assert line is not None
    said = {name: int(line[name]) for name in ("number", "prompt", "cached")}
    assert said == {"number": answer.number, "prompt": answer.prompt, "cached": answer.cached}
    assert (line["reuse"], line["reason"]) == (answer.reuse, answer.reason)
    logged = watched.lines()[answer.number]
    assert (logged["input"], logged["cached"]) == (answer.prompt, answer.cached)
    names = ("reuse", "reason", "exact", "lane")
    assert {n: logged[n] for n in names} == {n: getattr(answer, n) for n in names}
    last = server.get("/metrics")["last"]
    assert (last["request"], last["prompt_tokens"]) == (answer.number, answer.prompt)
    assert last["cache_hit_tokens"] == answer.cached
    (shown, *_) = server.get("/pool")["requests"]
    wanted = (answer.number, answer.prompt, answer.cached)
    assert (shown["request"], shown["prompt_tokens"], shown["cached_tokens"]) == wanted
    assert (answer.cached > 0) == (answer.reuse != "full_reset")


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("stream", [{}, {"stream": True}], ids=["whole", "stream"])
def test_everything_says_the_same_of_every_request(
    watched: Watched, path: str, stream: dict[str, bool]
) -> None:
    watched.prefilled()
    text = fresh()
    for asked, fields in (
        (text, {}),
        (text, {}),
        (text + "And then?", {}),
        (text, {"allow_prefix_reuse": False}),
        (fresh(), {"retain_prefix": False}),
        (text, {"cache_prompt": False}),
        (text, {"stop": "e"} if path != "/v1/messages" else {"stop_sequences": ["e"]}),
    ):
        agree(watched, ask(watched.server, path, asked, **stream, **fields))


def test_a_client_that_leaves_is_counted_alike(watched: Watched) -> None:
    watched.prefilled()
    server, text = watched.server, fresh()
    for cold in (True, False):
        watched.voice.says("and so on " * 500)
        body = {**chat_body(text, stream=True), "max_tokens": 1000}
        with server.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.iter_lines()
            while "reasoning_content" not in next(lines):
                pass
        server.idle()
        (shown, *_) = server.get("/pool")["requests"]
        assert shown["finish"] == "cancelled"
        assert (shown["cached_tokens"] == 0) == cold
        assert shown["prompt_tokens"] - shown["cached_tokens"] == watched.prefilled()
        logged = watched.lines()[shown["request"]]
        assert logged["cached"] == shown["cached_tokens"]
        assert logged["finish"] == "cancelled"
        assert f"[req {shown['request']}] done" in server.lines[-1]
        assert server.get("/metrics")["last"]["cache_hit_tokens"] == shown["cached_tokens"]


def samples(server: Server) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """The scrapers' text, read by their own library."""
    text = server.http.get("/metrics", headers={"accept": "text/plain"}).text
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def test_sums_agree(watched: Watched) -> None:
    """Log, both kinds of metrics and the pool, over all that the other tests asked."""
    server = watched.server
    agree(watched, ask(server, DIALECTS[0], fresh()))
    lines = watched.lines().values()
    assert len(lines) == len(server.lines)
    cached, prompts = (sum(line[name] for line in lines) for name in ("cached", "input"))
    output = sum(line["output"] for line in lines)
    live, shown, text = server.get("/metrics")["live"], server.get("/pool"), samples(server)
    totals = shown["totals"]
    wanted = (len(lines), prompts, cached, output)
    names = ("requests", "prompt_tokens", "cache_hit_tokens", "output_tokens")
    assert tuple(live[name] for name in names) == wanted
    assert tuple(totals[name.replace("cache_hit", "cached")] for name in names) == wanted
    for name, value in zip(("prompt", "cached", "output"), wanted[1:], strict=True):
        assert sum(text[f"ninfer_pool_{name}_tokens_total"].values()) == value
    assert sum(text["ninfer_pool_requests_total"].values()) == len(lines)
    assert sum(text["ninfer_pool_hits_total"].values()) == sum(line["cached"] > 0 for line in lines)
    queries = Counter((("reason", line["reason"]), ("reuse", line["reuse"])) for line in lines)
    assert text["ninfer_pool_queries_total"] == queries
    counters = shown["counters"]
    assert (counters["input_tokens"], counters["reused_tokens"]) == (prompts, cached)
    assert text["ninfer_pool_entries"][()] == live["entries"] == len(shown["entries"])
    assert text["ninfer_pool_pinned_bytes"][()] == live["pinned_bytes"] == shown["bytes"]["pinned"]
    for use, mine, pool in (
        ("free", "free_bytes", "free"),
        ("kv", "kv_bytes", "kv"),
        ("image", "image_bytes", "images"),
        ("running", "running_bytes", "running"),
    ):
        told = text["ninfer_pool_bytes"][(("use", use),)]
        assert told == live[mine] == shown["bytes"][pool]
    for kind, told in live["evictions"].items():
        assert text["ninfer_pool_evictions_total"][(("kind", kind),)] == told


def test_the_log_holds_no_text(watched: Watched) -> None:
    ask(
        watched.server,
        DIALECTS[0],
        "A quokka of zanzibar.",
        cache_salt="saltword",
        session_id="hintword",
    )
    watched.server.idle()
    text = watched.log.read_text().lower()
    assert not [w for w in ("quokka", "zanzibar", "saltword", "hintword") if w in text]
    keys = [entry.key for entry in watched.server.runner.pool.entries()]
    assert keys
    assert not [key for key in keys if key in text]
