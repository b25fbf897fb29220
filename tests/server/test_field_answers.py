"""Answers, sizes and counts that were wrong with other engines, asked of a real server."""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ninfer_pool.runner.executor import Turn
from ninfer_pool.server.command import listen, print_start
from tests.server.talks import (
    ALONE,
    Body,
    Talk,
    answer,
    begun,
    prefilled,
    prompted,
    prose,
    system,
    together,
    user,
    watched,
)
from tests.server.world import MODEL, Server, cached, events, serve

OFF = {"read": False, "retain": False}
PAGE = 64


def test_field_24_reentry_equals_a_cold_run() -> None:
    first, second = [system(prose(0, 80)), user("A?")], [system(prose(1, 80)), user("B?")]
    others = [[system(prose(n, 80)), user("C?")] for n in (2, 3)]
    asked = [first, second, first, first, *others, first]
    with serve(max_entries=2) as warm, serve(OFF) as cold, watched(warm) as made:
        counts: list[int] = []
        with watched(cold) as control:
            for messages in [*asked, first]:
                if len(counts) == len(asked):  # deeper
                    reply = {"role": "assistant", "content": "That is all."}
                    messages = [*first, reply, user("And what of C?")]
                body = warm.chat(*messages, max_tokens=16)
                same = cold.chat(*messages, max_tokens=16)
                assert answer(body) == answer(same)
                assert made.bits(body) == control.bits(same)
                assert (body["pool"]["exact"], cached(same)) == (True, 0)
                counts.append(cached(body))
    a, b, again, third, *displaced, back, deeper = (bool(count) for count in counts)
    assert (a, b, again, third, back, deeper) == (False, False, True, True, False, True)
    assert not any(displaced)


def test_field_25_what_a_queued_request_would_resume_is_gone_before_it_runs() -> None:
    """It is planned anew; nobody fails, and every answer is right."""
    with serve(lanes=1, kv_budget="4MiB") as server:
        talks = [begun(server, number, words=200) for number in range(4)]
        for turn in range(2):
            bodies = together(talks, f"Step {turn}?")
            for talk, body in zip(talks, bodies, strict=True):
                cold = server.chat(*talk.messages[:-1], enable_thinking=False, **ALONE)
                assert answer(body) == answer(cold)
        server.idle()
        reasons = [each["reason"] for each in server.get("/pool")["requests"]]
        assert "evicted" in reasons
        assert server.runner.pool.stats().counters.evictions > 0


PICTURE = "data:image/png;base64,iVBORw0KGgo="
PICTURES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [{"type": "image_url", "image_url": {"url": PICTURE}}],
    "/v1/messages": [
        {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="},
        }
    ],
}


@pytest.mark.parametrize("path", PICTURES)
def test_field_26_images_are_refused_and_leave_nothing(wide: Server, path: str) -> None:
    """Digests of media are the runner's: tests/runner/test_runner.py."""
    content = [*PICTURES[path], {"type": "text", "text": "What is this?"}]
    body = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": content}]}
    found = wide.http.post(path, json=body)
    assert found.status_code == 400, found.text
    assert "text" in found.json()["error"]["message"]  # what it reads instead
    assert wide.get("/pool")["entries"] == []


@pytest.mark.parametrize("kv_dtype", ["fp32", "int8-g64"])
def test_field_29_drafts_and_reuse_together(kv_dtype: str) -> None:
    """Greedy output is that without reuse, however many drafts are accepted each round."""
    rng = random.Random(29)

    def some(turn: Turn) -> list[int]:
        count = rng.randrange(len(turn.drafts) + 1)
        wrong = [token ^ 1 for token in turn.drafts[count:]]
        return [*turn.drafts[:count], *wrong][: rng.randrange(len(turn.drafts) + 1)]

    with serve(draft_tokens=3, kv_dtype=kv_dtype) as server, watched(server) as made:
        server.runner.executor.proposals = some
        talk = Talk(server, [system(prose(0, 60))])
        drafted = accepted = 0
        for turn in range(5):
            body = talk.turn(f"Chapter {turn}?", max_tokens=24)
            drafted += body["timings"]["draft_n"]
            accepted += body["timings"]["draft_n_accepted"]
            cold = server.chat(*talk.messages[:-1], enable_thinking=False, max_tokens=24, **ALONE)
            assert made.bits(body) == made.bits(cold)
            assert answer(body) == answer(cold)
            assert body["pool"]["exact"]
            assert bool(cached(body)) == bool(turn)
        server.idle()
    assert 0 < accepted < drafted


