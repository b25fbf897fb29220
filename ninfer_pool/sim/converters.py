"""Converts public traces and logs to traces of this project's format."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, Literal

from ninfer_pool.errors import TraceError
from ninfer_pool.sim.convert.chat import convert_chat
from ninfer_pool.sim.convert.mooncake import convert_mooncake
from ninfer_pool.sim.convert.server_log import convert_server_log
from ninfer_pool.sim.convert.sessions import convert_sessions
from ninfer_pool.sim.trace import Trace, check_trace

Source = Literal["mooncake", "kv-cache-tester", "openai-jsonl", "server-log"]
SOURCES: Final[tuple[Source, ...]] = ("mooncake", "kv-cache-tester", "openai-jsonl", "server-log")


def convert(source: Source, path: Path | str, *, tokenizer: Path | None = None) -> Trace:
    """Convert a file, or for ``kv-cache-tester`` a folder of sessions, to a trace.

    The modules of `ninfer_pool.sim.convert` state each converter's rules. `tokenizer` is a
    ``tokenizer.json`` for ``openai-jsonl``; without it positions are UTF-8 bytes. The header
    names the kind of positions.

    Raises:
        TraceError: input of another shape; the message names file, line and field.
    """
    path = Path(path)
    converters: dict[str, Callable[[Path], Trace]] = {
        "mooncake": convert_mooncake,
        "kv-cache-tester": convert_sessions,
        "openai-jsonl": partial(convert_chat, tokenizer=tokenizer),
        "server-log": convert_server_log,
    }
    if source not in converters:
        raise TraceError(f"source {source}: unknown; must be one of {', '.join(SOURCES)}")
    trace = converters[source](path)
    check_trace(trace)
    return trace
