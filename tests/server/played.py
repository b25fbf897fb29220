"""A workload played through a pool and a request log, one request after the other."""

from __future__ import annotations

from pathlib import Path

from ninfer_pool.core.config import PoolConfig
from ninfer_pool.core.identity import Namespace
from ninfer_pool.core.lease import Lease
from ninfer_pool.core.pool import PrefixPool
from ninfer_pool.core.prompt import Prompt
from ninfer_pool.server.chat_request import Control, Report
from ninfer_pool.server.request_log import RequestLog
from ninfer_pool.sim.tokens import TokenSource
from ninfer_pool.sim.trace import Trace, TraceRequest
from tests.server.made_reports import report


def play(trace: Trace, path: Path, config: PoolConfig) -> list[Report]:
    """Serve a trace's requests as a server with one lane does; return what came of each."""
    source, pool, log = TokenSource(trace), PrefixPool(config), RequestLog(path)
    reports = [_serve(request, source, pool, log) for request in trace.requests]
    log.close()
    pool.check()
    return reports


def _serve(request: TraceRequest, source: TokenSource, pool: PrefixPool, log: RequestLog) -> Report:
    tokens, output = source.prompt(request.id), source.output(request.id)
    control = Control(salt=request.salt, hint=request.session, retain=request.retain)
    arrival = log.arrive(
        request.id + 1,
        tokens,
        endpoint="/v1/chat/completions",
        salt=request.salt,
        hint=request.session,
        arrived=1e9 + request.t,
    )
    space = Namespace(weights="w", kv_dtype="bf16", salt=request.salt)
    prompt = Prompt(tokens, namespace=space, boundaries=request.boundaries)
    lease = pool.acquire(prompt, reserve_tokens=len(output), retain=request.retain)
    assert isinstance(lease, Lease), pool.last_refusal
    for chunk in lease.chunks():
        lease.advance(tokens[chunk.begin : chunk.end])
        if chunk.checkpoint is not None:
            lease.checkpoint(chunk.checkpoint, position=chunk.end)
    if len(output) > 1:
        lease.advance(output[:-1])
    lease.checkpoint("frontier", position=lease.frontier)
    key = lease.commit()
    done = report(
        request.id + 1,
        prompt_tokens=len(tokens),
        cached_tokens=lease.start,
        output_tokens=len(output),
        reuse=lease.reuse,
        reason=lease.reason,
        exact=lease.exact,
        key=key,
        control=control,
    )
    log.finish(arrival, done, output=output.tolist(), boundaries=request.boundaries)
    return done
