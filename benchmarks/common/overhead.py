"""The cost of tiers for a request that needs nothing from them, and the time of a start."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.common.conversations import (
    ANSWER_TOKENS,
    PAGE_TOKENS,
    SPACE,
    TURN_TOKENS,
    Conversations,
    Tokens,
    random_tokens,
    store,
    store_stops,
)
from benchmarks.common.probes import TimedTurn, then_new
from benchmarks.common.ratios import Ratio, Timed, interleaved, ratio
from benchmarks.common.tiered import TieredPool, UnsyncedFiles, tiered
from ninfer_pool import PoolConfig, PrefixPool, Prompt
from ninfer_pool.tiers import Tiers, device

PAGE_BYTES = 64
"""Small: these benchmarks move no page."""
DISK_BYTES = 1 << 40
RUN_PAGES = 7
"""Most pages in one run, as with a 27B model: entries then have as many runs."""
OVERHEAD_US = 50
"""Limit: the time that tiers may add to a request that needs nothing from them."""
CASES = ("hit", "hit, copies below", "branch", "miss")


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadScale:
    """Numbers of requests per case and size, and of entries in the tiers."""

    tokens: tuple[int, ...]
    entries: int
    requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderSize:
    """A folder of ``entries`` of ``tokens`` tokens, in runs of at most ``run_pages`` pages."""

    entries: int
    tokens: int
    run_pages: int

    @property
    def pages(self) -> int:
        """Pages of one entry's KV."""
        return -(-self.tokens // PAGE_TOKENS)


def small_config(*, pages: int) -> PoolConfig:
    """Return the configuration of a pool whose pages and images are small."""
    return PoolConfig(num_pages=pages, page_bytes=PAGE_BYTES, image_bytes=PAGE_BYTES)


@contextmanager
def filled_tiers(plan: Conversations, *, pages: int) -> Iterator[TieredPool]:
    """Yield a pool with every conversation in host memory and on disk, and an empty device."""
    host = 2 * pages * PAGE_BYTES
    config = small_config(pages=pages)
    with tiered(config, host_budget=host, disk_budget=DISK_BYTES, files=UnsyncedFiles()) as place:
        for index in range(plan.entries):
            store(place.pool, plan.path(index), system=plan.system)
        place.copy_down()
        place.empty_device()
        held = [len(shelf.records) for shelf in place.tiers.shelves]
        assert held == [plan.entries] * 2, f"{held} entries in the tiers"
        yield place


@contextmanager
def runs_of(pages: int) -> Iterator[None]:
    """Limit every run written in the block to a number of pages."""
    before, device.RUN_BYTES = device.RUN_BYTES, pages * PAGE_BYTES
    try:
        yield
    finally:
        device.RUN_BYTES = before


class CaseRequests:
    """Requests of one case, each of another conversation that the device holds."""

    def __init__(self, pool: PrefixPool, own: Conversations, *, case: str, first: int = 0) -> None:
        self._pool, self._own, self._case = pool, own, case
        self._next = first

    def __call__(self, _: int) -> int:
        """Make the next request; return the nanoseconds of its acquire and its commit."""
        index, self._next = self._next, self._next + 1
        prompt, path, right = self._request(index)
        before = self._pool.explain(prompt)
        if (before.resumable, before.tier) != (right, "device" if right else None):
            raise AssertionError(f"{self._case}: resumes {before.resumable} from {before.tier}")
        turn = TimedTurn(self._pool, prompt, path)
        begin = time.perf_counter_ns()
        turn()
        return time.perf_counter_ns() - begin - turn.excluded

    def _request(self, index: int) -> tuple[Prompt, Tokens, int]:
        """Return the prompt, all its tokens, and how many of them must be resumed."""
        plan, path = self._own, self._own.path(index)
        keep = {"branch": plan.middle, "miss": 0}.get(self._case, len(path))
        right = {"branch": plan.system, "miss": 0}.get(self._case, len(path))
        longer = then_new(path[:keep], TURN_TOKENS if keep == len(path) else len(path) - keep)
        longer[keep + 1] = index  # no two alike
        at = len(longer) - ANSWER_TOKENS
        boundaries = [(plan.system, "system")] if right else []
        if right == len(path):
            boundaries.append((len(path) - ANSWER_TOKENS, "turn"))
        boundaries.append((at, "turn"))
        return Prompt(longer[:at], namespace=SPACE, boundaries=boundaries), longer, right


def overhead_rows(scale: OverheadScale) -> list[Ratio]:
    """Compare acquire and commit with and without tiers, where no tier is needed."""
    return [row for tokens in scale.tokens for row in _overhead(scale, tokens=tokens)]


def _overhead(scale: OverheadScale, *, tokens: int) -> Iterator[Ratio]:
    below = Conversations(shape="agent", tokens=tokens, entries=scale.entries)
    own = Conversations(shape="agent", tokens=tokens, entries=scale.entries + scale.requests + 1)
    pages = 3 * own.entries * (tokens // PAGE_TOKENS + 24)
    for case in CASES:
        with runs_of(RUN_PAGES), filled_tiers(below, pages=pages) as place:
            plain = PrefixPool(place.pool.config)
            for index in range(scale.entries, own.entries):
                # In turn, so that the allocator treats both alike.
                for each in (place.pool, plain)[:: 1 if index % 2 else -1]:
                    store(each, own.path(index), system=own.system)
            if case == "hit, copies below":
                place.copy_down()
            pools = {"on": place.pool, "off": plain}
            taken = interleaved(
                {
                    name: CaseRequests(pool, own, case=case, first=scale.entries)
                    for name, pool in pools.items()
                },
                repeats=scale.requests,
            )
            assert not place.tiers.step(), "something was due"
            yield _row(tokens, case, taken, entries=scale.entries)
            if case == CASES[-1]:
                yield step_row(place.tiers, tokens, scale)


def _row(tokens: int, case: str, taken: dict[str, list[int]], *, entries: int) -> Ratio:
    pairs = zip(taken["on"], taken["off"], strict=True)
    added = statistics.median(on - off for on, off in pairs) / 1000
    verdict = "" if added <= OVERHEAD_US else " (missed)"
    return ratio(
        "acquire and commit",
        f"{tokens:,} tokens, {case}, {entries} others in tiers",
        taken["on"],
        taken["off"],
        beside="without tiers",
        note=f"tiers add {added:.1f} µs, figure ≤ {OVERHEAD_US}{verdict}",
    )


def step_row(tiers: Tiers, tokens: int, scale: OverheadScale) -> Ratio:
    """Compare `Tiers.step` where nothing is due with an empty call."""

    def many(act: Timed, _: int) -> int:
        begin = time.perf_counter_ns()
        for number in range(100):
            act(number)
        return (time.perf_counter_ns() - begin) // 100

    actions = {
        "step": partial(many, lambda _: int(tiers.step())),
        "empty": partial(many, lambda _: 0),
    }
    taken = interleaved(actions, repeats=scale.requests)
    shape = f"{scale.entries} entries of {tokens:,} tokens, nothing due"
    return ratio("step", shape, taken["step"], taken["empty"], beside="an empty call")


# -- start ------------------------------------------------------------------------------------


def opening_row(size: FolderSize, *, repeats: int) -> Ratio:
    """Compare indexing a folder with reading the same manifests and token ids plainly."""
    with TemporaryDirectory(prefix="ninfer-bench-") as name:
        folder = Path(name)
        fill_folder(folder, size)

        def opened(_: int) -> int:
            begin = time.perf_counter_ns()
            with tiered(small_config(pages=8), disk_budget=DISK_BYTES, folder=folder) as place:
                taken = time.perf_counter_ns() - begin
                found = len(place.tiers.shelves[0].records)
            assert found == size.entries, f"{found} of {size.entries} entries indexed"
            return taken

        actions: dict[str, Timed] = {"open": opened, "read": partial(read_index, folder)}
        taken = interleaved(actions, repeats=repeats)
    runs = -(-size.pages // size.run_pages)
    shape = f"{size.entries:,} entries of {size.tokens:,} tokens in {runs} runs"
    seconds = statistics.median(taken["open"]) / 1e9
    return ratio(
        "start", shape, taken["open"], taken["read"], beside="plain read", note=f"{seconds:.2f} s"
    )


def fill_folder(folder: Path, size: FolderSize) -> None:
    """Write entries of one checkpoint each to a folder of the disk tier."""
    config = small_config(pages=size.entries * (size.pages + 2))
    with (
        runs_of(size.run_pages),
        tiered(config, disk_budget=DISK_BYTES, folder=folder, files=UnsyncedFiles()) as place,
    ):
        for number in range(size.entries):
            path = random_tokens(size.tokens, 6, number)
            store_stops(place.pool, path, stops=[size.tokens])
        place.tiers.flush()


def read_index(folder: Path, _: int) -> int:
    """Read every manifest, and the beginning of every run up to the end of its tokens."""
    begin = time.perf_counter_ns()
    for path in [*folder.glob("*/entries/*"), *folder.glob("*/runs/*")]:
        with path.open("rb", buffering=0) as file:
            file.read(1 << 16)
    return time.perf_counter_ns() - begin