def test_field_37_what_fits_is_said_at_start_and_is_true(
    wide: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    with listen("127.0.0.1", 0) as listener:
        print_start(wide.service, listener, argparse.Namespace(api_key=None))
    told = capsys.readouterr().out
    capacity = wide.get("/pool")["capacity"]
    assert capacity["text"] in told
    assert f"{capacity['tokens']:,} tokens of KV" in told
    assert re.search(r"or \d+ conversations? of 8,192 tokens with 3 checkpoints", told)
    assert capacity["tokens"] == wide.get("/pool")["pages"]["total"] * PAGE


def test_field_37_rounds_with_seven_entries() -> None:
    """1 prompt x 12, 3 x 4, 6 x 2 and 10 x 2: what seven entries hold is reused every round."""
    rng = random.Random(37)
    hits: dict[int, list[bool]] = {}
    with serve(max_entries=7) as server:
        for prompts, rounds in ((1, 12), (3, 4), (6, 2), (10, 2)):
            made = [[rng.randrange(100, 400) for _ in range(40)] for _ in range(prompts)]
            fields: Body = {"model": MODEL, "max_tokens": 8, "temperature": 0}
            hits[prompts] = []
            for prompt in made * rounds:
                body = server.http.post("/v1/completions", json={**fields, "prompt": prompt}).json()
                hits[prompts].append(cached(body) == len(prompt))
        server.idle()
    for prompts in (1, 3, 6):
        assert hits[prompts] == [False] * prompts + [True] * (len(hits[prompts]) - prompts)
    assert sum(hits[10][10:]) >= 6


def test_field_40_cached_tokens_are_those_that_the_model_did_not_see(wide: Server) -> None:
    """Hits, misses, cold fallbacks, and several at once."""
    with prefilled(wide) as chunks:
        talks = [begun(wide, number) for number in range(4)]
        bodies = [talk.last for talk in talks]
        bodies += together(talks, "And then?")
        wide.runner.pool.clear()
        bodies.append(talks[0].turn("And after that?"))
        assert cached(bodies[-1]) == 0
        bodies.append(talks[0].turn("And at last?", allow_prefix_reuse=False))
        assert cached(bodies[-1]) == 0
        bodies.append(talks[0].turn("And tomorrow?"))
        wide.idle()
    assert sum(chunks) == sum(prompted(body) - cached(body) for body in bodies)
    assert sum(chunks) == sum(body["timings"]["prompt_n"] for body in bodies)
    assert sum(map(cached, bodies)) > 0


# -- 41: everything that tells of a request tells the same ------------------------------------

Counts = tuple[int, int, int]
"""Tokens of the prompt, of them cached, and of the answer."""


def openai_counts(usage: Body) -> Counts:
    """What OpenAI's usage says."""
    reused = usage["prompt_tokens_details"]["cached_tokens"]
    return usage["prompt_tokens"], reused, usage["completion_tokens"]


def anthropic_counts(usage: Body) -> Counts:
    """What Anthropic's usage says."""
    reused = usage["cache_read_input_tokens"]
    prompt = usage["input_tokens"] + usage["cache_creation_input_tokens"] + reused
    return prompt, reused, usage["output_tokens"]


def asked_of_all(server: Server) -> list[Counts]:
    """Ask in every dialect, streaming and not, twice each; return what each usage said."""
    plain: Body = {"model": MODEL, "max_tokens": 6, "temperature": 0}
    chat = {**plain, "messages": [user(prose(1, 40))]}
    text = {**plain, "prompt": prose(2, 40)}
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    found: list[Counts] = []
    for _ in range(2):
        for path, body in (("/v1/chat/completions", chat), ("/v1/completions", text)):
            whole = server.http.post(path, json=body).json()
            parts = events(server.http.post(path, json={**body, **usage}).text)
            told = [part["usage"] for part in parts if part.get("usage")]
            found += [openai_counts(whole["usage"]), openai_counts(told[-1])]
        whole = server.http.post("/v1/messages", json=chat).json()
        parts = events(server.http.post("/v1/messages", json={**chat, "stream": True}).text)
        begin = next(part for part in parts if part["type"] == "message_start")
        end = next(part for part in parts if part["type"] == "message_delta")
        found.append(anthropic_counts(whole["usage"]))
        found.append(anthropic_counts({**begin["message"]["usage"], **end["usage"]}))
    return found


LINE = re.compile(
    r"\[req \d+\] done prompt=(\d+) cache=(\d+) reuse=\w+ ttft=\S+ reason=\S+ out=(\d+) "
)


def scraped(server: Server) -> dict[str, float]:
    """The sums over labels of what a scraper reads."""
    text = server.http.get("/metrics", headers={"accept": "text/plain"}).text
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0) + sample.value
    return sums


