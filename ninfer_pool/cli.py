"""The console command `ninfer-pool`: simulate, trace, generate, serve, store, demo, bench.

Each command checks its whole command line before it runs: a mistake is one line on stderr, exit
code 2 and no output file. Imports that take time are inside the command that needs them.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from ninfer_pool.demo.arguments import add_demo
from ninfer_pool.errors import PoolError, UsageError, install_hint
from ninfer_pool.server.options import add_serve
from ninfer_pool.sim.arguments import add_simulate
from ninfer_pool.sim.options import argument, parse_count

TRACE_SOURCES = ("mooncake", "kv-cache-tester", "openai-jsonl", "server-log")
INTERRUPTED, PIPE_CLOSED = 130, 141
ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ("core", "peers", "runner", "server", "tiers", "hit_rate_vs_k")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code.

    0; 1 where `store verify` found damage; 2 on a caller's mistake; 130 on Ctrl-C.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without "…" or a trace's letters
    try:
        args = _parse(sys.argv[1:] if argv is None else argv)
        code = args.run(args)
        sys.stdout.flush()
    except PoolError as error:
        return _refuse(str(error))
    except BrokenPipeError:
        # The reader has closed the pipe; the flush at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _refuse(f"{where}{error.strerror or error}")
    except KeyboardInterrupt:
        return INTERRUPTED
    return int(code or 0)


def _refuse(message: str) -> int:
    print("ninfer-pool: error:", " ".join(message.splitlines()), file=sys.stderr)
    return 2


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; argparse loses traces between options, so they are added here."""
    parser = _parser(argv)
    args, rest = parser.parse_known_args(_join_negatives(argv))
    unknown = [word for word in rest if word.startswith("-") or "traces" not in args]
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        args.traces = [*args.traces, *map(Path, rest)]
    return args


def _join_negatives(argv: Sequence[str]) -> list[str]:
    """Write `--budget -1GiB` as one word, so that the error names the value."""
    words: list[str] = []
    for word in argv:
        option = bool(words) and words[-1].startswith("--") and words[-1] != "--"
        if option and word[:1] == "-" and word[1:2].isdigit():
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


class _Parser(argparse.ArgumentParser):
    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)
        self.set_defaults(parser=self)  # the parser of the innermost command wins

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message.removeprefix('argument ')} (see {self.prog} --help)")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print("ninfer-pool", version("ninfer-pool"))
        except PackageNotFoundError:
            print("ninfer-pool, run from a source tree that is not installed")
        parser.exit()


