"""Measure host memory and disk below the device: moving, restoring, starting, as ratios.

python benchmarks/tiers.py [--tiny] [--json FILE]
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common.command import BenchmarkParser, progress
from benchmarks.common.moves import MovedEntries, disk_rows, host_rows
from benchmarks.common.overhead import FolderSize, OverheadScale, opening_row, overhead_rows
from benchmarks.common.ratios import Ratio, RatioReport, interleaved, ratio
from benchmarks.common.serving import TINY as SMALL
from benchmarks.common.serving import Bench, check_resumed, first_token, retain, started
from benchmarks.common.tiered import copy_down, empty_device
from ninfer_pool import Prompt
from ninfer_pool.runner import Runner

RESTORED = 0.1
"""Limit: restoring an entry from disk, compared with its cold prefill."""
LARGE = MovedEntries(
    name="27B", tokens=4_096, entries=1, page_bytes=2_162_688, image_bytes=153_954_304
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TiersScale:
    """How much is measured.

    Args:
        entry_tokens: length of an entry that is moved or restored; repeats: of each.
        moved_bytes: of the shipped model's entries that are moved in turn, about.
        large, large_repeats: an entry of a large model's sizes; None leaves it out.
        overhead: requests that need nothing from a tier; starts: folders that are indexed.
    """

    entry_tokens: int = 4_096
    repeats: int = 15
    moved_bytes: int = 64 << 20
    large: MovedEntries | None = LARGE
    large_repeats: int = 6
    overhead: OverheadScale = field(
        default_factory=lambda: OverheadScale(
            tokens=(2_048, 16_384, 65_536, 200_000), entries=64, requests=24
        )
    )
    starts: tuple[FolderSize, ...] = (
        FolderSize(entries=1_000, tokens=8_192, run_pages=128),
        FolderSize(entries=1_000, tokens=8_192, run_pages=7),
    )


DEFAULT = TiersScale()
TINY = TiersScale(
    entry_tokens=128, repeats=2, moved_bytes=1 << 20, large=None,
    overhead=OverheadScale(tokens=(1_024,), entries=3, requests=2),
    starts=(FolderSize(entries=3, tokens=256, run_pages=2),),
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Measure at the chosen scale, print the table, write the JSON."""
    parser = BenchmarkParser(__doc__)
    parser.add_tiny(tiny=TINY, default=DEFAULT)
    args = parser.parse_args(argv)
    with parser.checked(args):
        run(args.scale).publish(args.json)


def run(scale: TiersScale) -> RatioReport:
    """Measure everything of a scale; answers are checked before they are timed.

    Raises:
        AssertionError: a wrong answer; nothing is reported then.
    """
    bench = Bench.load(replace(SMALL, entry_tokens=scale.entry_tokens, repeats=scale.repeats))
    rows: list[Ratio] = []
    for name, group in _groups(scale, bench):
        progress(name)
        rows += group()
    progress("")
    return RatioReport(
        device=f"cpu, {platform.machine()}",
        model=f"tiny, as shipped, fp32, sha256:{bench.model.digest[:12]}",
        results=rows,
        missing=[] if scale.large else [("an entry of a large model", "left out at this scale")],
    )


def _groups(scale: TiersScale, bench: Bench) -> Iterator[tuple[str, partial[list[Ratio]]]]:
    sizes = [(shipped_entries(scale, bench), scale.repeats)]
    if scale.large is not None:
        sizes.append((scale.large, scale.large_repeats))
    for size, repeats in sizes:
        yield f"{size.name}, host", partial(host_rows, size, repeats=repeats)
        yield f"{size.name}, disk", partial(disk_rows, size, repeats=repeats)
    for tier in ("host", "disk"):
        yield f"restoring from {tier}", partial(restore_rows, bench, tier)
    yield "requests that need no tier", partial(overhead_rows, scale.overhead)
    for start in scale.starts:
        yield "indexing a folder", partial(start_rows, start, repeats=min(5, scale.repeats))


def shipped_entries(scale: TiersScale, bench: Bench) -> MovedEntries:
    """Return entries of about ``moved_bytes``, with pages and images of the shipped model."""
    config = bench.runner().pool.config
    one = MovedEntries(
        name="shipped model",
        tokens=scale.entry_tokens,
        entries=1,
        page_bytes=config.page_bytes,
        image_bytes=config.image_bytes,
    )
    return replace(one, entries=max(1, scale.moved_bytes // one.bytes))


def start_rows(size: FolderSize, *, repeats: int) -> list[Ratio]:
    """See `opening_row`."""
    return [opening_row(size, repeats=repeats)]


def restore_rows(bench: Bench, tier: str) -> list[Ratio]:
    """Compare restoring the shipped model's entry from a tier with its cold prefill."""
    with TemporaryDirectory(prefix="ninfer-bench-") as folder:
        options = {"host_budget": "1GiB"}
        if tier == "disk":
            options = {"disk_dir": folder, "disk_budget": "1GiB"}
        runner = bench.runner(background=False, **options)
        try:
            size = bench.scale.entry_tokens
            prompt = runner.prompt(bench.tokens(size), boundaries=[(size, "turn")])
            retain(runner, prompt)
            runner.tiers.flush()
            copy_down(runner.pool)
            empty_device(runner.pool)
            check_resumed(runner, prompt, at=size)
            taken = interleaved(
                {
                    "restore": partial(restore, runner, prompt, tier),
                    "cold": partial(first_token, bench, runner, prompt, read=False),
                },
                repeats=bench.scale.repeats,
            )
        finally:
            runner.close()
    return [
        ratio(
            f"restore from {tier}", f"shipped model, {size:,} tokens", taken["restore"],
            taken["cold"], beside="cold prefill", at_most=RESTORED if tier == "disk" else None,
        )
    ]  # fmt: skip


def restore(runner: Runner, prompt: Prompt, tier: str, _: int) -> int:
    """Admit a request whose prompt is stored in a tier; return nanoseconds until it is ready."""
    empty_device(runner.pool)
    begin = time.perf_counter_ns()
    running = started(runner, prompt, max_tokens=1)
    taken = time.perf_counter_ns() - begin
    found = running.lease.explanation.tier
    runner.cancel(running)
    assert found == tier, f"resumed from {found}, not from {tier}"
    return taken


if __name__ == "__main__":
    main()
