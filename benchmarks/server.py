"""Measure how much time pool and server add to the runner's own.

python benchmarks/server.py [--repeats N] [--json FILE]

Times to first token are a client's, over HTTP, of chat prompts of about 2,000 tokens. The floor of
a row is the runner's own time for the same request, without its calls for the pool.
"""

from __future__ import annotations

import http.client
import json
import platform
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import uvicorn

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common.command import BenchmarkParser
from benchmarks.common.ratios import Ratio, RatioReport, ratio
from ninfer_pool.core.lease import Lease
from ninfer_pool.runner import TINY, Runner
from ninfer_pool.server.command import SWITCH_SECONDS, listen, uvicorn_config
from ninfer_pool.server.service import Service
from ninfer_pool.server.settings import Settings

MODEL = "ninfer-tiny"
TOKENS = 2000
RESUMED = 0.1
"""Limit: a resumed turn's time to first token over a cold one's."""
OVERHEAD_MS = 3.0
"""Limit: the median time that pool and server add to the runner's own."""
SHAPES = (
    "one message, cold",
    "one message, again",
    "12 turns, cold",
    "12 turns, again",
    "13th turn",
)


class Clock:
    """Adds up the runner's own time: its steps without their calls for the pool."""

    def __init__(self) -> None:
        self.nanoseconds = 0
        self._inside = False

    @contextmanager
    def watching(self, runner: Runner) -> Iterator[None]:
        """Count while the block runs."""
        with ExitStack() as patches:
            for owner, name, own in (
                (runner, "prefill", True),  # up to the first token nothing else runs
                (Lease, "advance", False),
                (Lease, "checkpoint", False),
                (runner.slab, "execute", False),
            ):
                timed = self._timed(getattr(owner, name), own=own)
                patches.enter_context(mock.patch.object(owner, name, timed))
            yield

    def _timed(self, inner: Any, *, own: bool) -> Any:
        def timed(*args: Any, **options: Any) -> Any:
            counts = own or self._inside  # calls of the pool between the steps do not count
            self._inside |= own
            begun = time.perf_counter_ns()
            try:
                return inner(*args, **options)
            finally:
                spent = time.perf_counter_ns() - begun
                self.nanoseconds += (spent if own else -spent) if counts else 0
                self._inside &= not own

        return timed


@contextmanager
def serving() -> Iterator[tuple[Service, int]]:
    """Yield a service and the port of its server in this process."""
    runner = Runner.from_pretrained(TINY, dtype="fp32", kv_dtype="bf16", kv_budget="256MiB")
    service = Service(runner, settings=Settings(model_ids=(MODEL,)), print_line=lambda _: None)
    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn_config(service, log_level="error", drain=2))
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]), daemon=True)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield service, listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def first_token(
    connection: http.client.HTTPConnection, messages: list[dict[str, str]]
) -> tuple[int, dict[str, Any]]:
    """Return nanoseconds from a request to its first token, and the stream's own timings."""
    body = json.dumps(
        {"model": MODEL, "messages": messages, "max_tokens": 4, "temperature": 0, "stream": True,
         "enable_thinking": False}
    )  # fmt: skip
    begun = time.perf_counter_ns()
    connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    taken, timings = 0, {}
    while line := answer.readline():
        if not taken and b'"content":"' in line and b'"content":""' not in line:
            taken = time.perf_counter_ns() - begun
        if b'"timings":' in line:
            timings = json.loads(line.removeprefix(b"data: "))["timings"]
    assert taken, "no token came"
    return taken, timings


def one_question(number: int) -> list[dict[str, str]]:
    """Return about `TOKENS` tokens in one message, another one for each number."""
    text = "She walked to the window and saw that the garden was as it had been in the spring. "
    return [{"role": "user", "content": f"Question {number}. " + text * (TOKENS // 21)}]


def conversation(service: Service, number: int) -> list[dict[str, str]]:
    """Return about `TOKENS` tokens of chat, another one for each number."""
    text = "She walked to the window and saw that the garden was as it had been in the spring. "
    messages = [{"role": "system", "content": f"Conversation {number}. " + text * 4}]
    while True:
        messages.append({"role": "user", "content": f"Part {len(messages)}. " + text * 3})
        assert service.chat is not None
        if len(service.chat.render(messages, enable_thinking=False).tokens) >= TOKENS:
            return messages
        messages.append({"role": "assistant", "content": text * 3})


def measure(repeats: int) -> list[Ratio]:
    """Compare cold and repeated prompts and the next turn with the runner's own time."""
    taken: dict[str, list[int]] = {name: [] for name in SHAPES}
    own: dict[str, list[int]] = {name: [] for name in SHAPES}
    clock = Clock()
    with serving() as (service, port), clock.watching(service.runner):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

        def ask(name: str, messages: list[dict[str, str]]) -> None:
            clock.nanoseconds = 0
            spent, timings = first_token(connection, messages)
            taken[name].append(spent)
            own[name].append(clock.nanoseconds)
            check(name, timings)

        for number in range(repeats + 1):
            messages = one_question(number)
            ask(SHAPES[0], messages)
            ask(SHAPES[1], messages)
            messages = conversation(service, number)
            ask(SHAPES[2], messages)
            ask(SHAPES[3], messages)
            reply = {"role": "assistant", "content": "It was a fine morning."}
            ask(SHAPES[4], [*messages, reply, {"role": "user", "content": "And what then?"}])
    for times in (*taken.values(), *own.values()):
        del times[0]  # warming up
    return _rows(taken, own)


def check(name: str, timings: dict[str, Any]) -> None:
    """Confirm that a request resumed as many tokens as its row requires."""
    cached, prompt = timings["cache_n"], timings["cache_n"] + timings["prompt_n"]
    least = {"cold": 0, "again": prompt, "turn": TOKENS - 100}[name.split()[-1]]
    most = TOKENS // 10 if "cold" in name else prompt
    assert least <= cached <= most, (name, timings)


def _rows(taken: dict[str, list[int]], own: dict[str, list[int]]) -> list[Ratio]:
    rows = []
    for name, times in taken.items():
        added = statistics.median(a - b for a, b in zip(times, own[name], strict=True)) / 1e6
        verdict = "" if added <= OVERHEAD_MS else " (missed)"
        note = f"pool and server add {added:.2f} ms, figure ≤ {OVERHEAD_MS:g}{verdict}"
        shape = f"{TOKENS:,} tokens, {name}"
        rows.append(
            ratio("first token", shape, times, own[name], beside="the runner alone", note=note)
        )
    rows.append(
        ratio(
            "first token",
            f"{TOKENS:,} tokens, 13th turn",
            taken[SHAPES[4]],
            taken[SHAPES[2]],
            beside="cold",
            at_most=RESUMED,
        )
    )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the JSON."""
    parser = BenchmarkParser(__doc__)
    parser.add_argument("--repeats", type=int, default=15, metavar="N")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_SECONDS)
    with parser.checked(args):
        RatioReport(
            device=f"cpu, {platform.machine()}, 1 thread",
            model="tiny, as shipped, fp32",
            results=measure(args.repeats),
        ).publish(args.json)


if __name__ == "__main__":
    main()
