"""On the shipped model the pool reuses what it promises, and a single lane what it can."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ninfer_pool.demo.play import TODAY, Play, Setting, Stage
from ninfer_pool.demo.scenarios import FULL, SCENARIOS, ScriptedRequest, Size
from ninfer_pool.demo.table import turn_tokens

NAMES = [
    pytest.param(scenario.name, marks=pytest.mark.slow if scenario.name == "together" else ())
    for scenario in SCENARIOS
]
SMALL = Size(turns=3, steps=2)
SETTINGS = (TODAY, Setting(entries=1), Setting(entries=2), Setting(entries=4))


class Theatre:
    """Plays each scenario once in each setting."""

    def __init__(self) -> None:
        self._stage = Stage()
        self._played: dict[tuple[str, Setting], Play] = {}

    def __call__(self, name: str, setting: Setting) -> Play:
        if (name, setting) not in self._played:
            script = next(each.script for each in SCENARIOS if each.name == name)
            self._played[name, setting] = self._stage.play(script(SMALL), setting)
        return self._played[name, setting]


@pytest.fixture(scope="module")
def play() -> Theatre:
    return Theatre()


def cached(play: Play) -> list[int]:
    return [each.cached_tokens for each in play.served]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.label)
def test_a_short_request_sent_again_is_cached_but_for_its_end(
    play: Theatre, setting: Setting
) -> None:
    first, second = play("repeat", setting).served
    assert first.cached_tokens == 0
    assert second.cached_tokens >= second.prompt_tokens - 4
    assert second.reuse in ("restore_turn_checkpoint", "restore_response_checkpoint")


def test_a_lane_forgets_a_when_b_comes_and_two_entries_do_not(play: Theatre) -> None:
    lane, pool = cached(play("alternate", TODAY)), cached(play("alternate", Setting(entries=2)))
    assert lane[:3] == [0, 0, 0]
    assert lane[3] > 0
    assert pool[:2] == [0, 0]
    assert pool[2] == pool[3] == lane[3]


@pytest.mark.parametrize("entries", [2, 4])
def test_titles_cost_the_turns_nothing_at_two_entries(play: Theatre, entries: int) -> None:
    alone = turn_tokens(play("turns", Setting(entries=entries)))
    assert alone > 0
    assert turn_tokens(play("titles", Setting(entries=entries))) >= 0.95 * alone
    assert turn_tokens(play("titles", TODAY)) == 0


def test_titles_that_are_not_retained_cost_nothing_at_one_entry(play: Theatre) -> None:
    alone = turn_tokens(play("turns", Setting(entries=1)))
    assert turn_tokens(play("titles_unretained", Setting(entries=1))) >= 0.95 * alone
    assert turn_tokens(play("titles_unretained", TODAY)) == 0  # a lane is overwritten all the same


def test_agents_go_on_where_they_stood_with_an_entry_for_each(play: Theatre) -> None:
    served = play("agents", Setting(entries=4)).served
    assert {each.reuse for each in served[4:]} == {"append_frontier"}
    lane = play("agents", TODAY).served
    assert [each.cached_tokens for each in lane if each.label.startswith("parent")] == [0, 0, 0]


def test_after_a_compaction_the_system_text_is_resumed(play: Theatre) -> None:
    served = play("compaction", Setting(entries=1)).served
    at = [each.label for each in served].index("compaction")
    assert served[at].cached_tokens > served[at - 1].cached_tokens
    assert served[at + 1].reuse == "restore_system_checkpoint"


@pytest.mark.parametrize("name", NAMES)
def test_a_larger_pool_is_never_worse_and_one_entry_no_worse_than_a_lane(
    play: Theatre, name: str
) -> None:
    found = [play(name, setting) for setting in SETTINGS]
    assert len({each.prompt_tokens for each in found}) == 1  # the same answers everywhere
    for less, more in pairwise(found):
        assert more.cached_tokens >= less.cached_tokens


def asks(name: str, size: Size = FULL, reply: str = "So it is.") -> list[ScriptedRequest]:
    script = next(each.script for each in SCENARIOS if each.name == name)(size)
    found = [next(script)]
    try:
        while True:
            found.append(script.send(reply))
    except StopIteration:
        return found


def test_all_at_once_keeps_more_alive_than_eight_entries_hold() -> None:
    begins = {str(ask.messages[:2]) for ask in asks("together")}
    assert len(begins) >= 10


def test_all_at_once_sends_every_request_of_the_five() -> None:
    parts = [asks(each) for each in ("repeat", "alternate", "titles", "agents", "compaction")]
    labels = [ask.label for ask in asks("together")]
    for number, part in enumerate(parts, 1):
        own = [label for label in labels if label.startswith(f"{number}: ")]
        assert own == [f"{number}: {ask.label}" for ask in part]


def test_a_client_sends_back_what_was_said() -> None:
    last = asks("turns", reply="Quite so.")[-1]
    assert [m["content"] for m in last.messages if m["role"] == "assistant"] == ["Quite so."] * 7


def test_agents_call_tools_that_they_have() -> None:
    for ask in asks("agents"):
        known = {tool["function"]["name"] for tool in ask.tools}
        calls = [call for message in ask.messages for call in message.get("tool_calls") or ()]
        assert {call["function"]["name"] for call in calls} <= known
