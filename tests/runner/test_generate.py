"""`ninfer-pool generate`: text to stdout, all else to stderr, and one clear line for a mistake."""

from __future__ import annotations

import io
import re
import shutil
import signal
import sys
from collections import abc
from pathlib import Path
from typing import Any

import pytest

from ninfer_pool import cli
from ninfer_pool.errors import UsageError
from ninfer_pool.runner import TINY, Runner, Sequence, Tokenizer, command
from tests.runner.models import random_folder

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

SMALL = ["--kv-budget", "32MiB", "--max-tokens", "12"]


class Outcome:
    """What one command line printed, and its exit code."""

    def __init__(self, code: int, captured: Any) -> None:
        self.code = code
        self.out: str = captured.out
        self.err: list[str] = captured.err.splitlines()


class Terminal:
    """Runs `ninfer-pool generate`, its standard input empty or given."""

    def __init__(self, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> None:
        self._capsys = capsys
        self._patch = patch

    def __call__(self, *words: str, stdin: bytes = b"") -> Outcome:
        self._patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = cli.main(["generate", *words])
        return Outcome(code, self._capsys.readouterr())


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Terminal:
    return Terminal(capsys, monkeypatch)


def reused(line: str) -> tuple[int, int, str]:
    """Prompt tokens, how many of them were reused, and by which path."""
    found = re.match(r"(\d+) prompt tokens, (\d+) reused \(([^)]*)\)", line)
    assert found is not None, line
    return int(found[1]), int(found[2]), found[3]


# -- what it prints ---------------------------------------------------------------------------


def test_text_goes_to_stdout_and_figures_to_stderr(run: Terminal) -> None:
    made = run("Good morning.", *SMALL)
    assert made.code == 0
    assert made.out.endswith("\n")
    assert made.out.strip()
    capacity, figures = made.err
    assert capacity.startswith("tiny: 32 MiB in ")
    assert re.search(r"; \d+ new tokens \((length|stop)\); first after [\d.]+ ms, then ", figures)
    assert figures.endswith("no_entry")


def test_asked_again_it_reuses_all_exactly_and_says_the_same(run: Terminal) -> None:
    made = run("Good morning.", "--repeat", "3", *SMALL)
    _, cold, *warm = made.err
    tokens, nothing, path = reused(cold)
    assert (nothing, path) == (0, "full_reset")
    assert len(warm) == 2
    for line in warm:
        assert reused(line) == (tokens, tokens, "restore_response_checkpoint, exact")
    once = run("Good morning.", *SMALL)
    assert made.out == 3 * once.out


def test_drafts_are_counted_and_change_no_text(run: Terminal) -> None:
    plain, drafted = (run("Good morning.", *SMALL, "--draft-tokens", n) for n in ("0", "2"))
    assert "drafts" not in plain.err[1]
    assert re.search(r"\d+ of \d+ drafts accepted", drafted.err[1])
    assert drafted.out == plain.out


def test_the_same_seed_draws_the_same_text(run: Terminal) -> None:
    drawn = ["--temperature", "1.5", "--top-p", "0.95", "--seed", "-7"]
    first, second = (run("She was", "--raw", *drawn, *SMALL).out for _ in range(2))
    assert first == second
    assert first != run("She was", "--raw", *SMALL).out


def test_the_prompt_may_come_from_standard_input(run: Terminal) -> None:
    told = run("Good", "morning.", *SMALL)
    for words in (["-"], []):
        assert run(*words, *SMALL, stdin=b"Good morning.").out == told.out


def test_a_prompt_may_begin_with_a_minus_after_two(run: Terminal) -> None:
    made = run(*SMALL, "--raw", "--", "-5 degrees")
    assert made.code == 0
    assert made.out == run(*SMALL, "--raw", "-", stdin=b"-5 degrees").out


def test_raw_text_is_continued_as_it_is(run: Terminal) -> None:
    made = run("--raw", "She walked to the window", *SMALL)
    tokenizer = Tokenizer.load(TINY)
    assert tokenizer is not None
    assert reused(made.err[1])[0] == len(tokenizer.encode("She walked to the window"))


def test_no_stop_token_is_printed(run: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    emit = Sequence.emit

    def ends_at_once(running: Sequence, new: abc.Sequence[int]) -> None:
        emit(running, [next(iter(running.stop_tokens))])

    monkeypatch.setattr(Sequence, "emit", ends_at_once)
    made = run("Good morning.", *SMALL)
    assert made.out == "<think>\n\n"  # thoughts begin in the prompt, and end in the answer
    assert "1 new tokens (stop)" in made.err[1]


def test_a_character_of_several_tokens_comes_whole(
    run: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.load(TINY)
    assert tokenizer is not None
    left = tokenizer.encode("é😀 fin")
    assert len(left) > len("é😀 fin")
    emit = Sequence.emit
    written: list[str] = []

    def speaks(running: Sequence, new: abc.Sequence[int]) -> None:
        emit(running, [left.pop(0)])
        running.finish = None if left else "stop"

    monkeypatch.setattr(Sequence, "emit", speaks)
    monkeypatch.setattr(sys.stdout, "write", written.append)
    run("Good morning.", *SMALL)
    assert "".join(written) == "<think>\né😀 fin\n"
    assert not any("\ufffd" in part for part in written)


# -- boundaries, as a server declares them ----------------------------------------------------


def ask_of(*words: str) -> tuple[str, dict[str, str]]:
    """A chat's text, and what lies before each boundary by kind."""
    args = cli._parse(["generate", *words, *SMALL])
    runner = command.load(args)
    prompt, _ = command.chat(runner, " ".join(args.prompt), args)

    def text_of(tokens: Any) -> str:
        return runner.tokenizer.decode(map(int, tokens), skip_special=False)

    heads = {kind: text_of(prompt.tokens[:at]) for at, kind in prompt.boundaries}
    return text_of(prompt.tokens), heads


def test_boundaries_end_the_system_message_the_question_the_turn_and_the_prologue() -> None:
    text, heads = ask_of("Well?", "--system", "Be brief.")
    assert heads["system"] == "<|im_start|>system\nBe brief.<|im_end|>\n"
    assert heads["history"] == heads["system"] + "<|im_start|>user\nWell?<|im_end|>\n"
    assert heads["turn"] == heads["history"] + "<|im_start|>assistant\n"
    assert heads["response"] == text == heads["turn"] + "<think>\n"


def test_without_thinking_the_prologue_closes_it() -> None:
    text, heads = ask_of("Well?", "--no-thinking")
    assert set(heads) == {"history", "turn", "response"}
    assert heads["response"] == text == heads["turn"] + "<think>\n\n</think>\n\n"


def test_a_question_about_thinking_moves_no_boundary() -> None:
    text, heads = ask_of("What is <think> for?")
    assert heads["turn"] + "<think>\n" == text


# -- Ctrl-C -----------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["prefill", "decode"])
def test_an_interrupt_cancels_and_leaves_the_pool_whole(
    call: str, run: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, load, made = getattr(Runner, call), command.load, []

    def interrupted(*given: Any, **options: Any) -> None:
        method(*given, **options)
        signal.raise_signal(signal.SIGINT)

    def remembered(args: Any) -> Runner:
        made.append(load(args))
        return made[0]

    monkeypatch.setattr(Runner, call, interrupted)
    monkeypatch.setattr(command, "load", remembered)
    ended = run("Good morning.", *SMALL)
    assert ended.code == 130
    assert "(cancelled)" in ended.err[-1]
    assert made[0].running == []
    made[0].pool.check()


# -- mistakes ---------------------------------------------------------------------------------

MISTAKES = [
    (["--max-tokens", "0"], "--max-tokens: '0'"),
    (["--max-tokens", "40000"], "max_tokens 40000; the context is 32768"),
    (["--repeat", "0"], "--repeat: '0'"),
    (["--temperature", "nan"], "temperature: nan"),
    (["--temperature", "-1"], "temperature: -1"),
    (["--temperature", "hot"], "--temperature: invalid float value: 'hot'"),
    (["--temperature", "1", "--top-p", "2"], "top_p: 2"),
    (["--top-p", "0.5"], "--top-p: at temperature 0 it changes nothing"),
    (["--top-k", "5"], "--top-k: at temperature 0 it changes nothing"),
    (["--seed", "99999999999999999999"], "seed: 99999999999999999999"),
    (["--draft-tokens", "6"], "--draft-tokens: invalid choice: 6"),
    (["--dtype", "int8"], "--dtype: invalid choice: 'int8'"),
    (["--kv-dtype", "int4"], "--kv-dtype: invalid choice: 'int4'"),
    (["--kv-budget", "lots"], "--kv-budget: 'lots' is not a size"),
    (["--kv-budget", "1KiB"], "--kv-budget: 1 KiB; one lane and one saved state need"),
    (["--device", "tpu"], "--device: 'tpu'; needs cpu, cuda or cuda:N"),
    (["--device", "mps"], "--device: 'mps'; needs cpu, cuda or cuda:N"),
    (["--device", "cuda:99"], "--device: 'cuda:99'; this machine has"),
    (["--model", "nowhere"], "'nowhere'"),
    (["--raw", "--system", "x"], "--system: --raw applies no chat template"),
    (["--raw", "--no-thinking"], "--no-thinking: --raw applies no chat template"),
    (["--nosuch"], "unrecognized arguments: --nosuch"),
]


def complaint(made: Outcome) -> str:
    """The one line of a command line that cannot be carried out."""
    assert made.code == 2
    assert made.out == ""
    assert len(made.err) == 1, made.err
    assert made.err[0].startswith("ninfer-pool: error: ")
    return made.err[0]


@pytest.mark.parametrize(("words", "said"), MISTAKES, ids=lambda value: str(value)[:40])
def test_a_mistake_is_one_line(run: Terminal, words: list[str], said: str) -> None:
    assert said in complaint(run("Good morning.", "--kv-budget", "32MiB", *words))


@pytest.mark.parametrize(
    ("words", "stdin", "said"),
    [
        ([""], b"", "PROMPT: empty"),
        ([], b"", "PROMPT: empty"),
        (["-"], b" \n", "PROMPT: empty"),
        (["-"], b"a\xff", "PROMPT: invalid start byte; needs UTF-8"),
        (["a\udcff"], b"", "PROMPT: surrogates not allowed; needs UTF-8"),
    ],
)
def test_a_prompt_that_is_none(run: Terminal, words: list[str], stdin: bytes, said: str) -> None:
    assert said in complaint(run(*words, stdin=stdin))


class Keyboard(io.TextIOWrapper):
    """A terminal's standard input."""

    def isatty(self) -> bool:
        return True


def test_no_prompt_at_a_terminal_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Keyboard(io.BytesIO(b"typed")))
    with pytest.raises(UsageError, match="PROMPT: none given"):
        command.prompt_text([])
    assert command.prompt_text(["-"]) == "typed"


def test_a_request_that_fits_no_slab_says_so(run: Terminal) -> None:
    words = ["Good morning.", "--kv-budget", "400KiB", "--max-tokens", "500"]
    assert "max_tokens 500 take 9 pages; the slab has" in complaint(run(*words))


def test_a_budget_past_memory_says_so(run: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> Runner:
        raise RuntimeError("[enforce fail] can't allocate memory")

    monkeypatch.setattr(Runner, "from_pretrained", fails)
    assert "--kv-budget: no memory for" in complaint(run("Hm.", "--kv-budget", "800GiB"))


def test_a_folder_without_template_is_told_of_raw(run: Terminal, tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "plain")
    (tmp_path / "plain" / "chat_template.jinja").unlink()
    words = ["Good morning.", *SMALL, "--model", str(tmp_path / "plain")]
    assert "it has no chat template; add --raw" in complaint(run(*words))
    assert run("--raw", *words).code == 0


def test_a_folder_without_tokenizer_is_refused(run: Terminal, tmp_path: Path) -> None:
    folder = random_folder(tmp_path / "bare")
    assert "tokenizer" in complaint(run("Good morning.", *SMALL, "--model", str(folder)))


def test_without_torch_it_says_what_to_install(
    run: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("ninfer_pool.runner")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    said = complaint(run("Good morning."))
    assert said.endswith("needs torch; from a checkout, run pip install '.[runner]'")
