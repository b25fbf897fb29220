"""What one lane without a pool reuses: the state of things that the pool is measured against."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from ninfer_pool.core.identity import Namespace
from ninfer_pool.core.lookup import shared_tokens
from ninfer_pool.core.prompt import Prompt
from ninfer_pool.sim.relations import Relations
from ninfer_pool.sim.single_lane import LaneResult, single_lane
from ninfer_pool.sim.tokens import TokenSource
from ninfer_pool.sim.trace import Trace, TraceRequest
from tests.sim.made_traces import requests
from tests.sim.workloads import make


def served(trace: Trace, *, lanes: int = 1) -> list[LaneResult]:
    return single_lane(trace, lanes=lanes, prefill_rate=1140, decode_rate=40)


def request(id: int, **fields: object) -> TraceRequest:
    whole: dict[str, object] = {
        "id": id,
        "t": 100.0 * id,
        "session": "s",
        "kind": "main",
        "parent": None,
        "shared": 0,
        "input": 100,
        "output": 10,
    }
    return TraceRequest(**(whole | fields))  # type: ignore[arg-type]


def trace(*made: TraceRequest) -> Trace:
    return Trace(name="made", requests=made)


def full_sequence(made: TraceRequest, source: TokenSource) -> Prompt:
    salt = None if made.salt is None else f"salt {made.salt}"
    space = Namespace(weights="w", kv_dtype="bf16", salt=salt)
    tokens = np.concatenate((source.prompt(made.id), source.output(made.id)))
    return Prompt(tokens, namespace=space, media=made.media)


@given(made=requests())
def test_relations_tell_what_the_tokens_tell(made: tuple[TraceRequest, ...]) -> None:
    whole = trace(*made)
    relations, source = Relations(whole), TokenSource(whole)
    prompts = [full_sequence(one, source) for one in made]
    for one in made:
        for other in made:
            told = relations.common(one.id, other.id)
            assert told == shared_tokens(prompts[one.id], prompts[other.id])


def test_a_stranger_between_two_turns_costs_the_whole_prompt() -> None:
    assert [result.reused for result in served(make("seed_interleave"))] == [0, 0, 0, 18]


def test_a_title_request_before_every_turn_leaves_nothing() -> None:
    assert sum(result.reused for result in served(make("seed_title"))) == 0


@pytest.mark.parametrize(
    ("shared", "position", "reuse"),
    [
        (110, 109, "append_frontier"),
        (109, 109, "append_frontier"),
        (108, 100, "restore_turn_checkpoint"),
        (99, 90, "restore_response_checkpoint"),
        (89, 0, "full_reset"),
    ],
)
def test_a_lane_resumes_at_its_deepest_point_within_what_agrees(
    shared: int, position: int, reuse: str
) -> None:
    first = request(0, boundaries=((40, "response"), (90, "response")))
    second = request(1, parent=0, shared=shared, input=120)
    result = served(trace(first, second))[1]
    assert (result.reused, result.reuse, result.matched) == (position, reuse, shared)


def test_a_declared_turn_stands_in_for_the_prompts_end() -> None:
    first = request(0, boundaries=((60, "turn"),))
    second = request(1, parent=0, shared=100, input=120)
    assert served(trace(first, second))[1].reused == 60


def test_a_point_below_what_was_reused_is_there_only_if_the_lane_held_it() -> None:
    first = request(0, boundaries=((60, "turn"),))
    second = request(1, parent=0, shared=110, input=120, boundaries=((60, "turn"),))
    unheard = request(1, parent=0, shared=110, input=120, boundaries=((50, "turn"),))
    third = request(2, parent=1, shared=80, input=120)
    assert served(trace(first, second, third))[2].reused == 60
    assert served(trace(first, unheard, third))[2].reused == 0


def test_a_request_takes_the_free_lane_with_most_to_reuse_else_the_least_recent() -> None:
    chat = [request(0), request(1), request(2), request(3, parent=0, shared=110, input=120)]
    results = served(trace(*chat), lanes=3)
    assert [result.lane for result in results] == [0, 1, 2, 0]
    assert results[3].reused == 109
    assert served(trace(*chat, request(4)), lanes=3)[4].lane == 1


def test_a_busy_lane_is_neither_waited_for_nor_reused() -> None:
    # 114 tokens are prefilled in 0.1 s, 40 decoded in 1 s.
    first = request(0, input=114, output=40)
    early = request(1, t=1.0, parent=0, shared=154, input=160)
    late = request(1, t=1.2, parent=0, shared=154, input=160)
    assert served(trace(first, early), lanes=2)[1].reused == 0
    assert served(trace(first, late), lanes=2)[1].reused == 153
    assert served(trace(first, early), lanes=1)[1].reused == 153


def test_requests_wait_in_order_of_arrival() -> None:
    first = request(0, input=1140, output=400)
    second = request(1, t=1.0)
    third = request(2, t=1.0, parent=1, shared=110, input=120)
    assert [result.reused for result in served(trace(first, second, third))] == [0, 0, 109]


def test_what_asks_to_leave_nothing_overwrites_all_the_same() -> None:
    quiet = request(1, retain=False)
    again = request(2, parent=0, shared=110, input=120)
    quoting = request(2, parent=1, shared=110, input=120)
    assert served(trace(request(0), quiet, again))[2].reused == 0
    assert served(trace(request(0), quiet, quoting))[2].reused == 0
