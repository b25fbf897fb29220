"""Access control: the API key, the web pages that a browser may call from, and bodies' sizes."""

from __future__ import annotations

import base64
import ipaddress
import secrets
from collections.abc import AsyncIterator, Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Receive, Scope, Send

from ninfer_pool.server.errors import ApiError, error_response

OPEN = ("/health",)


class AccessGuard:
    """Middleware that passes a request with the right key and from an allowed web page.

    The key is sent as ``Authorization: Bearer``, as ``x-api-key``, or as the password of HTTP
    Basic, which browsers prompt for.

    A browser names the origin of the page that sends a request. It must be the server's own or one
    of ``origins``: otherwise any page open in a browser could use a server on that machine. An
    attacker's domain that resolves to this machine would look like the server's own. So without a
    key, a local connection must use a name of this machine.
    """

    def __init__(self, app: ASGIApp, *, api_key: str | None, origins: Sequence[str]) -> None:
        self._app = app
        self._key = None if api_key is None else api_key.encode()
        self._origins = frozenset(origins)
        self._names = frozenset(_hostname(_host(origin)) for origin in origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer: ASGIApp = self._app
        if scope["type"] == "http" and (error := self._refusal(scope, Headers(scope=scope))):
            prompt = 'Basic realm="ninfer-pool"'
            headers = {"www-authenticate": prompt} if error.status == 401 else None
            answer = error_response(error, scope["path"], headers=headers)
        await answer(scope, receive, send)

    def _refusal(self, scope: Scope, headers: Headers) -> ApiError | None:
        origin, host = headers.get("origin"), headers.get("host", "")
        if origin is not None and not self._allows(origin, host):
            return ApiError(
                403, f"pages of {origin} may not call; start the server with --cors {origin}"
            )
        if scope["path"] in OPEN:
            return None
        if self._key is None:
            if not _is_local(scope) or self._has_name(host):
                return None
            text = f"--api-key or --cors http://{host}"
            return ApiError(
                403, f"Host {host}: not a name of this machine; start the server with {text}"
            )
        if any(secrets.compare_digest(each, self._key) for each in _keys(headers)):
            return None
        return ApiError(401, "no valid API key; send it as Authorization: Bearer or x-api-key")

    def _allows(self, origin: str, host: str) -> bool:
        own = bool(host) and _host(origin) == host
        return own or not self._origins.isdisjoint(("*", origin))

    def _has_name(self, host: str) -> bool:
        """Return whether a Host cannot be an attacker's name for this machine.

        Addresses cannot, nor names without a dot: public name servers have none.
        """
        name = _hostname(host)
        if "*" in self._origins or name in self._names:
            return True
        return "." not in name or name.endswith(".localhost") or _address(name) is not None


async def body_parts(request: HttpRequest, most: int, *, too_large: str) -> AsyncIterator[bytes]:
    """Yield a request's body.

    Raises:
        ApiError: 413, as soon as the body is known to have more than ``most`` bytes.
    """
    stated = request.headers.get("content-length", "")
    if stated.isdecimal() and int(stated) > most:
        raise ApiError(413, too_large)
    length = 0
    async for part in request.stream():
        length += len(part)
        if length > most:
            raise ApiError(413, too_large)
        yield part


def _keys(headers: Headers) -> list[bytes]:
    """Return every key that a request sends, as bytes; headers were decoded as Latin-1."""
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    keys = [headers.get("x-api-key", "").encode("latin-1")]
    if scheme.lower() == "bearer":
        keys.append(credentials.strip().encode("latin-1"))
    elif scheme.lower() == "basic":
        keys.append(_password(credentials.strip()))
    return [key for key in keys if key]


def _password(credentials: str) -> bytes:
    try:
        return base64.b64decode(credentials, validate=True).partition(b":")[2]
    except ValueError:
        return b""


def _is_local(scope: Scope) -> bool:
    """Return whether the connection was made to an address that only this machine reaches."""
    server = scope.get("server")
    address = _address(server[0]) if server else None
    return address is not None and address.is_loopback


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _host(origin: str) -> str:
    """Return host and port of an origin; empty for "null", a page without an origin."""
    return origin.partition("://")[2]


def _hostname(host: str) -> str:
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return host
