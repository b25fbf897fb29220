"""Servers with tiers below a device that is too small for what is asked of them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tests.server.talks import Talk, prompted, prose, system
from tests.server.world import Server, cached

SMALL_DEVICE = "4MiB"
"""Room for two or three short conversations."""
ROOMY = "256MiB"


def on_disk(folder: Path, budget: str = ROOMY) -> dict[str, Any]:
    """Options of a server that has a disk tier."""
    return {"disk_dir": folder, "disk_budget": budget}


def talks(server: Server, count: int, *, words: int = 120) -> list[Talk]:
    """Conversations of their own, not begun."""
    return [Talk(server, [system(prose(number, words))]) for number in range(count)]


def rotated(server: Server, *, chats: int, rounds: int) -> tuple[int, int, list[str]]:
    """Hold several conversations in turn; return tokens reused, tokens prompted, and what was
    answered."""
    held, reused, asked = talks(server, chats, words=90), 0, 0
    answers: list[str] = []
    for number in range(rounds):
        for talk in held:
            body = talk.turn(f"Question {number} of it: what of the sea?", max_tokens=4)
            reused += cached(body)
            asked += prompted(body)
            answers.append(talk.messages[-1]["content"])
    server.idle()
    return reused, asked, answers


def tier_of(body: dict[str, Any]) -> str | None:
    """Where an answer says that it was resumed from."""
    tier: str | None = body["pool"]["tier"]
    return tier


def tiers(server: Server) -> dict[str, dict[str, Any]]:
    """What the pool says of each tier below the device."""
    return {tier["tier"]: tier for tier in server.get("/pool")["tiers"]}


def pressed(server: Server, *, since: int = 100, count: int = 6) -> None:
    """Ask other questions until what was there before has no room on the device."""
    for number in range(since, since + count):
        Talk(server, [system(prose(number, 120))]).turn("What of it?")
    settled(server)


def settled(server: Server) -> None:
    """Wait until nothing runs, and nothing is being stored either."""
    server.idle()
    before, until = None, time.monotonic() + 30
    while before != (before := server.runner.pool.stats()) or server.runner.tiers.down.worker.busy:
        assert time.monotonic() < until, "something is being stored for ever"
        time.sleep(0.12)  # more than two of the engine's looks
