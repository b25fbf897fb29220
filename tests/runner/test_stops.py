"""Stop strings: found across tokens and drafts, and the request ends there with what it made."""

from __future__ import annotations

import pytest

from ninfer_pool import PromptError
from ninfer_pool.runner import TINY, Runner
from ninfer_pool.runner.stops import StopStrings

PROMPT = "She walked to the window, and"


def runner(draft_tokens: int = 0) -> Runner:
    return Runner.from_pretrained(
        TINY, dtype="fp32", kv_dtype="fp32", kv_budget="16MiB", draft_tokens=draft_tokens
    )


@pytest.mark.parametrize("draft_tokens", [0, 3])
def test_a_request_ends_with_the_token_that_completes_a_stop_string(draft_tokens: int) -> None:
    shop = runner(draft_tokens)
    whole = shop.generate(shop.prompt(PROMPT), max_tokens=40)
    text = shop.tokenizer.decode(whole.tokens)
    stop = text[17:25]  # cuts tokens in two at both ends
    first = text.index(stop) + len(stop)
    made = shop.generate(shop.prompt(PROMPT), max_tokens=40, stop_strings=["\x00", stop])
    told = shop.tokenizer.decode(made.tokens)
    assert made.finish == "stop"
    assert stop in told
    assert stop not in shop.tokenizer.decode(made.tokens[:-1])
    assert text.startswith(told)
    assert len(told) >= first
    shop.pool.check()


def test_what_was_made_up_to_a_stop_string_is_retained() -> None:
    shop = runner()
    whole = shop.generate(shop.prompt(PROMPT), max_tokens=40)
    stop = shop.tokenizer.decode(whole.tokens)[17:25]
    shop.pool.clear()
    made = shop.generate(shop.prompt(PROMPT), max_tokens=40, stop_strings=[stop])
    made_so_far = [*shop.prompt(PROMPT).tokens.tolist(), *made.tokens, 5, 6]
    more = shop.generate(shop.prompt(made_so_far), max_tokens=2)
    assert more.reused == made.prompt_tokens + len(made.tokens) - 1


def test_a_string_in_two_bytes_of_one_character_is_found() -> None:
    tokenizer = runner().tokenizer
    strings = StopStrings(tokenizer, ["é!"])
    tokens = tokenizer.encode("café! Then")
    found = [strings.completed(tokens[:count]) for count in range(1, len(tokens) + 1)]
    first = found.index(True) + 1
    assert "é!" in tokenizer.decode(tokens[:first])
    assert "é!" not in tokenizer.decode(tokens[: first - 1])


@pytest.mark.parametrize("bad", ["text", [""], [5], None])
def test_what_is_no_list_of_strings_is_refused(bad: object) -> None:
    shop = runner()
    with pytest.raises(PromptError, match="stop_strings"):
        shop.generate(shop.prompt(PROMPT), stop_strings=bad)
    assert shop.pool.running == 0
