"""A request's body, read as far as it is allowed to go."""

from __future__ import annotations

from starlette.requests import Request

from ninfer_pool.server.errors import ApiError


async def read_body(request: Request, *, most: int) -> bytes:
    """Return the whole body of at most ``most`` bytes.

    Raises:
        ApiError: 413, as soon as it is known to be longer.
    """
    stated = request.headers.get("content-length", "")
    if stated.isdecimal() and int(stated) > most:
        raise _too_large(most)
    parts: list[bytes] = []
    length = 0
    async for part in request.stream():
        length += len(part)
        if length > most:
            raise _too_large(most)
        parts.append(part)
    return b"".join(parts)


def _too_large(most: int) -> ApiError:
    told = f"the body has more than {most >> 20} MiB; send less, or raise --max-request-mib"
    return ApiError(413, told)
