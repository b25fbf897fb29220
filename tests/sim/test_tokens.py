"""Made-up token ids agree exactly where the trace says that prompts do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from ninfer_pool.errors import TraceError
from ninfer_pool.sim.tokens import TokenSource
from ninfer_pool.sim.trace import Trace, TraceRequest, read_trace
from tests.sim.made_traces import DATA, requests
from tests.sim.workloads import WORKLOADS, make


def written_out(made: tuple[TraceRequest, ...]) -> list[list[tuple[int, int]]]:
    """Oracle: each full sequence as (owner, position) pairs, by the words of the format."""
    full: list[list[tuple[int, int]]] = []
    for request in made:
        inherited = [] if request.parent is None else full[request.parent][: request.shared]
        new = range(request.shared, request.total)
        full.append(inherited + [(request.id, position) for position in new])
    return full


@given(made=requests())
def test_tokens_are_equal_exactly_where_the_format_says(made: tuple[TraceRequest, ...]) -> None:
    source = TokenSource(Trace(name="made", requests=made))
    meaning: dict[int, tuple[int, int]] = {}
    for request, full in zip(made, written_out(made), strict=True):
        prompt, output = source.prompt(request.id), source.output(request.id)
        assert {prompt.dtype, output.dtype} == {np.dtype(np.int32)}
        assert (len(prompt), len(output)) == (request.input, request.output)
        for token, place in zip([*prompt.tolist(), *output.tolist()], full, strict=True):
            assert meaning.setdefault(token, place) == place
    assert len(set(meaning.values())) == len(meaning)
    assert not meaning or min(meaning) == 1


def test_a_linear_conversation_is_one_run_of_ids() -> None:
    trace = make("tool_loop")
    last = trace.requests[-1]
    prompt = TokenSource(trace).prompt(last.id)
    assert prompt.tolist() == list(range(1, last.input + 1))


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_has_tokens(name: str) -> None:
    trace = make(name)
    source = TokenSource(trace)
    for request in trace.requests:
        prompt = source.prompt(request.id)
        if request.parent is not None:
            parent = trace.requests[request.parent]
            before = np.concatenate([source.prompt(parent.id), source.output(parent.id)])
            assert np.array_equal(prompt[: request.shared], before[: request.shared])


def test_no_token_is_kept() -> None:
    source = TokenSource(read_trace(DATA / "claude_code_8_lanes.jsonl.gz"))
    assert source.prompt(7) is not source.prompt(7)
    held = [value for value in vars(source).values() if isinstance(value, np.ndarray)]
    assert held == []


def test_more_new_tokens_than_int32_has_are_refused() -> None:
    def trace(length: int) -> Trace:
        first = TraceRequest(
            id=0, t=0.0, session="", kind="", parent=None, shared=0, input=length, output=1
        )
        return Trace(name="huge", requests=(first,))

    TokenSource(trace(2**31 - 2))
    with pytest.raises(TraceError, match=r"huge, request 0, field input: .* fewer"):
        TokenSource(trace(2**31 - 1))
