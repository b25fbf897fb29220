"""`ninfer-pool generate`: ask a model, watch the text come, see what was reused."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TextIO

import torch

from ninfer_pool.errors import ConfigError, PromptError, UsageError
from ninfer_pool.prompt import Prompt
from ninfer_pool.runner import TINY, Generation, Runner, Running, Sampling, Tokenizer

THINK = "<think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A prompt's text, and the ends of what later prompts will share, in characters."""

    text: str
    boundaries: tuple[tuple[int, str], ...]


def generate(args: argparse.Namespace) -> None:
    """Carry out one command line: text to stdout, all else to stderr.

    Raises:
        PoolError: one line that says what is wrong; nothing was printed to stdout then.
        KeyboardInterrupt: Ctrl-C; what was running is cancelled.
    """
    text = prompt_text(args.prompt)
    sampling = sampling_of(args)
    runner = load(args)
    raw = Ask(text=text, boundaries=((len(text), "turn"),))
    ask = raw if args.raw else chat(runner.tokenizer, text, args)
    prompt = runner.prompt(ask.text, boundaries=boundaries_of(runner.tokenizer, ask))
    for number in range(args.repeat):
        running = start(runner, prompt, sampling=sampling, max_tokens=args.max_tokens)
        if not number:
            print(f"{args.model or TINY.name}: {runner.capacity}", file=sys.stderr)
        answer(runner, running)


def prompt_text(words: list[str]) -> str:
    """Return the prompt: the words, or standard input where there is only ``-``.

    Raises:
        UsageError: none given, or text that is no UTF-8.
    """
    if not words and sys.stdin.isatty():
        raise UsageError('PROMPT: none given; write it in quotes, or "-" to read standard input')
    try:
        if words in ([], ["-"]):
            text = sys.stdin.buffer.read().decode("utf-8")
        else:
            text = " ".join(words)
            text.encode("utf-8")
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise UsageError(f"PROMPT: {error.reason}; needs UTF-8") from None
    if not text.strip():
        raise UsageError("PROMPT: empty; write what to say to the model")
    return text


def sampling_of(args: argparse.Namespace) -> Sampling:
    """Return how tokens are chosen.

    Raises:
        UsageError: a filter that greedy choice would ignore.
        PromptError: a value out of its range.
    """
    sampling = Sampling(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
    )
    idle = {"top_k": 0, "top_p": 1, "min_p": 0}
    for name, off in idle.items():
        if sampling.temperature == 0 and getattr(sampling, name) != off:
            option = "--" + name.replace("_", "-")
            raise UsageError(f"{option}: at temperature 0 it changes nothing; add --temperature")
    return sampling


def load(args: argparse.Namespace) -> Runner:
    """Load the model with room for its KV.

    Raises:
        PoolError: a device, folder or size that cannot be used.
    """
    check_device(args.device)
    try:
        return Runner.from_pretrained(
            args.model or TINY,
            device=args.device,
            dtype=args.dtype,
            kv_dtype=args.kv_dtype,
            kv_budget=args.kv_budget,
            draft_tokens=args.draft_tokens,
        )
    except (MemoryError, RuntimeError) as error:
        if "memory" not in str(error):  # what cannot be allocated; all else is our own bug
            raise
        budget = args.kv_budget or "what is free"
        raise UsageError(f"--kv-budget: no memory for the model and {budget}; give less") from None


def check_device(name: str) -> None:
    """Refuse a device that is not here.

    Raises:
        UsageError: neither the CPU nor a CUDA device of this machine.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device: {name!r}; needs cpu, cuda or cuda:N")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a driver that is too old warns and is then not there
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise UsageError(f"--device: {name!r}; this machine has {count} CUDA devices for torch")


def chat(tokenizer: Tokenizer, text: str, args: argparse.Namespace) -> Ask:
    """Return a question as the model's template writes it, its boundaries as a server's.

    ``system`` at the end of the system message; ``turn`` where the answer begins, before the
    thinking that a later prompt leaves out; ``response`` after the fixed part of the answer.

    Raises:
        UsageError: the model has no chat template.
        PromptError: the template says no.
    """
    if tokenizer.chat_template is None:
        raise UsageError("--model: it has no chat template; ask with --raw")
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    switches: dict[str, Any] = {} if args.thinking else {"enable_thinking": False}
    question = {"role": "user", "content": text}
    whole = tokenizer.render([*system, question], add_generation_prompt=True, **switches)
    boundaries = [(system_end(tokenizer, system, whole), "system")] if system else []
    thinking = whole.find(THINK, whole.rfind(text.strip()) + len(text.strip()))
    if thinking >= 0:
        boundaries += [(thinking, "turn"), (len(whole), "response")]
    else:
        boundaries += [(len(whole), "turn")]
    return Ask(text=whole, boundaries=tuple(boundaries))


def system_end(tokenizer: Tokenizer, system: list[dict[str, str]], whole: str) -> int:
    """Return how many characters of a prompt its system message takes; 0 where none can tell."""
    try:
        alone = tokenizer.render(system)
    except PromptError:  # a template that wants a question
        return 0
    return len(alone) if whole.startswith(alone) else 0


def boundaries_of(tokenizer: Tokenizer, ask: Ask) -> list[tuple[int, str]]:
    """Return boundaries in tokens; one that falls inside a token is left out."""
    whole, found = tokenizer.encode(ask.text), {}
    for position, kind in ask.boundaries:
        head = tokenizer.encode(ask.text[:position])
        if head and head == whole[: len(head)]:
            found[len(head)] = kind
    return list(found.items())


def start(runner: Runner, prompt: Prompt, *, sampling: Sampling, max_tokens: int) -> Running:
    """Admit a request.

    Raises:
        PromptError: it is longer than the model's context.
        ConfigError: it does not fit the slab.
    """
    running = runner.start(prompt, sampling=sampling, max_tokens=max_tokens)
    if running is None:
        raise ConfigError(f"kv_budget: no room for {len(prompt)} + {max_tokens} tokens; needs more")
    return running


def answer(runner: Runner, running: Running) -> None:
    """Run one request, print its text as it comes and then what it took."""
    try:
        show(runner, running, sys.stdout)
        runner.finish(running)
    finally:
        runner.cancel(running)
        print(summary(running.result()), file=sys.stderr)


def show(runner: Runner, running: Running, out: TextIO) -> None:
    """Write a request's text as it comes, stop tokens and halves of characters left out."""
    stream, given = runner.tokenizer.stream(), 0
    try:
        for _ in steps(runner, running):
            new, given = running.tokens[given:], len(running.tokens)
            kept = [token for token in new if token not in running.stop_tokens]
            out.write("".join(map(stream.push, kept)))
            out.flush()
    finally:
        out.write(stream.finish() + "\n")
        out.flush()


def steps(runner: Runner, running: Running) -> Iterator[None]:
    """Run a request to its end, yielding whenever there are new tokens."""
    while not running.ready:
        runner.prefill(running)
    yield
    while running.finish is None:
        runner.decode([running])
        yield


def summary(made: Generation) -> str:
    """Return what one request took and what it reused, in one line."""
    exact = ", exact" if made.exact and made.reused else ""
    parts = [
        f"{made.prompt_tokens} prompt tokens, {made.reused} reused ({made.reuse}{exact})",
        f"{len(made.tokens)} new tokens ({made.finish})",
        f"first after {1000 * made.first_token_seconds:.1f} ms, "
        f"then {made.tokens_per_second:.1f} a second",
    ]
    if made.drafted:
        parts.append(f"{made.accepted} of {made.drafted} drafts accepted")
    return "; ".join([*parts, made.reason])