def test_field_41_usage_log_console_metrics_and_runner_agree(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    with serve(log=log) as server, prefilled(server) as chunks, watched(server) as made:
        said_by_usage = asked_of_all(server)
        server.idle()
        live = server.get("/metrics")["live"]
        sums = scraped(server)
        pool = server.get("/pool")
        counters = server.runner.pool.stats().counters
        matches = [LINE.match(line) for line in server.lines]
        handles = [request.submitted for request in made.requests.values()]
    prompts, reused, made_tokens = (sum(column) for column in zip(*said_by_usage, strict=True))
    assert 0 < reused < prompts
    assert sum(chunks) == prompts - reused
    console = [tuple(map(int, match.groups())) for match in matches if match is not None]
    assert console == said_by_usage
    written = [json.loads(line) for line in log.read_text().splitlines()]
    lines = [each for each in written if "request" in each]
    assert [(each["input"], each["cached"], each["output"]) for each in lines] == said_by_usage
    outcomes = [handle.result() for handle in handles if handle is not None]
    assert [(each.prompt_tokens, each.reused, len(each.tokens)) for each in outcomes] == (
        said_by_usage
    )
    totals = (live["prompt_tokens"], live["cache_hit_tokens"], live["output_tokens"])
    assert totals == (prompts, reused, made_tokens)
    assert (counters.input_tokens, counters.reused_tokens) == (prompts, reused)
    listed = [(each["prompt_tokens"], each["cached_tokens"]) for each in pool["requests"]]
    assert listed[::-1] == [each[:2] for each in said_by_usage]
    assert sums["ninfer_pool_queries_total"] == len(said_by_usage)
    assert sums["ninfer_pool_hits_total"] == sum(counts[1] > 0 for counts in said_by_usage)
    scraped_totals = [
        sums[f"ninfer_pool_{name}_tokens_total"] for name in ("prompt", "cached", "output")
    ]
    assert scraped_totals == [prompts, reused, made_tokens]


# -- 44 ---------------------------------------------------------------------------------------


def test_field_44_a_prompt_that_is_exactly_an_entrys_tokens(wide: Server) -> None:
    start = wide.runner.tokenizer.encode(prose(0, 60))
    fields: Body = {"model": MODEL, "max_tokens": 9, "temperature": 0}
    with watched(wide) as made:
        body = wide.http.post("/v1/completions", json={**fields, "prompt": start}).json()
        entry = [*start, *made.tokens(body)[:-1]]  # the last token was never fed
        (told,) = wide.get("/pool")["entries"]
        assert told["tokens"] == len(entry)
        for _ in range(2):
            again = wide.http.post("/v1/completions", json={**fields, "prompt": entry}).json()
            assert prompted(again) - cached(again) <= 1
            assert made.tokens(again)[0] == made.tokens(body)[-1]


def test_field_44_the_same_chat_again(wide: Server) -> None:
    first = wide.chat(system(prose(0, 60)), "Hello.")
    again = wide.chat(system(prose(0, 60)), "Hello.")
    assert prompted(again) - cached(again) <= 1
    assert answer(again) == answer(first)
    assert again["pool"]["exact"]
