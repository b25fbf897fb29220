"""What tiers cost a request that needs nothing from them, and how long a start takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.common.conversations import (
    ANSWER_TOKENS,
    PAGE_TOKENS,
    SPACE,
    TURN_TOKENS,
    Conversations,
    Tokens,
    random_tokens,
    store,
)
from benchmarks.common.questions import TimedTurn, then_new
from benchmarks.common.ratios import Ratio, Timed, interleaved, ratio
from ninfer_pool import PoolConfig, PrefixPool, Prompt
from ninfer_pool.core.eviction import Bill, drop_entry
from ninfer_pool.tiers import ArrayPayload, Tiers, device, open_tiers
from ninfer_pool.tiers.disk.files import Files
from ninfer_pool.tiers.disk.folder import Folder
from ninfer_pool.tiers.disk.geometry import DiskGeometry
from ninfer_pool.tiers.disk.manifest import EntryRecord, MarkRecord, RunBlob
from ninfer_pool.tiers.disk_medium import geometry_of

PAGE_BYTES = 64
"""Small: what is measured here moves no page."""
RUN_PAGES = 7
"""Pages in one run at most, as with a 27B model, whose entries so have as many runs."""
OVERHEAD_US = 50
"""Figure: what a request that needs nothing from a tier pays for tiers being on, at most."""
CASES = ("hit", "hit, copies below", "branch", "miss")


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadScale:
    """How much is measured: requests of each case, at each size, with so many entries below."""

    tokens: tuple[int, ...]
    entries: int
    requests: int


@contextmanager
def tiered_pool(plan: Conversations, *, pages: int) -> Iterator[tuple[PrefixPool, Tiers]]:
    """Yield a pool whose tiers hold a plan's conversations, in memory and on disk alike.

    Nothing of them is on the device.
    """
    config = PoolConfig(num_pages=pages, page_bytes=PAGE_BYTES, image_bytes=PAGE_BYTES)
    slab = np.zeros((pages, PAGE_BYTES), dtype=np.uint8)
    pool, payload = PrefixPool(config), ArrayPayload(slab, layout="bench")
    with TemporaryDirectory(prefix="ninfer-bench-") as folder:
        tiers = open_tiers(
            pool,
            payload,
            namespace=SPACE,
            host_budget=2 * pages * PAGE_BYTES,
            disk_dir=folder,
            disk_budget=1 << 40,
            background=False,
            files=Unsynced(),
        )
        try:
            for index in range(plan.entries):
                store(pool, plan.path(index), system=plan.system)
            put_below(pool, tiers)
            leave_device(pool)
            held = [len(shelf.records) for shelf in tiers.shelves]
            assert held == [plan.entries] * 2, f"{held} entries in the tiers"
            yield pool, tiers
        finally:
            tiers.close()


@contextmanager
def runs_of(pages: int) -> Iterator[None]:
    """Let no run have more pages meanwhile."""
    before, device.RUN_BYTES = device.RUN_BYTES, pages * PAGE_BYTES
    try:
        yield
    finally:
        device.RUN_BYTES = before


def put_below(pool: PrefixPool, tiers: Tiers) -> None:
    """Copy every entry on the device to every tier."""
    tiers.flush()
    with pool.lock:
        for entry in list(pool.retained.entries.values()):
            pool.retained.leaving(entry, entry.tip)


def leave_device(pool: PrefixPool) -> None:
    """Drop every entry from the device, and from nowhere else."""
    with pool.lock:
        for entry in list(pool.retained.entries.values()):
            drop_entry(pool.retained, entry, Bill())


class Unsynced(Files):
    """Files that need not outlive the machine, to fill a folder with."""

    def sync(self, descriptor: int) -> None:
        """Wait for nothing."""


class Requests:
    """Requests of one case, each of another conversation that the device holds."""

    def __init__(self, pool: PrefixPool, own: Conversations, *, case: str, first: int = 0) -> None:
        self._pool, self._own, self._case = pool, own, case
        self._next = first

    def __call__(self, _: int) -> int:
        """Make the next request; nanoseconds of its acquire and its commit."""
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
        plan, path = self._own, self._own.path(index)
        keep = {"branch": plan.middle, "miss": 0}.get(self._case, len(path))
        added = TURN_TOKENS if keep == len(path) else len(path) - keep
        longer = then_new(path[:keep], added)
        longer[keep + 1] = index  # no two alike
        right = {"branch": plan.system, "miss": 0}.get(self._case, len(path))
        system = [(plan.system, "system")] if right else []
        at = len(longer) - ANSWER_TOKENS
        told = [*system, (len(path) - ANSWER_TOKENS, "turn")] if right == len(path) else system
        prompt = Prompt(longer[:at], namespace=SPACE, boundaries=[*told, (at, "turn")])
        return prompt, longer, right


def overhead_rows(scale: OverheadScale) -> list[Ratio]:
    """Acquire and commit with tiers beside without, where nothing is needed from a tier."""
    return [row for tokens in scale.tokens for row in _overhead(scale, tokens=tokens)]


def _overhead(scale: OverheadScale, *, tokens: int) -> Iterator[Ratio]:
    below = Conversations(shape="agent", tokens=tokens, entries=scale.entries)
    requests = scale.requests + 1
    pages = 3 * (scale.entries + requests) * (tokens // PAGE_TOKENS + 24)
    for case in CASES:
        with runs_of(RUN_PAGES), tiered_pool(below, pages=pages) as (pool, tiers):
            own = Conversations(shape="agent", tokens=tokens, entries=scale.entries + requests)
            plain = PrefixPool(pool.config)
            for index in range(scale.entries, own.entries):
                for each in (pool, plain)[:: 1 if index % 2 else -1]:  # memory knows both alike
                    store(each, own.path(index), system=own.system)
            if case == "hit, copies below":
                put_below(pool, tiers)
            taken = interleaved(
                {
                    "on": Requests(pool, own, case=case, first=scale.entries),
                    "off": Requests(plain, own, case=case, first=scale.entries),
                },
                repeats=scale.requests,
            )
            assert not tiers.step(), "something was due"
            yield _row(tokens, case, taken, entries=scale.entries)
            if case == CASES[-1]:
                yield step_row(tiers, tokens, scale)


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
    """`Tiers.step` where nothing is due, beside an empty call."""

    def many(act: Timed, _: int) -> int:
        begin = time.perf_counter_ns()
        for number in range(100):
            act(number)
        return (time.perf_counter_ns() - begin) // 100

    taken = interleaved(
        {
            "step": partial(many, lambda _: int(tiers.step())),
            "empty": partial(many, lambda _: 0),
        },
        repeats=scale.requests,
    )
    shape = f"{scale.entries} entries of {tokens:,} tokens, nothing due"
    return ratio("step", shape, taken["step"], taken["empty"], beside="an empty call")


# -- start ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderSize:
    """A folder of so many entries of so many tokens, each in so many runs."""

    entries: int
    tokens: int
    runs: int


def opening_row(start: FolderSize, *, repeats: int) -> Ratio:
    """Indexing a folder beside reading the same manifests and token ids plainly."""
    config = PoolConfig(num_pages=8, page_bytes=PAGE_BYTES, image_bytes=PAGE_BYTES)
    payload = ArrayPayload(np.zeros((8, PAGE_BYTES), dtype=np.uint8), layout="bench")
    with TemporaryDirectory(prefix="ninfer-bench-") as place:
        folder = Folder(
            Path(place), geometry=geometry_of(config, payload), namespace=SPACE, files=Unsynced()
        )
        try:
            for number in range(start.entries):
                write_entry(folder, random_tokens(start.tokens, 6, number), runs=start.runs)
        finally:
            folder.close()

        def opened(_: int) -> int:
            pool = PrefixPool(config)
            begin = time.perf_counter_ns()
            tiers = open_tiers(
                pool, payload, namespace=SPACE, disk_dir=place, disk_budget=1 << 40,
                background=False,
            )  # fmt: skip
            taken = time.perf_counter_ns() - begin
            found = len(tiers.shelves[0].records)
            tiers.close()
            assert found == start.entries, f"{found} of {start.entries} entries indexed"
            return taken

        actions: dict[str, Timed] = {"open": opened, "read": partial(read_index, Path(place))}
        taken = interleaved(actions, repeats=repeats)
    shape = f"{start.entries:,} entries of {start.tokens:,} tokens in {start.runs} runs"
    seconds = statistics.median(taken["open"]) / 1e9
    return ratio(
        "start", shape, taken["open"], taken["read"], beside="plain read", note=f"{seconds:.2f} s"
    )


def read_index(folder: Path, _: int) -> int:
    """Read every manifest, and the beginning of every run up to the end of its tokens."""
    begin = time.perf_counter_ns()
    for path in [*folder.glob("*/entries/*"), *folder.glob("*/runs/*")]:
        with path.open("rb", buffering=0) as file:
            file.read(1 << 16)
    return time.perf_counter_ns() - begin


def write_entry(folder: Folder, tokens: Tokens, *, runs: int) -> None:
    """Write an entry of one checkpoint, in ``runs`` runs of whole pages."""
    geometry: DiskGeometry = folder.geometry
    size, raw = geometry.page_tokens, tokens.tobytes()
    pages = np.zeros((len(tokens) // size + 1, geometry.page_bytes), dtype=np.uint8)
    ends = [len(tokens) * number // runs // size * size for number in range(runs)]
    spans = zip(ends, [*ends[1:], len(tokens)], strict=True)
    blobs: list[RunBlob] = [
        folder.write_run(
            begin=begin,
            end=end,
            tokens=raw[4 * begin : 4 * end],
            pages=pages[: -(-end // size) - begin // size],
        )
        for begin, end in spans
    ]
    image = folder.write_image(np.zeros(geometry.image_bytes, dtype=np.uint8))
    mark = MarkRecord(
        position=len(tokens), kind="turn", cuts=(), expires=None, runs=tuple(range(runs)),
        image=image,
    )  # fmt: skip
    prompt = Prompt(tokens, namespace=SPACE)
    config = PoolConfig(num_pages=8, page_bytes=PAGE_BYTES, image_bytes=PAGE_BYTES)
    folder.commit(
        EntryRecord(
            namespace=SPACE, key=PrefixPool(config).key(prompt), tokens=len(tokens),
            prompt_tokens=len(tokens), priority=0, hits=0, gap=0, used=0, created=0.0,
            released=False, attributes=(), runs=tuple(blobs), marks=(mark,),
        )
    )  # fmt: skip
