"""Who may call: the API key, and which pages a browser may call from."""

from __future__ import annotations

import base64
import ipaddress
import secrets
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ninfer_pool.server.errors import ApiError

OPEN = ("/health",)


class AccessGuard:
    """Lets a request through that shows the key and comes from no foreign page.

    The key comes as ``Authorization: Bearer``, as ``x-api-key``, or as the password of HTTP Basic,
    for which browsers ask. A request that names an origin, as browsers' do, is refused
    unless it is the server's own or one of ``origins``: without that, any page that a person
    opens could use a server on that person's machine. A page whose name was made to point to
    this machine would seem the server's own, so without a key a name that is not this machine's
    is refused where the connection comes from this machine.
    """

    def __init__(self, app: ASGIApp, *, api_key: str | None, origins: Sequence[str]) -> None:
        self._app = app
        self._key = None if api_key is None else api_key.encode()
        self._origins = frozenset(origins)
        self._names = frozenset(_hostname(_place(origin)) for origin in origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        error = self._refusal(scope, headers)
        if error is None:
            await self._app(scope, receive, send)
            return
        messages = scope["path"].startswith("/v1/messages")
        ask = {"www-authenticate": 'Basic realm="ninfer-pool"'} if error.status == 401 else {}
        content = error.anthropic() if messages else error.openai()
        await JSONResponse(content, status_code=error.status, headers=ask)(scope, receive, send)

    def _refusal(self, scope: Scope, headers: Headers) -> ApiError | None:
        origin, host = headers.get("origin"), headers.get("host", "")
        if origin is not None and not self._welcome(origin, host):
            told = f"pages of {origin} may not call; start the server with --cors {origin}"
            return ApiError(403, told)
        if scope["path"] in OPEN:
            return None
        if self._key is None and _from_here(scope) and not self._known(host):
            told = f"Host {host}: not a name of this machine; start the server with --api-key"
            return ApiError(403, f"{told} or --cors http://{host}")
        if self._key is None or self._shown(headers):
            return None
        told = "no valid API key; send it as Authorization: Bearer or x-api-key"
        return ApiError(401, told)

    def _welcome(self, origin: str, host: str) -> bool:
        if "*" in self._origins or origin in self._origins:
            return True
        return bool(host) and _place(origin) == host

    def _known(self, host: str) -> bool:
        name = _hostname(host)
        return "*" in self._origins or name in self._names or _of_this_machine(name)

    def _shown(self, headers: Headers) -> bool:
        # Headers were read as Latin-1: this gives the bytes that were sent.
        shown = [headers.get("x-api-key", "").encode("latin-1")]
        scheme, _, rest = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            shown.append(rest.strip().encode("latin-1"))
        elif scheme.lower() == "basic":
            shown.append(_password(rest.strip()))
        assert self._key is not None
        return any(secrets.compare_digest(each, self._key) for each in shown if each)


def _password(credentials: str) -> bytes:
    try:
        return base64.b64decode(credentials, validate=True).partition(b":")[2]
    except ValueError:
        return b""


def _from_here(scope: Scope) -> bool:
    """Whether the connection was made to an address that only this machine reaches."""
    server = scope.get("server")
    return server is not None and _is_loopback(server[0])


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _place(origin: str) -> str:
    """Host and port of an origin; none of "null", of pages that hide where they come from."""
    return origin.partition("://")[2]


def _hostname(host: str) -> str:
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return host


def _of_this_machine(name: str) -> bool:
    """Whether a Host is one that nobody elsewhere can point at this machine.

    Those are addresses, and names without a dot, which the world's name servers do not have.
    """
    if "." not in name or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
