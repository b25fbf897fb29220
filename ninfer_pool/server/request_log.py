"""One line per request: on the console, and as JSON in a file that can be simulated.

The file holds lengths, where prompts diverge, and the outcome; never text, tokens, keys of the pool
or a salt. Clients' names for their conversations and tenants are replaced by numbers.
`ninfer_pool.sim.convert.server_log` reads it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from ninfer_pool.errors import ConfigError
from ninfer_pool.server.chat_request import OUTCOME, Report, fields_of
from ninfer_pool.server.request_matching import CELL_BYTES, Known, RequestMatcher, Tags
from ninfer_pool.sim.convert.radix import RadixTree
from ninfer_pool.sim.convert.server_log import FORMAT, VERSION

MOST_TOKENS: Final = 1 << 23
"""Tokens kept to find the longest shared prefix of a prompt: 32 MiB."""
KINDS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
    "/v1/messages": "messages",
}


def console_line(report: Report) -> str:
    """Return the console's line for a request that ended.

    Times are from arrival, queue included; ``ttft=-`` where there was no token. ``tier`` is there
    where a checkpoint was resumed.
    """
    first = f"{1000 * report.first_token_seconds:.1f}ms" if report.output_tokens else "-"
    tier = "" if report.tier is None else f" tier={report.tier}"
    return (
        f"[req {report.number}] done prompt={report.prompt_tokens} cache={report.cached_tokens} "
        f"reuse={report.reuse} ttft={first} reason={report.reason} out={report.output_tokens} "
        f"finish={report.finish} total={1000 * report.seconds:.1f}ms{tier}"
    )


@dataclass(kw_only=True, eq=False)
class Arrival:
    """A request that arrived and has no line yet; made by `RequestLog.arrive`."""

    id: int
    number: int
    t: float
    kind: str
    session: str
    tenant: str | None
    parent: int | None
    shared: int
    data: bytes
    forgotten: int

    @property
    def input(self) -> int:
        """The prompt's length in tokens."""
        return len(self.data) // CELL_BYTES


