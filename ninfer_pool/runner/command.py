"""`ninfer-pool generate`: run a model on one prompt, print its text and the tokens reused."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from ninfer_pool.core.prompt import Prompt
from ninfer_pool.errors import UsageError
from ninfer_pool.runner import TINY, Chat, Rendered, RequestOutput, Runner, Sampling, Sequence
from ninfer_pool.runner.loading import load_runner


def generate(args: argparse.Namespace) -> None:
    """Carry out one command line: text to stdout, all else to stderr.

    Raises:
        PoolError: one line with the fault; nothing was printed to stdout then.
        KeyboardInterrupt: Ctrl-C; the running request is cancelled.
    """
    text = prompt_text(args.prompt)
    sampling = sampling_of(args)
    runner = load(args)
    prompt, opening = raw(runner, text) if args.raw else chat(runner, text, args)
    for number in range(args.repeat):
        sequence = start(runner, prompt, sampling=sampling, max_tokens=args.max_tokens)
        if not number:
            print(f"{args.model or TINY.name}: {runner.capacity}", file=sys.stderr)
        answer(runner, sequence, opening=opening)


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
        raise UsageError("PROMPT: empty; write a text for the model")
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
    return load_runner(
        args.model,
        device=args.device,
        dtype=args.dtype,
        kv_dtype=args.kv_dtype,
        kv_budget=args.kv_budget,
        draft_tokens=args.draft_tokens,
    )


def raw(runner: Runner, text: str) -> tuple[Prompt, str]:
    """Return a prompt of the text itself, without a chat template, and no opening."""
    rendered = Rendered.raw(runner.tokenizer.encode(text))
    return runner.prompt(rendered.tokens, boundaries=rendered.boundaries), ""


def chat(runner: Runner, text: str, args: argparse.Namespace) -> tuple[Prompt, str]:
    """Return the prompt that the model's template makes of a question, and the answer's opening.

    The opening is the tag of thoughts that begin in the prompt and end in the answer.

    Raises:
        UsageError: the model has no chat template.
        PromptError: the template rejects the question.
    """
    if runner.tokenizer.chat_template is None:
        raise UsageError("--model: it has no chat template; add --raw")
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    switches: dict[str, Any] = {} if args.thinking else {"enable_thinking": False}
    messages = [*system, {"role": "user", "content": text}]
    rendered = Chat(runner.tokenizer).render(messages, **switches)
    prompt = runner.prompt(rendered.tokens, boundaries=rendered.boundaries)
    return prompt, "<think>\n" if rendered.thinking else ""


def start(runner: Runner, prompt: Prompt, *, sampling: Sampling, max_tokens: int) -> Sequence:
    """Admit a request.

    Raises:
        PromptError: it is longer than the model's context.
        UsageError: it does not fit the slab.
    """
    sequence = runner.start(prompt, sampling=sampling, max_tokens=max_tokens)
    if sequence is None:
        raise UsageError(f"--kv-budget: no room for {len(prompt)} + {max_tokens} tokens; give more")
    return sequence


def answer(runner: Runner, sequence: Sequence, *, opening: str = "") -> None:
    """Run one request; print its text as it is generated, then its summary on stderr."""
    try:
        sys.stdout.write(opening)
        show(runner, sequence, sys.stdout)
        runner.finish(sequence)
    finally:
        runner.cancel(sequence)
        print(summary(sequence.output()), file=sys.stderr)


def show(runner: Runner, sequence: Sequence, out: TextIO) -> None:
    """Write a request's text as it is generated, without stop tokens and partial characters."""
    stream, given = runner.tokenizer.stream(), 0
    try:
        for _ in steps(runner, sequence):
            new, given = sequence.tokens[given:], len(sequence.tokens)
            kept = [token for token in new if token not in sequence.stop_tokens]
            out.write("".join(map(stream.push, kept)))
            out.flush()
    finally:
        out.write(stream.finish() + "\n")
        out.flush()


def steps(runner: Runner, sequence: Sequence) -> Iterator[None]:
    """Run a request to its end, yielding whenever there are new tokens."""
    while not sequence.ready:
        runner.prefill(sequence)
    yield
    while sequence.finish is None:
        runner.decode([sequence])
        yield


def summary(made: RequestOutput) -> str:
    """Return one line on a request: its tokens, the tokens reused, the times."""
    exact = ", exact" if made.exact and made.reused else ""
    parts = [
        f"{made.prompt_tokens} prompt tokens, {made.reused} reused ({made.reuse}{exact})",
        f"{len(made.tokens)} new tokens ({made.finish})",
        f"first after {1000 * made.first_token_seconds:.1f} ms, "
        f"then {made.tokens_per_second:.1f} tokens per second",
    ]
    if made.drafted:
        parts.append(f"{made.accepted} of {made.drafted} drafts accepted")
    return "; ".join([*parts, made.reason])
