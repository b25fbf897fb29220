"""Converts public traces and logs to traces of this project's format."""

from __future__ import annotations

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
    if source == "mooncake":
        trace = convert_mooncake(path)
    elif source == "kv-cache-tester":
        trace = convert_sessions(path)
    elif source == "openai-jsonl":
        trace = convert_chat(path, tokenizer=tokenizer)
    elif source == "server-log":
        trace = convert_server_log(path)
    else:
        raise TraceError(f"source {source}: unknown; must be one of {', '.join(SOURCES)}")
    check_trace(trace)
    return trace
