"""Who may call: the key, pages of other origins, and names that point to this machine."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from ninfer_pool.server.app import create_app
from tests.server.raw import ask, request, talk
from tests.server.world import MODEL, Server, chat_body, serve

KEY = "schlüssel-0123456789"
PAGE = "https://chat.example"


@pytest.fixture(scope="module")
def locked() -> Iterator[Server]:
    """A server that asks for a key."""
    with serve({"api_key": KEY}) as server:
        yield server


@pytest.fixture(scope="module")
def local() -> Iterator[Server]:
    """A server without a key, on loopback."""
    with serve() as server:
        yield server


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    """A server that one page of another origin may use, with the key."""
    with serve({"api_key": KEY, "cors": (PAGE,)}) as server:
        yield server


def endpoints(server: Server) -> list[tuple[str, str]]:
    """Every method and path there is, as the application itself lists them."""
    found = []
    for route in create_app(server.service).routes:
        assert isinstance(route, Route), "a route of a new kind: say here how it is guarded"
        path = route.path.replace("{key}", "0" * 32).replace("{name:path}", MODEL)
        found += [(method, path) for method in sorted(route.methods or ())]
    return found


def shown(*headers: str) -> dict[str, str]:
    return dict(header.split(": ", 1) for header in headers)


def test_without_the_key_there_is_nothing_but_health(locked: Server) -> None:
    listed = endpoints(locked)
    assert len(listed) > 15
    for method, path in listed:
        status = locked.http.request(method, path).status_code
        assert status == (200 if path == "/health" else 401), (method, path)


@pytest.mark.parametrize("path", ["/nowhere", "/health/", "/health/x", "/HEALTH", "//health"])
@pytest.mark.parametrize("method", ["GET", "OPTIONS", "PATCH", "TRACE"])
def test_without_the_key_even_what_is_not_there_is_not_told(
    locked: Server, method: str, path: str
) -> None:
    assert ask(locked, path, method=method).status == 401


def test_with_the_key_there_is_all(locked: Server) -> None:
    for method, path in endpoints(locked):
        answer = locked.http.request(method, path, headers=[(b"x-api-key", KEY.encode())])
        assert answer.status_code not in (401, 403), (method, path)


def basic(name: str, word: str) -> bytes:
    return b"Basic " + base64.b64encode(f"{name}:{word}".encode())


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("authorization", b"Bearer " + KEY.encode()),
        ("authorization", b"bearer  " + KEY.encode()),
        ("authorization", basic("", KEY)),
        ("authorization", basic("anyone", KEY)),
        ("x-api-key", KEY.encode()),
    ],
)
def test_ways_to_show_the_key(locked: Server, header: str, value: bytes) -> None:
    assert locked.http.get("/pool", headers=[(header.encode(), value)]).status_code == 200


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("authorization", KEY.encode()),
        ("authorization", b"Bearer"),
        ("authorization", b"Bearer " + KEY.encode()[:-1]),
        ("authorization", b"Bearer " + KEY.encode() + b"0"),
        ("authorization", b"Bearer " + KEY.upper().encode()),
        ("authorization", b"Bearer \xff\xfe"),
        ("authorization", b"Digest " + KEY.encode()),
        ("authorization", basic(KEY, "")),
        ("authorization", b"Basic"),
        ("authorization", b"Basic \xc3\xa9\xff"),
        ("authorization", b"Basic !!!!"),
        ("authorization", b"Basic " + base64.b64encode(b"\xff\xfe")),
        ("authorization", b"Basic " + base64.b64encode(KEY.encode())),
        ("x-api-key", b""),
        ("x-api-key", b"Bearer " + KEY.encode()),
        ("cookie", b"x-api-key=" + KEY.encode()),
    ],
)
def test_what_is_not_the_key(locked: Server, header: str, value: bytes) -> None:
    answer = locked.http.get("/pool", headers=[(header.encode(), value)])
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Basic ")
    assert answer.json()["error"]["type"] == "authentication_error"
    assert KEY not in answer.text


def test_the_key_in_an_address_is_not_looked_at(locked: Server) -> None:
    assert locked.http.get("/pool", params={"api_key": KEY, "key": KEY}).status_code == 401


def test_refusals_have_the_shape_of_the_client_that_asked(locked: Server) -> None:
    ours, theirs = (
        locked.http.post(path, json={}).json() for path in ("/v1/chat/completions", "/v1/messages")
    )
    assert ours["error"]["code"] == "invalid_api_key"
    assert theirs["type"] == "error"
    assert theirs["error"]["type"] == "authentication_error"


def test_the_key_is_compared_in_a_time_that_does_not_depend_on_it(
    locked: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[Any, Any]] = []
    timing_safe = secrets.compare_digest

    def compare(shown: Any, wanted: Any) -> bool:
        compared.append((shown, wanted))
        return timing_safe(shown, wanted)

    monkeypatch.setattr("secrets.compare_digest", compare)
    assert locked.http.get("/pool", headers={"x-api-key": "x"}).status_code == 401
    assert compared == [(b"x", KEY.encode())]


def test_a_body_is_not_read_before_the_key_is_shown(locked: Server) -> None:
    told = talk(locked, request("/v1/chat/completions", length=10**9))
    assert told.startswith(b"HTTP/1.1 401 ")


# -- pages of other origins -----------------------------------------------------------------


def test_a_page_of_another_origin_may_not_call(local: Server) -> None:
    for origin in (PAGE, "null", "http://127.0.0.1:1", "http://localhost", "", "x", "http://"):
        answer = local.http.post(
            "/v1/chat/completions", json=chat_body("Hi."), headers={"origin": origin}
        )
        assert answer.status_code == 403, origin
        assert "access-control-allow-origin" not in answer.headers
        assert "--cors" in answer.json()["error"]["message"]
    assert local.get("/pool")["entries"] == []


def test_the_server_s_own_page_may(local: Server) -> None:
    assert local.http.get("/pool", headers={"origin": local.url}).status_code == 200


def test_a_page_that_hides_its_origin_may_not_even_without_a_host(local: Server) -> None:
    data = b"GET /pool HTTP/1.0\r\nOrigin: null\r\n\r\n"
    assert talk(local, data).startswith(b"HTTP/1.1 403 ")


def test_a_preflight_of_a_stranger_is_refused(local: Server, shared: Server) -> None:
    asked = shown("access-control-request-method: POST", "origin: https://other.example")
    for server in (local, shared):
        answer = server.http.options("/v1/chat/completions", headers=asked)
        assert answer.status_code in (400, 403)
        assert "access-control-allow-origin" not in answer.headers


def test_a_welcome_page_asks_first_without_the_key_then_with_it(shared: Server) -> None:
    wanted = ["authorization", "content-type", "x-cache-salt", "x-retain-prefix"]
    asked = shown(
        f"origin: {PAGE}",
        "access-control-request-method: POST",
        f"access-control-request-headers: {','.join(wanted)}",
    )
    preflight = shared.http.options("/v1/chat/completions", headers=asked)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == PAGE
    assert all(name in preflight.headers["access-control-allow-headers"] for name in wanted)
    key = [(b"authorization", b"Bearer " + KEY.encode()), (b"origin", PAGE.encode())]
    answer = shared.http.post("/v1/chat/completions", json=chat_body("Hi."), headers=key)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE


def test_a_welcome_page_reads_why_it_is_refused_but_needs_the_key(shared: Server) -> None:
    answer = shared.http.get("/pool", headers={"origin": PAGE})
    assert answer.status_code == 401
    assert answer.headers["access-control-allow-origin"] == PAGE


def test_a_star_welcomes_all() -> None:
    with serve({"cors": ("*",)}) as server:
        for origin in (PAGE, "null"):
            answer = server.http.get("/pool", headers={"origin": origin})
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] == "*"
        assert server.http.get("/pool", headers={"host": "chat.example"}).status_code == 200


# -- names that were made to point to this machine -------------------------------------------


def by_name(server: Server, host: str, **headers: str) -> httpx.Response:
    return server.http.get("/pool", headers={"host": host, **headers})


def test_without_a_key_a_foreign_name_does_not_reach_this_machine(local: Server) -> None:
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "a.b."):
        own = f"http://{host}"  # what a browser says of a page that was loaded by that name
        for headers in ({}, {"origin": own}):
            assert by_name(local, host, **headers).status_code == 403, host


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "localhost:8000", "LOCALHOST", "localhost.", "chat.localhost:1"),
        *("127.0.0.1", "[::1]:8000", "192.168.0.7:8000", "gpu-box"),
    ],
)
def test_names_of_this_machine_do(local: Server, host: str) -> None:
    assert by_name(local, host).status_code == 200


def test_with_a_key_or_a_welcome_page_a_name_may_be_any(locked: Server) -> None:
    answer = by_name(locked, "chat.example", **{"authorization": "Bearer x"})
    assert answer.status_code == 401  # no 403: the key decides
    with serve({"cors": (PAGE,)}) as server:
        assert by_name(server, "chat.example").status_code == 200
        assert by_name(server, "evil.example").status_code == 403


def test_health_is_told_by_any_name(local: Server) -> None:
    assert local.http.get("/health", headers={"host": "evil.example"}).status_code == 200
