"""Many requests on one runner: order, sharing, cancelling, failures, and the same bits as alone."""

from __future__ import annotations

from typing import Any

import pytest

from ninfer_pool import PromptError
from ninfer_pool.runner import Request, Scheduler
from tests.runner.models import random_model
from tests.runner.world import Script, make

MODEL = random_model(2, head_dim=64)


def engine(**options: Any) -> Scheduler:
    return Scheduler(make(MODEL, **{"lanes": 3, **options}))


def submit(shop: Scheduler, seed: int, *, max_tokens: int = 10, **options: Any) -> Request:
    tokens, boundaries = Script(seed, 199).ask()
    prompt = shop.runner.prompt(tokens, boundaries=boundaries)
    return shop.submit(prompt, max_tokens=max_tokens, stop_tokens=(), **options)


def run(shop: Scheduler) -> None:
    while shop.step():
        pass
    shop.runner.pool.check()
    assert (shop.queued, shop.running, shop.runner.pool.running) == (0, 0, 0)


@pytest.fixture(scope="module")
def alone() -> dict[int, tuple[int, ...]]:
    """What each request says when nothing else runs."""
    found = {}
    for seed in range(6):
        shop = engine()
        handle = submit(shop, seed)
        run(shop)
        found[seed] = handle.result().tokens
    return found


def test_many_at_once_say_what_each_says_alone(alone: dict[int, tuple[int, ...]]) -> None:
    shop = engine()
    handles = [submit(shop, seed) for seed in range(6)]
    assert shop.queued == 6
    run(shop)
    assert [h.result().tokens for h in handles] == [alone[s] for s in range(6)]


def test_a_thread_serves_many(alone: dict[int, tuple[int, ...]]) -> None:
    with engine() as shop:
        handles = [submit(shop, seed) for seed in range(4)]
        streams = [list(handle) for handle in handles]
        outcome = shop.generate(handles[0].prompt, max_tokens=10, stop_tokens=())
    assert [tuple(tokens) for tokens in streams] == [alone[seed] for seed in range(4)]
    assert outcome.tokens == alone[0]
    assert outcome.reused > 0
    assert outcome.queued_seconds >= 0


def test_requests_are_admitted_in_the_order_in_which_they_came() -> None:
    shop = engine(lanes=1)
    handles = [submit(shop, seed) for seed in range(4)]
    run(shop)
    admitted = [handle.admitted for handle in handles]
    assert admitted == sorted(admitted)


def test_a_long_prompt_holds_the_others_up_by_a_chunk_at_a_time() -> None:
    shop = engine()
    first = submit(shop, 1, max_tokens=30)
    while first.sequence is None or not first.sequence.ready:
        shop.step()
    prompt = shop.runner.prompt([(7 * i) % 198 + 1 for i in range(600)])
    shop.submit(prompt, max_tokens=4, stop_tokens=())
    before = len(first.sequence.tokens)
    for _ in range(5):
        shop.step()
    assert len(first.sequence.tokens) == before + 5
    run(shop)


def test_siblings_that_start_together_prefill_their_beginning_once() -> None:
    shop = engine()
    handles = [sibling(shop, number) for number in range(3)]
    run(shop)
    assert [handle.result().reused for handle in handles] == [0, 200, 200]


STEM = [(11 * i) % 198 + 1 for i in range(200)]


def sibling(shop: Scheduler, number: int, *, max_tokens: int = 3) -> Request:
    """A request whose first 200 tokens are those of all its siblings."""
    prompt = shop.runner.prompt(
        [*STEM, 5 + number, 6, 7], boundaries=[(200, "system"), (203, "turn")]
    )
    return shop.submit(prompt, max_tokens=max_tokens, stop_tokens=())


def test_who_comes_while_a_sibling_answers_resumes_what_it_has_crossed() -> None:
    shop = engine()
    first = sibling(shop, 0, max_tokens=40)
    while first.sequence is None or not first.sequence.ready:
        shop.step()
    second = sibling(shop, 1)
    run(shop)
    assert second.result().reused == 200
    assert second.admitted < first.sequence.ended


