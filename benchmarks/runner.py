"""Measure the bundled runner: restoring, drafts and lanes of a model, as ratios.

python benchmarks/runner.py [--tiny] [--model FOLDER] [--device DEVICE] [--json FILE]

On CUDA two more rows compare copies and decode attention with the device's own copy rate.
"""

from __future__ import annotations

import platform
import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common.command import BenchmarkParser, progress
from benchmarks.common.ratios import Ratio, RatioReport, Timed, interleaved, ratio
from benchmarks.common.serving import (
    DEFAULT,
    FASTER,
    TINY,
    Bench,
    RunnerScale,
    draft_rows,
    first_token,
    lane_rows,
    restore_rows,
    started,
    synchronise,
)
from ninfer_pool import Prompt, kernels
from ninfer_pool.core.operations import LoadImage, SaveImage
from ninfer_pool.kernels import PAGE_TOKENS, KVPages
from ninfer_pool.runner import TINY as SHIPPED
from ninfer_pool.runner import Runner
from ninfer_pool.runner.loading import check_device
from ninfer_pool.runner.slab import Slab

IMAGE = 2.0
"""Limit: an image over a plain copy of its bytes, at least half its speed."""
SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16"}
COPY, ATTENTION = 1 / 0.8, 1 / 0.6
"""Limits on CUDA: 0.8 × the device's copy rate, 0.6 × the floor of bytes."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure at the chosen scale, print the table, write the JSON."""
    parser = BenchmarkParser(__doc__)
    parser.add_tiny(tiny=TINY, default=DEFAULT)
    parser.add_argument("--model", type=Path, default=SHIPPED, metavar="FOLDER")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    args = parser.parse_args(argv)
    with parser.checked(args):
        check_device(args.device)
        run(args.scale, folder=args.model, device=args.device).publish(args.json)


def run(scale: RunnerScale, *, folder: Path = SHIPPED, device: str = "cpu") -> RatioReport:
    """Measure everything of a scale; answers are checked before they are timed.

    Raises:
        AssertionError: a wrong answer; nothing is reported then.
        ModelError: a folder that cannot be run.
    """
    bench = Bench.load(scale, folder, device=device)
    model = bench.model
    rows: list[Ratio] = []
    for group in (restore_rows, image_rows, draft_rows, lane_rows):
        progress(group.__name__.replace("_", " "))
        rows += group(bench)
    beside, missing = prefill_rows(bench)
    if model.device.type == "cuda":
        rows += [copy_row(bench), attention_row(bench)]
    progress("")
    name = "tiny, as shipped" if folder == SHIPPED else folder.name
    return RatioReport(
        device=device_name(model.device),
        model=f"{name}, {SHORT[model.dtype]}, sha256:{model.digest[:12]}",
        results=[*rows, *beside],
        missing=missing,
    )


# -- images -----------------------------------------------------------------------------------


