"""A salt is a tenant: nobody sees, resumes, removes or pins anything of another's."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from tests.server.dialects import DIALECTS, ask, body_of, explain
from tests.server.scripted import Voice, serve_scripted
from tests.server.shapes import POOL, faults
from tests.server.world import Server, cached, chat_body

NUMBERS = count()
TENANTS = (None, "alpha", "omega")
PAIRS = [(owner, viewer) for owner in TENANTS for viewer in TENANTS if owner != viewer]
SHARED = ("now", "uptime_seconds", "bytes", "pages", "counters", "running", "queued")
"""What is everybody's: sums, and the time. Counters are told to who asks without a salt."""
every_pair = pytest.mark.parametrize(("owner", "viewer"), PAIRS)


@pytest.fixture(scope="module")
def scripted() -> Iterator[tuple[Server, Voice]]:
    with serve_scripted(lanes=2, max_entries=6, policy="lru") as both:
        yield both


@pytest.fixture
def server(scripted: tuple[Server, Voice]) -> Server:
    """The server, with nothing retained."""
    server = scripted[0]
    server.idle()
    for entry in server.runner.pool.entries():
        server.runner.pool.unpin(entry.key)
    server.http.delete("/pool/entries")
    return server


def fresh() -> str:
    return f"Number {next(NUMBERS)} is a new question of more than a few words."


def salted(tenant: str | None) -> dict[str, str]:
    return {} if tenant is None else {"cache_salt": tenant}


def headed(tenant: str | None) -> dict[str, str]:
    return {} if tenant is None else {"X-Cache-Salt": tenant}


def view(server: Server, tenant: str | None) -> dict[str, Any]:
    """All that a tenant sees of the pool and of the last request, but for what is everybody's."""
    server.idle()
    shown = server.get("/pool", headers=headed(tenant))
    wanted = {**POOL, "counters": type(None)} if tenant is not None else POOL
    assert faults(shown, wanted) == []
    assert shown.keys() == server.get("/pool", params=salted(tenant)).keys()
    last = server.get("/metrics", headers=headed(tenant))["last"]
    for entry in shown["entries"]:
        del entry["age_seconds"], entry["idle_seconds"]
    return {"last": last, **{key: shown[key] for key in shown if key not in SHARED}}


@every_pair
def test_nothing_that_one_does_changes_what_another_sees(
    server: Server, owner: str | None, viewer: str | None
) -> None:
    mine, theirs = fresh(), fresh()
    ask(server, DIALECTS[0], mine, **salted(viewer))
    before = view(server, viewer)
    for path in DIALECTS:
        ask(server, path, theirs, **salted(owner))
        ask(server, path, mine, **salted(owner))
    ask(server, DIALECTS[0], mine, how="header", **salted(owner))
    key = ask(server, DIALECTS[0], mine, **salted(owner)).key
    server.http.post(f"/pool/entries/{key}/pin", headers=headed(owner))
    explain(server, DIALECTS[0], chat_body(mine, **salted(owner)))
    assert view(server, viewer) == before
    server.http.delete(f"/pool/entries/{key}/pin", headers=headed(owner))
    server.http.delete(f"/pool/entries/{key}", headers=headed(owner))
    assert view(server, viewer) == before
    if owner is not None:  # without a salt, all is removed
        server.http.delete("/pool/entries", headers=headed(owner))
        assert view(server, viewer) == before


@every_pair
@pytest.mark.parametrize("way", ["headers", "params"])
def test_another_s_key_is_a_key_that_nobody_has(
    server: Server, owner: str | None, viewer: str | None, way: str
) -> None:
    key = ask(server, DIALECTS[0], fresh(), **salted(owner)).key
    assert key is not None
    who: dict[str, Any] = {way: headed(viewer) if way == "headers" else salted(viewer)}
    verbs = (("GET", ""), ("DELETE", ""), ("POST", "/pin"), ("DELETE", "/pin"))
    for method, path in verbs:
        theirs, nobodys = (
            server.http.request(method, f"/pool/entries/{each}{path}", **who)
            for each in (key, "0" * 32)
        )
        assert theirs.status_code == nobodys.status_code == 404
        assert theirs.text.replace(key, "0" * 32) == nobodys.text
    entry = server.get(f"/pool/entries/{key}", headers=headed(owner))["entry"]
    assert not entry["pinned"]


@every_pair
@pytest.mark.parametrize("path", DIALECTS)
def test_what_another_asked_is_new(
    server: Server, path: str, owner: str | None, viewer: str | None
) -> None:
    known, unknown = fresh(), fresh()
    first = ask(server, path, known, **salted(owner))
    asked = [body_of(path, text, **salted(viewer)) for text in (known, unknown)]
    told = [explain(server, path, body) for body in asked]
    for name in told[0].keys() - {"key", "boundaries", "tokens", "text"}:
        assert told[0][name] == told[1][name], name
    assert told[0]["reason"] == "no_entry"
    second = ask(server, path, known, **salted(viewer))
    assert (second.cached, second.reason) == (0, "no_entry")
    assert second.key != first.key
    (newest, *_) = server.get("/pool", headers=headed(viewer))["requests"]
    assert (newest["parted_at"], newest["parted_in"]) == (
        told[1]["diverged_at"],
        told[1]["diverged_in"],
    )