class RequestLog:
    """Appends to a file that only its owner can read. Thread-safe.

    A write that fails never fails a request: ``lost`` counts lost lines, and the first one is
    reported on stderr. O(tokens) per call at the speed of memcmp; ``most_tokens`` bounds the
    memory.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, path: Path | str, *, most_tokens: int = MOST_TOKENS) -> None:
        self._path = Path(path)
        self._mutex = threading.Lock()
        self._matcher = RequestMatcher(most_tokens=most_tokens)
        self._sessions, self._tenants = Tags("s"), Tags("t")
        self._running: weakref.WeakSet[Arrival] = weakref.WeakSet()
        self._run = secrets.token_hex(8)
        self._arrived = 0
        self._now = 0.0
        self.lost = 0
        """Lines that could not be written."""
        self._loss_reported = False
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
        try:
            self._file = os.open(self._path, flags, 0o600)
            self._torn = _ends_torn(self._file)
        except OSError as error:
            why = error.strerror or error
            raise ConfigError(f"request log: {path}; it cannot be opened: {why}") from error
        head = {"format": FORMAT, "version": VERSION, "run": self._run, "t": time.time()}
        self._head = _line(head)
        self._write(b"")

    def close(self) -> None:
        """Close the file; later lines count as lost."""
        with self._mutex:
            file, self._file = self._file, -1
            if file >= 0:
                os.close(file)

    def arrive(
        self,
        number: int,
        tokens: Sequence[int] | npt.NDArray[np.int32],
        *,
        endpoint: str,
        salt: str | None = None,
        hint: str | None = None,
        arrived: float | None = None,
    ) -> Arrival:
        """Add a prompt, in order of arrival; ``arrived`` in seconds since the epoch, None: now."""
        data = np.ascontiguousarray(tokens, dtype=np.int32).tobytes()
        with self._mutex:
            shared, parent = self._matcher.match(data)
            self._now = max(self._now, time.time() if arrived is None else arrived)
            tenant = None if salt is None else self._tenants.of(salt)
            arrival = Arrival(
                id=self._arrived,
                number=number,
                t=round(self._now, 6),
                kind=KINDS.get(endpoint, "other"),
                session=self._session(hint, tenant, parent, shared),
                tenant=tenant,
                parent=parent,
                shared=shared,
                data=data,
                forgotten=self._matcher.dropped,
            )
            self._arrived += 1
            self._remember(arrival, data, begin=0)
            self._running.add(arrival)
        return arrival

    def finish(
        self,
        arrival: Arrival,
        report: Report,
        *,
        output: Sequence[int] | npt.NDArray[np.int32],
        boundaries: Sequence[tuple[int, str]] = (),
    ) -> None:
        """Write the line of a request that ended, for any reason; ``output``: all its tokens."""
        made = np.ascontiguousarray(output, dtype=np.int32).tobytes()
        with self._mutex:
            self._running.discard(arrival)
            self._write(_line(self._record(arrival, report, len(output), boundaries)))
            if made:
                whole = arrival.data + made
                self._remember(arrival, whole, begin=arrival.input)
                self._match_running(arrival, whole)

    def _session(
        self, hint: str | None, tenant: str | None, parent: int | None, shared: int
    ) -> str:
        """Return the client's name by its number, else the session of the prompt it extends."""
        if hint is not None:
            return self._sessions.of(f"{tenant} {hint}")
        if parent is not None:
            known = self._matcher.known(parent)
            if shared >= known.input and tenant == known.tenant:
                return known.session
        return self._sessions.new()

    def _remember(self, arrival: Arrival, data: bytes, *, begin: int) -> None:
        known = Known(arrival.input, arrival.session, arrival.tenant)
        self._matcher.add(data, arrival.id, known, begin=begin)

    def _match_running(self, done: Arrival, whole: bytes) -> None:
        """Match prompts that arrived while ``done`` was generating: they may contain its output."""
        for other in self._running:
            if other.id > done.id and other.shared >= done.input:
                shared = common_tokens(whole, other.data)
                if shared > other.shared:
                    other.parent, other.shared = done.id, shared

    def _record(
        self,
        arrival: Arrival,
        report: Report,
        output: int,
        boundaries: Sequence[tuple[int, str]],
    ) -> dict[str, object]:
        return {
            "run": self._run,
            "id": arrival.id,
            "request": arrival.number,
            **fields_of(arrival, "t", "session", "kind", "tenant", "parent", "shared", "input"),
            "output": output,
            "boundaries": [[position, kind] for position, kind in boundaries],
            "retain": report.control.retain,
            "read": report.control.read,
            "forgotten": arrival.forgotten,
            "cached": report.cached_tokens,
            "retained": report.retained_tokens,
            **fields_of(report, *OUTCOME, "lane", "stream", "drafted", "accepted"),
            "queue_ms": _milliseconds(report.queued_seconds),
            "ttft_ms": _milliseconds(report.first_token_seconds) if output else None,
            "total_ms": _milliseconds(report.seconds),
            "tier": report.tier,
        }

    # -- the file --------------------------------------------------------------------------

    def _write(self, line: bytes) -> None:
        """Write a line, after the run's header, and end a line that broke off before."""
        begin = b"\n" if self._torn else b""
        data = left = begin + self._head + line
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            self.lost += bool(line)
            self._report_loss(error)
        written = data[: len(data) - len(left)]
        if len(written) >= len(begin + self._head):
            self._head = b""
        if written:
            self._torn = not written.endswith(b"\n")

    def _report_loss(self, error: OSError) -> None:
        if not self._loss_reported:
            self._loss_reported = True
            why = error.strerror or error
            text = f"{self._path}: the request log cannot be written ({why}); requests go on"
            with contextlib.suppress(OSError, ValueError):
                print(f"ninfer-pool: {text}", file=sys.stderr)


def common_tokens(one: bytes, other: bytes) -> int:
    """Return how many leading int32 tokens two sequences share. O(the shorter)."""
    tree = RadixTree(unit=CELL_BYTES)
    tree.add(one, 0)
    return tree.match(other)[0]


def _ends_torn(file: int) -> bool:
    """Return whether a file ends within a line: its server was killed."""
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or not status.st_size:
        return False
    return os.pread(file, 1, status.st_size - 1) != b"\n"


def _line(record: dict[str, object]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def _milliseconds(seconds: float) -> float | None:
    return round(1000 * seconds, 3) if isfinite(seconds) else None