def test_a_sibling_waits_for_a_prefill_and_never_for_an_answer() -> None:
    shop = engine(lanes=2, max_entries=2)
    for seed in (1, 2):  # K is reached: what is computed cannot be seen before its commit
        submit(shop, seed)
        run(shop)
    first, second = sibling(shop, 0, max_tokens=60), sibling(shop, 1)
    while second.sequence is None:
        shop.step()
    assert first.sequence is not None
    assert len(first.sequence.tokens) < 5
    run(shop)


def test_one_entry_is_resumed_by_several_at_once() -> None:
    shop = engine()
    submit(shop, 3)
    run(shop)
    handles = [submit(shop, 3) for _ in range(3)]
    shop.step()
    assert shop.running == 3
    run(shop)
    assert len({handle.result().tokens for handle in handles}) == 1
    assert all(handle.result().reused > 0 for handle in handles)


def test_cancelled_before_and_after_admission() -> None:
    shop = engine(lanes=1)
    running, waiting, last = (submit(shop, seed, max_tokens=30) for seed in (1, 2, 3))
    for _ in range(6):
        shop.step()
    running.cancel()
    waiting.cancel()
    run(shop)
    assert running.result().finish == "cancelled"
    assert 0 < len(running.result().tokens) < 30
    assert waiting.result().tokens == ()
    assert len(last.result().tokens) == 30
    again = submit(shop, 1)
    run(shop)
    assert again.result().reused > 0  # what it had crossed was kept


def test_a_request_that_can_never_fit_is_refused_at_once_with_the_sizes() -> None:
    shop = engine(num_pages=30)
    with pytest.raises(PromptError, match="take 33 pages; the slab has 30"):
        shop.submit(shop.runner.prompt([5] * 2000), max_tokens=100)
    assert shop.queued == 0


def test_one_that_waits_for_room_is_not_starved_by_small_ones() -> None:
    shop = engine(num_pages=30, lanes=2)
    submit(shop, 1, max_tokens=20)
    shop.step()
    large = shop.submit(shop.runner.prompt([9] * 1400), max_tokens=4, stop_tokens=())
    small = [submit(shop, seed, max_tokens=20) for seed in (2, 3)]
    run(shop)
    assert large.admitted < min(handle.admitted for handle in small)


def test_a_failure_ends_the_request_that_failed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    shop = engine()
    fine = submit(shop, 1)
    while fine.sequence is None or not fine.sequence.ready:
        shop.step()
    doomed = submit(shop, 2)

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(shop.runner.executor, "prefill", fails)
        shop.step()
    run(shop)
    for wait in (doomed.result, lambda: list(doomed)):
        with pytest.raises(RuntimeError, match="device lost"):
            wait()
    assert len(fine.result().tokens) == 10


def test_a_round_that_fails_ends_those_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shop = engine()
    handles = [submit(shop, seed) for seed in (1, 2)]
    while shop.running < 2 or not all(h.sequence and h.sequence.ready for h in handles):
        shop.step()

    def fails(*_: object) -> None:
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(shop.runner.executor, "round", fails)
        shop.step()
    for handle in handles:
        with pytest.raises(RuntimeError, match="device lost"):
            handle.result()
    again = submit(shop, 1)
    run(shop)
    assert len(again.result().tokens) == 10


def test_stopping_without_draining_cancels_what_there_is() -> None:
    shop = engine(lanes=1)
    shop.__enter__()
    handles = [submit(shop, seed, max_tokens=3000) for seed in range(3)]
    shop.stop(drain=False)
    assert {handle.result(timeout=20).finish for handle in handles} == {"cancelled"}
    with pytest.raises(PromptError, match="stopping"):
        submit(shop, 1)


def test_closing_a_stream_cancels_its_request() -> None:
    with engine() as shop:
        tokens, boundaries = Script(1, 199).ask()
        stream = shop.stream(
            shop.runner.prompt(tokens, boundaries=boundaries), max_tokens=3000, stop_tokens=()
        )
        next(stream)
        stream.close()
    assert shop.runner.pool.running == 0


