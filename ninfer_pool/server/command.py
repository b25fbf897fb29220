"""`ninfer-pool serve`: load a model, print how much fits, and serve until a signal to stop."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from ninfer_pool.core.results import TierStats
from ninfer_pool.core.sizes import format_bytes
from ninfer_pool.errors import StoreError, UsageError
from ninfer_pool.runner import TINY, Runner
from ninfer_pool.runner.capacity import Capacity
from ninfer_pool.runner.loading import load_runner
from ninfer_pool.server.app import create_app
from ninfer_pool.server.chat_request import fields_of
from ninfer_pool.server.options import check_options
from ninfer_pool.server.request_log import RequestLog
from ninfer_pool.server.service import Service
from ninfer_pool.server.settings import MIB, Settings
from ninfer_pool.server.shutdown import FORCE_STOP_SECONDS, REQUESTS_SHARE, Deadline

SHIPPED_ID = "ninfer-tiny"
DRAFTS, LANES = 3, 4
PASSED_ON = (
    *("device", "dtype", "kv_dtype", "kv_budget", "max_context", "affinity", "min_chunk"),
    *("host_budget", "disk_dir", "disk_budget"),
)
"""Options that the runner has under the same name."""
SWITCH_SECONDS = 0.0005
"""How long the engine's thread may hold the interpreter while the server's thread waits."""


def serve(args: argparse.Namespace) -> None:
    """Run one command line; return when the server has stopped.

    Raises:
        PoolError: one line that names the mistake; no request was served.
    """
    check_options(args)
    with listen(args.host, args.port) as listener:
        print_line(f"loading {(args.model_id or [default_id(args.model)])[0]} …")
        log = RequestLog(args.request_log_jsonl) if args.request_log_jsonl else None
        runner = make_runner(args)
        service = Service(runner, settings=settings_of(args), log=log, print_line=print_line)
        print_start(service, listener, args)
        seconds = args.shutdown_seconds  # connections have a little more than requests to end
        drain = int(seconds * REQUESTS_SHARE) + (2 if seconds >= 20 else 1)
        config = uvicorn_config(service, log_level="warning", drain=drain)
        sys.setswitchinterval(SWITCH_SECONDS)
        _Server(config, service).run(sockets=[listener])


def uvicorn_config(service: Service, *, log_level: str, drain: int) -> uvicorn.Config:
    """Return uvicorn's configuration: the parser bounds headers and reads HTTP/1.0."""
    return uvicorn.Config(
        create_app(service),
        http="h11",
        log_level=log_level,
        access_log=False,
        timeout_graceful_shutdown=drain,
    )


class _Server(uvicorn.Server):
    """Ends within the stated time at the first signal, and at once at the second.

    In that time running requests end and the disk tier is written.
    """

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._signals = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        service, self.should_exit = self._service, True
        self._signals += 1
        if self._signals == 1:
            service.drain(Deadline(service.settings.shutdown_seconds, last=service.print_last))
        elif self._signals == 2:
            self._captured_signals.append(sig)  # the exit code names it
            deadline = Deadline(FORCE_STOP_SECONDS, last=service.print_last)
            service.force_stop(deadline, code=128 + sig)
        else:
            os._exit(128 + sig)


def listen(host: str, port: int) -> socket.socket:
    """Bind the address before the model is loaded, so that a mistake shows at once.

    Raises:
        UsageError: it cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        raise UsageError(f"--host, --port: {host}:{port}: {error.strerror or error}") from None
    # Connections inherit it. asyncio sets it only on sockets that name TCP, and this one does
    # not: a stream's first token would wait 40 ms for the client's acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def make_runner(args: argparse.Namespace) -> Runner:
    """Load the model with the pool of the options.

    Raises:
        PoolError: as `Runner.from_pretrained` does.
    """
    drafts = args.draft_tokens
    if drafts is None:
        drafts = DRAFTS if args.spec == "mtp" else 0
    pool: dict[str, Any] = {"max_entries": args.max_entries, "policy": args.policy or "default"}
    lanes = args.lanes or LANES
    if args.single_lane:
        pool, lanes = {"max_entries": 1, "policy": "lru"}, 1
    with _folder_named():
        return load_runner(
            args.model,
            draft_tokens=drafts,
            lanes=lanes,
            grid=args.prefill_chunk,
            clock=time.monotonic,
            **fields_of(args, *PASSED_ON),
            **pool,
        )


@contextmanager
def _folder_named() -> Iterator[None]:
    """Name the option in an error of the folder."""
    try:
        yield
    except StoreError as error:
        raise UsageError(f"--disk-dir: {error}") from None


def settings_of(args: argparse.Namespace) -> Settings:
    """Return the server's own settings from the options."""
    template: dict[str, Any] = {}
    if args.no_thinking:
        template["enable_thinking"] = False
    if args.preserve_thinking:
        template["preserve_thinking"] = True
    return Settings(
        model_ids=tuple(args.model_id or [default_id(args.model)]),
        max_request_bytes=args.max_request_mib * MIB,
        cors=tuple(args.cors),
        read=not args.no_prefix_reuse,
        retain=not args.no_prefix_reuse,
        template=template,
        **fields_of(args, "api_key", "default_max_tokens", "max_queue", "shutdown_seconds"),
        single_lane=args.single_lane,
    )


def default_id(model: str | None) -> str:
    """Return the name of a model's folder."""
    return SHIPPED_ID if model is None or Path(model) == TINY else Path(model).resolve().name


def print_start(service: Service, listener: socket.socket, args: argparse.Namespace) -> None:
    """Print the address, and how much fits (the most common wrong guess)."""
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    config = service.runner.pool.config
    most = "" if config.max_entries is None else f", at most {config.max_entries} entries"
    print_line(
        f"{service.settings.model_ids[0]} on http://{shown}:{port} (the pool's page is at /)"
    )
    print_line(
        f"pool: {service.runner.capacity}{most}; {config.lanes} lanes, policy {config.policy}"
    )
    for tier in service.runner.pool.stats().tiers:
        print_line(tier_line(service.runner, tier, args.disk_dir))
    if args.api_key is None and not (host.startswith("127.") or host == "::1"):
        print_line("warning: others can reach this address and no --api-key is required")


def tier_line(runner: Runner, tier: TierStats, folder: Path | None) -> str:
    """Return a line for a tier below the device: its capacity, and the entries found in it."""
    layout, size = runner.slab.layout, format_bytes(tier.budget_bytes)
    capacity = Capacity.of(layout, tier.budget_bytes // layout.page_bytes)
    holds = f"{size}: {capacity.tokens:,} tokens of KV, or {capacity.conversations:,} conversations"
    place, took = f"{tier.tier} tier", ""
    if tier.tier == "disk":
        place = f"disk tier {folder}"
        took = f"; indexed in {1000 * runner.tiers.opening_seconds:,.0f} ms"
    found = "empty"
    if tier.entries or tier.damaged:
        found = f"{tier.entries:,} entries with {tier.checkpoints:,} checkpoints found, "
        found += f"{format_bytes(tier.bytes)}, {tier.damaged:,} damaged"
    return f"{place}: {holds}; {found}{took}"


def print_line(line: str) -> None:
    """Print a line at once, also into a pipe."""
    print(line, flush=True)
