"""Entries as files: one is downloaded here and uploaded to a server of the same weights.

A file is stored in a temporary folder of its own, which is removed when the request ends.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, Response
from starlette.types import Receive, Scope, Send

from ninfer_pool.core.sizes import format_bytes
from ninfer_pool.errors import RoomError, StoreError
from ninfer_pool.server.access import body_parts
from ninfer_pool.server.errors import ApiError, invalid
from ninfer_pool.server.service import Service

HEADER_BYTES = 48 << 20
"""The largest header of a file."""
TOKEN_BYTES = 4
WRITE_BYTES = 1 << 20
"""Bytes of an upload that are written at once."""
NO_SPACE = 507


def most_bytes(service: Service) -> int:
    """Return the largest size of an entry's file: the whole slab, its tokens and a header."""
    config = service.runner.pool.config
    page = config.page_bytes + config.page_tokens * TOKEN_BYTES
    return config.num_pages * page + HEADER_BYTES


@asynccontextmanager
async def _folder() -> AsyncIterator[Path]:
    """Make a folder that only its owner can read, and remove it at the end."""
    try:
        folder = await asyncio.to_thread(tempfile.mkdtemp, prefix="ninfer-pool-")
    except OSError as error:
        raise ApiError(NO_SPACE, f"file: no room for it: {error.strerror or error}") from None
    try:
        yield Path(folder)
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


async def download(service: Service, key: str, *, tokens: bool) -> Response:
    """Return an entry as a file.

    Raises:
        ApiError: it was evicted meanwhile, or there is no room for the file.
    """
    pool = service.runner.pool
    async with AsyncExitStack() as stack:
        path = await stack.enter_async_context(_folder()) / f"{key}.safetensors"
        try:
            await service.between_steps(lambda: pool.save(key, path, tokens=tokens))
        except StoreError as error:
            if not pool.find(key):
                raise ApiError(404, f"no entry has the key {key!r}", param="key") from None
            raise ApiError(NO_SPACE, f"file: {error}") from None
        return _TemporaryFile(path, stack.pop_all())


class _TemporaryFile(FileResponse):
    """A file whose folder is removed when it was sent, or when its client disconnected."""

    def __init__(self, path: Path, folder: AsyncExitStack) -> None:
        super().__init__(path, filename=path.name, media_type="application/octet-stream")
        self._folder = folder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._folder:
            await super().__call__(scope, receive, send)


async def upload(service: Service, request: HttpRequest, *, salt: str | None) -> dict[str, Any]:
    """Retain the entry of the file in a request's body; return its key and checkpoints.

    Raises:
        ApiError: too large, damaged, of another model or salt, or no room for it.
    """
    if not service.settings.retain:
        raise ApiError(409, "file: this server keeps nothing (--no-prefix-reuse)")
    async with _folder() as folder:
        path = folder / "upload"
        await _receive(request, path, most=most_bytes(service))
        key = await _load(service, path, salt)
    found = [info for info in service.runner.pool.find(key) if info.namespace.salt == salt]
    if not found:
        raise ApiError(503, f"entry {key}: it had to make room for others at once", param="key")
    return {
        "key": key,
        "tokens": found[0].tokens,
        "checkpoints": [{"position": at, "kind": kind} for at, kind in found[0].checkpoints],
    }


async def _receive(request: HttpRequest, path: Path, *, most: int) -> None:
    text = (
        f"file: more than {most} bytes ({format_bytes(most)}), the most that an entry can take "
        "here; needs a smaller one, or a larger --kv-budget"
    )
    gathered = bytearray()
    with path.open("xb") as file:
        async for part in body_parts(request, most, too_large=text):
            gathered += part
            if len(gathered) >= WRITE_BYTES:
                await asyncio.to_thread(_write, file, bytes(gathered))
                gathered.clear()
        await asyncio.to_thread(_write, file, bytes(gathered))
    if not path.stat().st_size:
        raise invalid("file: empty; needs what GET /pool/entries/{key}/file gave", param="file")


def _write(file: Any, data: bytes) -> None:
    try:
        file.write(data)
        file.flush()
    except OSError as error:
        raise ApiError(NO_SPACE, f"file: it cannot be kept: {error.strerror or error}") from None


async def _load(service: Service, path: Path, salt: str | None) -> str:
    pool = service.runner.pool
    try:
        await asyncio.to_thread(_check_salt, path, salt)
        return await service.between_steps(lambda: pool.load(path))
    except RoomError as error:
        raise ApiError(503, f"file: {error}".replace(f"{path}: ", "")) from None
    except StoreError as error:
        raise invalid(f"file: {error}".replace(f"{path}: ", ""), param="file") from None


def _check_salt(path: Path, salt: str | None) -> None:
    from ninfer_pool.tiers.disk.bundle import read_bundle

    with read_bundle(path) as reader:
        bundle = reader.bundle
    if reader.has_tokens and bundle.namespace.salt != salt:
        wanted = "the one that it was saved under" if bundle.salted else "none"
        raise ApiError(403, f"cache_salt: not that of the file; send {wanted}", param="cache_salt")