def image_rows(bench: Bench) -> list[Ratio]:
    """Compare saving and loading an image with one plain copy of as many bytes.

    Each call takes other pages than the last, and each copy other memory, as in a pool.
    """
    layout = bench.runner().slab.layout
    size, each = layout.image_pages, layout.image_pages * layout.page_bytes
    places = max(2, bench.scale.image_bytes // each)
    store = Slab(layout, num_pages=places * size, lanes=1, device=bench.model.device)
    order = random.Random(0).sample(range(places * size), places * size)
    pages = [tuple(order[at : at + size]) for at in range(0, len(order), size)]
    check_image(store, pages[0])
    lane, *plain = torch.zeros(places + 1, each, dtype=torch.uint8, device=store.device).unbind()
    random.Random(1).shuffle(plain)

    def all_of(act: Callable[[int], object], _: int) -> int:
        begin = time.perf_counter_ns()
        for number in range(places):
            act(number)
        bench.synchronise()
        return (time.perf_counter_ns() - begin) // places

    acts: dict[str, Callable[[int], object]] = {
        "image save": lambda number: store.execute([SaveImage(0, pages[number])]),
        "image load": lambda number: store.execute([LoadImage(pages[number], 0)]),
        "copy out": lambda number: plain[number].copy_(lane),
        "copy in": lambda number: lane.copy_(plain[number]),
    }
    actions: dict[str, Timed] = {name: partial(all_of, act) for name, act in acts.items()}
    taken = interleaved(actions, repeats=bench.scale.image_repeats)
    shape = f"{each:,} bytes, {size} pages"
    return [
        ratio(op, shape, taken[op], taken[copy], beside="plain copy", at_most=IMAGE)
        for op, copy in (("image save", "copy out"), ("image load", "copy in"))
    ]


def check_image(store: Slab, pages: tuple[int, ...]) -> None:
    """Confirm that a load restores the saved bytes."""
    state = store.state(0).recurrent
    state.normal_()
    before = state.clone()
    store.execute([SaveImage(0, pages)])
    state.zero_()
    store.execute([LoadImage(pages, 0)])
    assert torch.equal(state, before), "the image that was loaded is not the one saved"


# -- prefill, compared with transformers ------------------------------------------------------


def prefill_rows(bench: Bench) -> tuple[list[Ratio], list[tuple[str, str]]]:
    """Compare prefill with transformers on the same weights; or return the reason why not."""
    try:
        theirs = load_transformers(bench)
    except (ImportError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        return [], [("prefill in transformers", f"{type(error).__name__}: {reason}")]
    rows = []
    for size in bench.scale.prefill_tokens:
        progress(f"prefill of {size:,} tokens")
        runner = bench.runner(kv_dtype=SHORT[bench.model.dtype])
        prompt = runner.prompt(bench.tokens(size))
        ids = torch.from_numpy(prompt.tokens.astype("int64"))[None].to(bench.model.device)
        check_prefill(runner, prompt, theirs(ids))

        def forward(_: int, ids: torch.Tensor = ids) -> int:
            begin = time.perf_counter_ns()
            theirs(ids)
            bench.synchronise()
            return time.perf_counter_ns() - begin

        ours = partial(first_token, bench, runner, prompt, read=False)
        taken = interleaved({"ours": ours, "theirs": forward}, repeats=bench.scale.repeats)
        rows.append(
            ratio(
                "prefill", f"{size:,} tokens", taken["ours"], taken["theirs"],
                beside="transformers", at_most=FASTER,
            )
        )  # fmt: skip
    return rows, []


def load_transformers(bench: Bench) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return transformers' forward: ids (1, T) -> the last position's logits (vocab,)."""
    import transformers

    quiet: Any = transformers.utils.logging  # has no types
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        bench.folder, dtype=bench.model.dtype
    )
    model = loaded.to(bench.model.device).eval()

    def forward(ids: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = model(ids, logits_to_keep=1, use_cache=True).logits
        return logits[0, -1]

    return forward


def check_prefill(runner: Runner, prompt: Prompt, expected: torch.Tensor) -> None:
    """Confirm that both compute the same logits, to 1e-3 of their size in fp32."""
    running = started(runner, prompt, max_tokens=1, read=False)
    while not running.ready:
        runner.prefill(running)
    found = runner.executor.tail_logits(running.lane)
    runner.cancel(running)
    error = float((found - expected.float()).norm() / expected.float().norm())
    bound = 1e-3 if runner.model.dtype == torch.float32 else 0.1
    assert error <= bound, f"logits differ from transformers' by {error:.1e} of their size"


# -- on CUDA ----------------------------------------------------------------------------------


def copy_row(bench: Bench) -> Ratio:
    """Compare a copy of scattered pages with one plain copy of as many bytes."""
    layout, device = bench.runner().slab.layout, bench.model.device
    half = max(1, bench.scale.copied_bytes // layout.page_bytes)
    slab = torch.zeros(2 * half, layout.page_bytes, dtype=torch.uint8, device=device)
    order = torch.randperm(2 * half, generator=torch.Generator().manual_seed(0)).to(device)
    sources, targets = order[:half], order[half:]
    taken = interleaved(
        {
            "pages": _device_time(device, lambda: kernels.copy_pages(slab, sources, targets)),
            "plain": _device_time(device, lambda: slab[half:].copy_(slab[:half])),
        },
        repeats=bench.scale.repeats,
    )
    shape = f"{half:,} pages of {layout.page_bytes:,} bytes"
    beside = "device copy"
    return ratio("page copy", shape, taken["pages"], taken["plain"], beside=beside, at_most=COPY)


def attention_row(bench: Bench) -> Ratio:
    """Compare decode attention with one read of the same K and V at the copy rate."""
    device, config, rows = bench.model.device, bench.model.config, bench.scale.attended_rows
    pages = -(-bench.scale.attended_tokens // PAGE_TOKENS)
    shape = (rows * pages, config.num_key_value_heads, PAGE_TOKENS, config.head_dim)
    dtype = bench.model.dtype
    k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    q = torch.randn(rows, config.num_attention_heads, config.head_dim, device=device, dtype=dtype)
    tables = torch.randperm(rows * pages).view(rows, pages).to(device)
    lengths = torch.full((rows,), bench.scale.attended_tokens, device=device)
    cache, scale = KVPages(k=k, v=v), config.head_dim**-0.5
    # A copy of half of it reads and writes as many bytes as reading K and V.
    target = torch.empty_like(k)

    def attend() -> torch.Tensor:
        return kernels.attention_decode(q, cache, tables, lengths, scale=scale)

    taken = interleaved(
        {
            "attention": _device_time(device, attend),
            "floor": _device_time(device, lambda: target.copy_(k)),
        },
        repeats=bench.scale.repeats,
    )
    label = f"{rows} rows of {bench.scale.attended_tokens:,} tokens"
    beside = "reading K and V"
    return ratio(
        "decode attention", label, taken["attention"], taken["floor"],
        beside=beside, at_most=ATTENTION,
    )  # fmt: skip


def _device_time(device: torch.device, act: Callable[[], object], *, calls: int = 20) -> Timed:
    """Return a timer of one call, the mean of several without a wait between them."""

    def timed(_: int) -> int:
        synchronise(device)
        begin = time.perf_counter_ns()
        for _number in range(calls):
            act()
        synchronise(device)
        return (time.perf_counter_ns() - begin) // calls

    return timed


def device_name(device: torch.device) -> str:
    """Return the name of the device; on a CPU with its threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"cpu, {platform.machine()}, {threads} thread{'s' if threads > 1 else ''}"


if __name__ == "__main__":
    main()