def test_what_can_never_be_admitted_is_refused_and_not_waited_for() -> None:
    shop = engine(num_pages=30)
    pool = shop.runner.pool
    first = shop.generate(shop.runner.prompt([9] * 1200), max_tokens=4, stop_tokens=())
    assert first.key is not None
    assert pool.pin(first.key)
    for _ in range(2):
        outcome = shop.generate(shop.runner.prompt([8] * 1400), max_tokens=4, stop_tokens=())
        assert outcome.finish == "refused"
        assert outcome.prompt_tokens == 1400
        assert outcome.queued_seconds >= 0
    assert pool.unpin(first.key)
    again = shop.generate(shop.runner.prompt([8] * 1400), max_tokens=4, stop_tokens=())
    assert again.finish == "length"


def test_one_that_waits_is_asked_again_only_when_something_has_changed() -> None:
    shop = engine(num_pages=30, lanes=2)
    pool = shop.runner.pool
    submit(shop, 1, max_tokens=700)
    while not shop._running or not shop._running[0].ready:
        shop.step()
    shop.submit(shop.runner.prompt([9] * 1400), max_tokens=4, stop_tokens=())
    shop.step()
    refused = pool.stats().counters.refused
    for _ in range(20):
        shop.step()
    assert shop.queued == 1
    assert pool.stats().counters.refused == refused
    run(shop)


def test_a_hint_prefers_a_lane_and_nothing_more() -> None:
    shop = engine()
    lanes = []
    for hint, seed in (("a", 1), ("b", 2), ("a", 3), ("b", 4)):
        tokens, boundaries = Script(seed, 199).ask()
        prompt = shop.runner.prompt(tokens, boundaries=boundaries)
        handle = shop.submit(prompt, hint=hint, max_tokens=3, stop_tokens=())
        run(shop)
        assert handle.sequence is not None
        lanes.append(handle.sequence.lane)
        assert handle.result().reused == 0
    assert lanes == [lanes[0], lanes[1]] * 2
    assert lanes[0] != lanes[1]


def test_an_owner_that_may_not_wait_is_told() -> None:
    shop = engine()
    told: list[str] = []
    tokens, boundaries = Script(1, 199).ask()
    handle = shop.submit(
        shop.runner.prompt(tokens, boundaries=boundaries),
        notify=lambda: told.append("end" if handle.ended else "more"),
        max_tokens=4,
        stop_tokens=(),
    )
    made: list[int] = []
    while not handle.ended:
        shop.step()
        made += handle.take()
    assert told[-1] == "end"
    assert told.count("more") == 1 + 4  # admitted, then each token
    assert tuple(made) == handle.result().tokens
    assert handle.take() == []
    assert list(handle) == []


def test_a_stream_without_a_thread_gives_every_token() -> None:
    shop = engine()
    tokens, boundaries = Script(1, 199).ask()
    prompt = shop.runner.prompt(tokens, boundaries=boundaries)
    streamed = list(shop.stream(prompt, max_tokens=6, stop_tokens=()))
    assert tuple(streamed) == shop.generate(prompt, max_tokens=6, stop_tokens=()).tokens


def test_a_fault_of_the_loop_itself_leaves_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shop = engine(lanes=1)

    def fails() -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr(shop, "_prefill", fails)
    monkeypatch.setattr("threading.excepthook", lambda _: None)
    with shop:
        handles = [submit(shop, seed) for seed in (1, 2)]
        for handle in handles:
            with pytest.raises(AssertionError, match="a bug"):
                handle.result(timeout=20)
    assert isinstance(shop.failure, AssertionError)


def test_a_failure_to_end_a_request_still_tells_its_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shop = engine(lanes=1)

    def fails(*_: object) -> None:
        raise RuntimeError("disk lost")

    monkeypatch.setattr(shop.runner, "finish", fails)
    monkeypatch.setattr(shop.runner, "cancel", fails)
    monkeypatch.setattr("threading.excepthook", lambda _: None)
    with shop:
        handle = submit(shop, 1)
        with pytest.raises(RuntimeError, match="disk lost"):
            handle.result(timeout=20)