def _parser(argv: Sequence[str]) -> _Parser:
    parser = _Parser(prog="ninfer-pool", description="Prefix reuse for hybrid models, sized.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    simulate = commands.add_parser("simulate", help="hit rate against K and bytes on a trace")
    add_simulate(simulate)
    simulate.set_defaults(run=_simulate)
    _add_trace(commands.add_parser("trace", help="convert a log to a trace, or summarize one"))
    _add_generate(commands.add_parser("generate", help="run a model and print the reused tokens"))
    demo = commands.add_parser("demo", help="everyday requests, with one lane and with the pool")
    add_demo(demo)
    demo.set_defaults(run=_demo)
    serve = commands.add_parser("serve", help="an HTTP server for OpenAI's and Anthropic's clients")
    add_serve(serve)
    serve.set_defaults(run=_serve)
    store = commands.add_parser("store", help="list, check and clean a folder of --disk-dir")
    if list(argv[:1]) == ["store"]:  # its options import the tiers
        from ninfer_pool.tiers.disk.store_command import add_store

        add_store(store)
    bench = commands.add_parser("bench", help="measure on this machine, from a checkout")
    bench.add_argument("name", choices=BENCHMARKS, help="each has a --help of its own")
    bench.add_argument("options", nargs=argparse.REMAINDER)
    bench.set_defaults(run=_bench)
    return parser


def _add_trace(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(required=True, metavar="convert|info")
    convert = verbs.add_parser("convert", help="make a trace from a log of another format")
    convert.add_argument("--from", dest="source", required=True, choices=TRACE_SOURCES)
    tokenizer = "for openai-jsonl: count its tokens instead of UTF-8 bytes"
    convert.add_argument("--tokenizer", type=Path, metavar="FILE", help=tokenizer)
    convert.add_argument("input", type=Path, metavar="IN")
    convert.add_argument("output", type=Path, metavar="OUT")
    convert.set_defaults(run=_convert)
    info = verbs.add_parser("info", help="print what a trace holds")
    info.add_argument("file", type=Path, metavar="FILE")
    info.set_defaults(run=_info)


def _add_generate(parser: argparse.ArgumentParser) -> None:
    add, count = parser.add_argument, argument(parse_count)
    add("prompt", nargs="*", metavar="PROMPT", help='the user message; "-" or none: from stdin')
    add("--system", metavar="TEXT", help="a system message before the prompt")
    add("--raw", action="store_true", help="continue the text itself, without chat template")
    add("--no-thinking", dest="thinking", action="store_false", help="answer without reasoning")
    add("--repeat", type=count, default=1, metavar="N", help="run N times, to show the reuse")
    model = parser.add_argument_group("the model").add_argument
    model("--model", metavar="DIR", help="Hugging Face folder (default: the shipped model)")
    model("--device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    model("--dtype", choices=("fp32", "bf16", "fp16"), help="default: by device")
    model("--kv-dtype", choices=("fp32", "bf16", "fp16", "int8-g64"), help="default: bf16")
    model("--kv-budget", metavar="SIZE", help="such as 4GiB (default: a share of the free memory)")
    model("--draft-tokens", type=int, default=0, choices=range(6), help="per round (default: 0)")
    chosen = parser.add_argument_group("sampling").add_argument
    chosen("--max-tokens", type=count, default=256, metavar="N", help="default: 256")
    chosen("--temperature", type=float, default=0.0, help="0: the likeliest (default)")
    chosen("--top-k", type=int, default=0, metavar="K", help="only the K likeliest; 0: all")
    chosen("--top-p", type=float, default=1.0, metavar="P", help="likeliest up to probability P")
    chosen("--min-p", type=float, default=0.0, metavar="P", help="P of the likeliest's or more")
    chosen("--seed", type=int, help="repeats the draws (default: a new one)")
    parser.set_defaults(run=_generate)


def _simulate(args: argparse.Namespace) -> None:
    from ninfer_pool.sim.command import simulate

    simulate(args)


def _convert(args: argparse.Namespace) -> None:
    from ninfer_pool.sim.trace_command import convert_trace

    convert_trace(args)


def _info(args: argparse.Namespace) -> None:
    from ninfer_pool.sim.trace_command import print_info

    print_info(args)


def _serve(args: argparse.Namespace) -> None:
    with _needs_extra("server"):
        from ninfer_pool.server.command import serve
    serve(args)


def _demo(args: argparse.Namespace) -> None:
    with _needs_extra("runner"):
        from ninfer_pool.demo.command import demo
    demo(args)


def _bench(args: argparse.Namespace) -> int:
    script = ROOT / "benchmarks" / f"{args.name}.py"
    if not script.is_file():
        command = f"python benchmarks/{args.name}.py"
        raise UsageError(
            f"bench: no benchmarks next to the package in '{ROOT}'; run {command} in a checkout"
        )
    if args.name in ("runner", "server", "tiers") and find_spec("torch") is None:
        raise UsageError(install_hint("torch", "runner"))
    return subprocess.call([sys.executable, str(script), *args.options])


def _generate(args: argparse.Namespace) -> None:
    if args.raw and (args.system is not None or not args.thinking):
        option = "--no-thinking" if args.system is None else "--system"
        raise UsageError(f"{option}: --raw applies no chat template; leave one of the two out")
    with _needs_extra("runner"):
        from ninfer_pool.runner.command import generate
    generate(args)


@contextmanager
def _needs_extra(extra: str) -> Iterator[None]:
    """Name the command that installs an extra where one of its packages is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name in ("", "ninfer_pool"):
            raise
        raise UsageError(install_hint(name, extra)) from error
