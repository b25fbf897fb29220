"""The pool's own endpoints: what there is, why it hits or misses, and who may stay."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest

from tests.server.dialects import DIALECTS, ask, body_of, explain, told
from tests.server.scripted import Voice, serve_scripted
from tests.server.shapes import DETAIL, EXPLANATION, POOL, faults
from tests.server.world import Server, cached, chat_body, serve

NUMBERS = count()
SEA = "Where is the sea that they all speak of? "
KIND = "You are kind to all who ask. " * 10
SECRETS = ("quokka", "zanzibar", "hintword", "toolword")
"""Words that requests hold, and no answer of the pool may."""


@pytest.fixture(scope="module")
def scripted() -> Iterator[tuple[Server, Voice]]:
    with serve_scripted(lanes=2, max_entries=3, policy="lru") as both:
        yield both


@pytest.fixture
def server(scripted: tuple[Server, Voice]) -> Server:
    """The server, with nothing retained."""
    scripted[0].idle()
    scripted[0].http.delete("/pool/entries")
    return scripted[0]


def fresh() -> str:
    return f"Number {next(NUMBERS)} is a new question of more than a few words."


# -- what there is ------------------------------------------------------------------------


def test_the_shape_of_the_pool(server: Server) -> None:
    for text in (fresh(), "Hi.", "Hi.", "Hi there."):
        server.chat(text)
    server.idle()
    shown = server.get("/pool")
    assert faults(shown, POOL) == []
    told = [(lane["lane"], lane["state"], lane["request"]) for lane in shown["lanes"]]
    assert told == [(0, "idle", None), (1, "idle", None)]
    sizes = shown["bytes"]
    assert sizes["free"] + sizes["retained"] + sizes["running"] == sizes["total"]
    assert sizes["kv"] + sizes["images"] == sizes["retained"] > 0
    assert sizes["total"] == shown["pages"]["total"] * shown["capacity"]["page_bytes"]
    assert sizes["free"] == shown["pages"]["free"] * shown["capacity"]["page_bytes"]
    assert sum(entry["bytes"] for entry in shown["entries"]) <= sizes["retained"]
    numbers = [request["request"] for request in shown["requests"]]
    assert numbers == sorted(numbers, reverse=True)
    newest = shown["requests"][0]
    assert shown["history"][-1][1:] == [newest["prompt_tokens"], newest["cached_tokens"]]
    assert all(len(point) == 3 for point in shown["history"])


def test_an_entry_and_what_it_means(server: Server) -> None:
    text = fresh()
    keys = {server.chat(text)["pool"]["key"] for _ in range(3)}
    (key,) = keys
    detail = server.get(f"/pool/entries/{key}")
    assert faults(detail, DETAIL) == []
    (entry,) = server.get("/pool")["entries"]
    ages = {"age_seconds", "idle_seconds"}
    assert {k: v for k, v in detail["entry"].items() if k not in ages} == {
        k: v for k, v in entry.items() if k not in ages
    }
    assert entry["hits"] == 2
    assert entry["kv_bytes"] + entry["image_bytes"] == entry["bytes"]
    assert entry["tokens"] == entry["checkpoints"][-1]["position"]
    assert [request["key"] for request in detail["requests"]] == [key] * 3
    assert "2 times" in " ".join(detail["explanation"])


def test_lanes_that_are_busy(server: Server, scripted: tuple[Server, Voice]) -> None:
    scripted[1].says("and so on " * 500)
    body = {**chat_body(fresh(), stream=True), "max_tokens": 1000}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = answer.iter_lines()
        while "reasoning_content" not in next(lines):
            pass
        shown = server.get("/pool")
    assert faults(shown, POOL) == []
    (lane,) = [each for each in shown["lanes"] if each["request"] is not None]
    assert lane["state"] == "decode"
    assert lane["position"] == lane["prompt_tokens"] + lane["output_tokens"] - 1
    assert shown["running"] == 1
    assert shown["bytes"]["running"] > 0
    server.idle()
    assert server.get("/pool")["requests"][0]["finish"] == "cancelled"


def test_never_text(server: Server) -> None:
    """Nor hints, names of tools, or token ids: sizes, positions, kinds and keys alone."""
    tool = {"type": "function", "function": {"name": "toolword", "parameters": {}}}
    fields: dict[str, Any] = {"prompt_cache_key": "hintword", "tools": [tool]}
    asked = chat_body("A quokka of zanzibar.", **fields)
    key = server.chat("A quokka of zanzibar.", **fields)["pool"]["key"]
    server.chat("A quokka of zanzibar, again.", **fields)
    server.idle()
    answers = [
        server.http.get("/pool"),
        server.http.get(f"/pool/entries/{key}"),
        server.http.post("/pool/explain", json=asked),
        server.http.post("/pool/explain", json=chat_body("A quokka of the sea.", **fields)),
        server.http.post(f"/pool/entries/{key}/pin"),
        server.http.delete(f"/pool/entries/{key}/pin"),
        server.http.get("/metrics"),
        server.http.get("/metrics", headers={"accept": "text/plain"}),
    ]
    answers.append(server.http.delete("/pool/entries"))
    for answer in answers:
        assert answer.status_code == 200, answer.text
        assert not [word for word in SECRETS if word in answer.text.lower()]
    assert not [word for word in SECRETS for line in server.lines if word in line.lower()]


# -- why it hits or misses ----------------------------------------------------------------


@pytest.mark.parametrize("path", DIALECTS)
def test_explanations_say_what_the_request_then_meets(server: Server, path: str) -> None:
    text, other = fresh(), fresh()
    missed = explain(server, path, body_of(path, text))
    assert faults(missed, EXPLANATION) == []
    assert (missed["reason"], missed["resumable"]) == ("no_entry", 0)
    ask(server, path, text)
    kept = explain(server, path, body_of(path, text))
    assert (kept["reason"], kept["resumable"]) == ("hit", kept["tokens"])
    refused = explain(server, path, body_of(path, text, allow_prefix_reuse=False))
    assert (refused["reason"], refused["resumable"]) == ("opted_out", 0)
    for number in range(3):
        ask(server, path, f"{number} {other}")
    gone = explain(server, path, body_of(path, text))
    assert (gone["reason"], gone["resumable"]) == ("evicted", 0)
    assert gone["matched"] == gone["lost"] > 0
    met = ask(server, path, text)
    assert (met.reason, met.cached, met.prompt) == ("evicted", 0, gone["tokens"])


@pytest.mark.parametrize("path", [DIALECTS[0], DIALECTS[2]])
@pytest.mark.parametrize(
    ("system", "text", "reason", "part"),
    [
        ("", SEA * 4 + "Tell me more of it. " * 9, "diverged", "messages["),
        ("", SEA * 3 + "Well?", "no_checkpoint_before", "messages["),
        ("Be brief.", "Where?", "no_checkpoint_before", "system"),
    ],
)
def test_explanations_of_prompts_that_part(
    server: Server, path: str, system: str, text: str, reason: str, part: str
) -> None:
    def body(system: str, text: str) -> dict[str, Any]:
        asked = body_of(path, text)
        if path == "/v1/messages":
            return {**asked, "system": KIND + system}
        first = {"role": "system", "content": KIND + system}
        return {**asked, "messages": [first, *asked["messages"]]}

    assert server.http.post(path, json=body("", SEA * 5)).status_code == 200
    asked = body(system, text)
    found = explain(server, path, asked)
    assert faults(found, EXPLANATION) == []
    assert found["reason"] == reason, found["text"]
    own = {"messages[": "messages[0]" if path == "/v1/messages" else "messages[1]"}
    assert found["diverged_in"] == own.get(part, part)  # as its client counts them
    assert found["matched"] == found["diverged_at"] == found["resumable"] + found["lost"]
    assert (found["resumable"] > 0) == (part != "system")
    met = told(server.http.post(path, json={**asked, "retain_prefix": False}).json())
    assert (met.reason, met.reuse, met.cached) == (reason, found["reuse"], found["resumable"])
    (newest, *_) = server.get("/pool")["requests"]
    assert newest["parted_at"] == found["diverged_at"]
    assert newest["parted_in"] == found["diverged_in"]


def test_an_explanation_changes_nothing(server: Server) -> None:
    text = fresh()
    server.chat(text)
    server.idle()
    pool = server.runner.pool

    def state() -> tuple[Any, ...]:
        shown = server.get("/pool")
        return pool.entries(), pool.events(), pool.stats(), shown["requests"], shown["totals"]

    before = state()
    for _ in range(3):
        explain(server, DIALECTS[0], chat_body(text))
        explain(server, DIALECTS[0], chat_body(text + " And?"))
    assert state() == before


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"messages": 1}', b'{"prompt": []}'])
def test_what_cannot_be_explained(server: Server, body: bytes) -> None:
    answer = server.http.post("/pool/explain", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


# -- who may stay -------------------------------------------------------------------------


def test_one_is_removed_then_all(server: Server) -> None:
    texts = [fresh() for _ in range(3)]
    keys = [server.chat(text)["pool"]["key"] for text in texts]
    assert server.http.delete(f"/pool/entries/{keys[1]}").json() == {"removed": 1}
    assert {entry["key"] for entry in server.get("/pool")["entries"]} == {keys[0], keys[2]}
    assert server.http.delete(f"/pool/entries/{keys[1]}").status_code == 404
    assert cached(server.chat(texts[1], retain_prefix=False)) == 0
    assert cached(server.chat(texts[0], retain_prefix=False)) > 0
    assert server.http.delete("/pool/entries").json() == {"removed": 2, "kept": 0}
    server.idle()
    shown = server.get("/pool")
    assert shown["entries"] == []
    assert shown["bytes"]["free"] == shown["bytes"]["total"]
    assert shown["pages"]["free"] == shown["pages"]["total"]


def test_all_are_forgotten_but_what_is_pinned(server: Server) -> None:
    keys = [server.chat(fresh())["pool"]["key"] for _ in range(3)]
    server.http.post(f"/pool/entries/{keys[0]}/pin")
    assert server.http.delete(f"/pool/entries/{keys[0]}").status_code == 409
    assert server.http.delete("/pool/entries").json() == {"removed": 2, "kept": 1}
    server.http.delete(f"/pool/entries/{keys[0]}/pin")
    assert server.http.delete("/pool/entries").json() == {"removed": 1, "kept": 0}


def test_a_pinned_entry_survives_pressure_until_it_is_unpinned(server: Server) -> None:
    text = fresh()
    key = server.chat(text)["pool"]["key"]
    assert server.http.post(f"/pool/entries/{key}/pin").json() == {"key": key, "pinned": True}
    for _ in range(5):
        server.chat(fresh())
    shown = {entry["key"]: entry for entry in server.get("/pool")["entries"]}
    assert shown[key]["pinned"]
    assert server.get("/pool")["bytes"]["pinned"] > 0
    assert cached(server.chat(text)) > 0
    assert "pinned" in " ".join(server.get(f"/pool/entries/{key}")["explanation"])
    refused = server.http.delete(f"/pool/entries/{key}")
    assert refused.status_code == 409
    assert "unpin" in refused.json()["error"]["message"]
    server.http.delete("/pool/entries")
    assert [entry["key"] for entry in server.get("/pool")["entries"]] == [key]
    unpinned = server.http.post(f"/pool/entries/{key}/pin", json={"pinned": False})
    assert unpinned.json() == {"key": key, "pinned": False}
    assert server.get("/pool")["bytes"]["pinned"] == 0
    for _ in range(4):
        server.chat(fresh())
    assert cached(server.chat(text)) == 0


def test_unpinning_by_delete_and_twice(server: Server) -> None:
    key = server.chat(fresh())["pool"]["key"]
    for wanted in (True, True, False, False):
        answer = server.http.post(f"/pool/entries/{key}/pin", json={"pinned": wanted})
        assert answer.json() == {"key": key, "pinned": wanted}
    server.http.post(f"/pool/entries/{key}/pin", json={})
    assert server.get(f"/pool/entries/{key}")["entry"]["pinned"]
    assert server.http.delete(f"/pool/entries/{key}/pin").json() == {"key": key, "pinned": False}


@pytest.mark.parametrize("body", [b'{"pinned": 1}', b'{"pin": true}', b"[]", b"{"])
def test_a_bad_pin(server: Server, body: bytes) -> None:
    key = server.chat(fresh())["pool"]["key"]
    assert server.http.post(f"/pool/entries/{key}/pin", content=body).status_code == 400
    assert not server.get(f"/pool/entries/{key}")["entry"]["pinned"]


@pytest.mark.parametrize("key", ["0" * 32, "no-key", "%00", "a" * 5000])
def test_an_unknown_key(server: Server, key: str) -> None:
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/pin"), ("DELETE", "/pin")):
        answer = server.http.request(method, f"/pool/entries/{key}{path}")
        assert answer.status_code == 404
        assert answer.json()["error"]["param"] == "key"


def test_where_everything_is_pinned_a_request_without_room_is_refused() -> None:
    with serve(kv_budget="4MiB") as server:
        for _ in range(2):
            key = server.chat(fresh())["pool"]["key"]
            assert server.http.post(f"/pool/entries/{key}/pin").status_code == 200
        long = "and so on " * 500
        asked = chat_body(long)
        refused = server.http.post("/v1/chat/completions", json=asked)
        assert refused.status_code == 503
        assert "unpin" in refused.json()["error"]["message"]
        other = server.http.post("/v1/messages", json=asked)
        assert (other.status_code, other.json()["error"]["type"]) == (529, "overloaded_error")
        assert server.get("/pool")["requests"][0]["finish"] == "refused"
        for entry in server.get("/pool")["entries"]:
            server.http.delete(f"/pool/entries/{entry['key']}/pin")
        assert server.chat(long)["choices"]


def test_what_is_being_resumed_from_is_not_removed(
    server: Server, scripted: tuple[Server, Voice]
) -> None:
    text = fresh()
    key = server.chat(text)["pool"]["key"]
    scripted[1].says("and so on " * 500)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.chat, text, max_tokens=100)
        while not server.service.engine.running:
            time.sleep(0.001)
        removed = server.http.delete(f"/pool/entries/{key}")
        assert cached(answer.result()) > 0
    assert removed.status_code == 409
    assert "resumed" in removed.json()["error"]["message"]
