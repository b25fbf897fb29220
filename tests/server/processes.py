"""`ninfer-pool serve` in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any

import httpx
import pytest

COMMAND = (sys.executable, "-m", "ninfer_pool", "serve")
SMALL = ("--kv-budget", "64MiB", "--dtype", "fp32", "--kv-dtype", "fp32")
ENDLESS = {"prompt": "a b c", "temperature": 1.5, "seed": 3, "max_tokens": 8000, "stream": True}
"""A request that goes on for far longer than any test."""
unix = pytest.mark.skipif(os.name != "posix", reason="needs signals")


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "", **more}


@dataclass
class Process:
    """A server in a process of its own."""

    inner: subprocess.Popen[str]
    out: list[str] = field(default_factory=list)
    err: list[str] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)

    def __post_init__(self) -> None:
        for pipe, lines in ((self.inner.stdout, self.out), (self.inner.stderr, self.err)):
            self.threads.append(threading.Thread(target=_collect, args=(pipe, lines)))
            self.threads[-1].start()

    def said(self, text: str) -> str:
        """Wait for a line that has the text."""
        until = time.monotonic() + 120
        while True:
            for line in list(self.out):
                if text in line:
                    return line
            assert self.inner.poll() is None, "".join(self.err)
            assert time.monotonic() < until, f"it never said {text!r}: {self.out}"
            time.sleep(0.01)

    @property
    def url(self) -> str:
        """Its address, as it says it."""
        return self.said(" on http://").split(" on ")[1].split()[0]

    def wait(self, seconds: float) -> int:
        """Wait for its end; return its exit code, a signal's as the shell tells it."""
        code = self.inner.wait(timeout=seconds)
        for thread in self.threads:
            thread.join(timeout=10)
        return 128 - code if code < 0 else code

    def end(self) -> None:
        """End it, however."""
        self.inner.kill()
        self.wait(30)
        for pipe in (self.inner.stdout, self.inner.stderr):
            assert pipe is not None
            pipe.close()


def _collect(pipe: IO[str] | None, lines: list[str]) -> None:
    assert pipe is not None
    lines.extend(pipe)


@contextmanager
def started(*options: str, port: int = 0, command: Sequence[str] = COMMAND) -> Iterator[Process]:
    """A server on a port that is free."""
    line = (*command, "--port", str(port), *SMALL, *options)
    pipe = subprocess.PIPE
    process = Process(
        subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True, env=environment())
    )
    try:
        yield process
    finally:
        process.end()


@contextmanager
def streaming(process: Process, body: dict[str, Any]) -> Iterator[Iterator[str]]:
    """A stream of a request whose first event has come: the lines that follow."""
    with httpx.stream("POST", f"{process.url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        yield lines