@every_pair
def test_what_went_of_another_s_is_not_told(
    server: Server, owner: str | None, viewer: str | None
) -> None:
    text = fresh()
    ask(server, DIALECTS[0], text, **salted(owner))
    for _ in range(6):
        ask(server, DIALECTS[0], fresh(), **salted(owner))
    assert explain(server, DIALECTS[0], chat_body(text, **salted(owner)))["reason"] == "evicted"
    told = explain(server, DIALECTS[0], chat_body(text, **salted(viewer)))
    assert (told["reason"], told["matched"]) == ("no_entry", 0)


@every_pair
def test_what_another_runs_is_no_more_than_a_lane_that_is_taken(
    server: Server, scripted: tuple[Server, Voice], owner: str | None, viewer: str | None
) -> None:
    scripted[1].says("and so on " * 500)
    body = {**chat_body(fresh(), stream=True, **salted(owner)), "max_tokens": 1000}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = answer.iter_lines()
        while "reasoning_content" not in next(lines):
            pass
        mine = server.get("/pool", headers=headed(owner))["lanes"]
        theirs = server.get("/pool", headers=headed(viewer))["lanes"]
    (running,) = [lane for lane in mine if lane["state"] == "decode"]
    assert running["request"] is not None
    (taken,) = [lane for lane in theirs if lane["state"] != "idle"]
    assert taken["state"] == "busy"
    assert taken["lane"] == running["lane"]
    assert not [taken[name] for name in taken.keys() - {"state", "lane"} if taken[name]]
    server.idle()


def test_a_tenant_s_own_are_removed_whole(server: Server) -> None:
    """Also what was generated and nobody went on from, and nothing of others'."""
    text = fresh()
    for tenant in TENANTS:
        body = ask(server, DIALECTS[1], text, max_tokens=20, **salted(tenant)).body
        parting = text + body["choices"][0]["text"][:20] + " But no."
        assert ask(server, DIALECTS[1], parting, **salted(tenant)).cached > 0
    assert server.runner.pool.stats().superseded > 0
    for tenant in ("alpha", "omega"):
        mine = server.get("/pool", headers=headed(tenant))["entries"]
        removed = server.http.delete("/pool/entries", headers=headed(tenant)).json()["removed"]
        assert removed == len(mine) > 0
        assert server.get("/pool", headers=headed(tenant))["entries"] == []
        assert ask(server, DIALECTS[1], text, retain_prefix=False, **salted(tenant)).cached == 0
    assert {entry.namespace.salt for entry in server.runner.pool.entries()} == {None}
    before = server.get("/pool")["bytes"]["retained"]
    server.http.delete(f"/pool/entries/{server.get('/pool')['entries'][0]['key']}")
    assert server.get("/pool")["bytes"]["retained"] < before
    server.http.delete("/pool/entries")
    assert server.get("/pool")["bytes"]["retained"] == 0


def test_only_one_s_own_conversation_grows(server: Server) -> None:
    text = fresh()
    for tenant in TENANTS:
        first = ask(server, DIALECTS[0], text, **salted(tenant))
        again = ask(server, DIALECTS[0], text, **salted(tenant))
        assert (first.cached, again.cached) == (0, again.prompt)
        (entry,) = server.get("/pool", headers=headed(tenant))["entries"]
        assert entry["hits"] == 1
        assert entry["key"] == again.key


@pytest.mark.parametrize("salt", ["", "x" * 129, "a%00b"])
def test_a_salt_that_is_none_is_not_taken_for_no_salt(server: Server, salt: str) -> None:
    ask(server, DIALECTS[0], fresh())
    for method, path in (("GET", "/pool"), ("DELETE", "/pool/entries")):
        answer = server.http.request(method, f"{path}?cache_salt={salt}")
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "cache_salt"
    assert len(server.get("/pool")["entries"]) == 1


def test_a_salt_beyond_ascii_is_the_same_wherever_it_stands(server: Server) -> None:
    text, salt = fresh(), "zoë 漢字"
    key = ask(server, DIALECTS[0], text, cache_salt=salt).key
    headers = [(b"X-Cache-Salt", salt.encode())]
    answer = server.http.post(DIALECTS[0], json=body_of(DIALECTS[0], text), headers=headers)
    assert cached(answer.json()) > 0
    shown = [
        server.http.get("/pool", headers=headers).json()["entries"],
        server.http.get("/pool", params={"cache_salt": salt}).json()["entries"],
    ]
    assert [[entry["key"] for entry in entries] for entries in shown] == [[key], [key]]


def test_salts_are_told_nowhere(server: Server) -> None:
    ask(server, DIALECTS[0], fresh(), cache_salt="verysecret")
    server.idle()
    answers = [
        server.http.get("/pool", headers=headed("verysecret")).text,
        server.http.get("/pool").text,
        server.http.get("/metrics").text,
        server.http.get("/metrics", headers={"accept": "text/plain"}).text,
        *server.lines,
    ]
    assert not [text for text in answers if "verysecret" in text]
