"""Entries moved between a device and the tier below it, compared with plain copies and reads."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import xxhash

from benchmarks.common.conversations import PAGE_TOKENS, SPACE, random_tokens, store_stops
from benchmarks.common.ratios import Ratio, Timed, interleaved, ratio
from benchmarks.common.tiered import TieredPool, tiered
from ninfer_pool import Lease, PoolConfig, Prompt
from ninfer_pool.tiers.disk_medium import DiskMedium

COPY, READ = 1 / 0.6, 1 / 0.5
"""Limits: 0.6 × the speed of a plain copy, 0.5 × that of the fastest plain read."""
SPARE_PAGES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedEntries:
    """The entries to move: ``entries`` of ``tokens`` tokens with one image each."""

    name: str
    tokens: int
    entries: int
    page_bytes: int
    image_bytes: int

    @property
    def pages(self) -> int:
        """Pages of one entry, its image's among them."""
        return -(-self.tokens // PAGE_TOKENS) + -(-self.image_bytes // self.page_bytes)

    @property
    def bytes(self) -> int:
        """Bytes of all entries."""
        return self.entries * self.pages * self.page_bytes

    @property
    def label(self) -> str:
        """The name in the report."""
        many = f"{self.entries} entries" if self.entries > 1 else "one entry"
        return f"{self.name}, {many} of {self.tokens:,} tokens, {self.bytes / 1e6:,.0f} MB"

    def config(self) -> PoolConfig:
        """Return the configuration of a pool that holds all of it on the device."""
        return PoolConfig(
            num_pages=self.entries * self.pages + SPARE_PAGES,
            page_bytes=self.page_bytes,
            image_bytes=self.image_bytes,
        )


@dataclass(slots=True, kw_only=True)
class Moves:
    """Entries that move down to the tier below the device and back up, again and again.

    Down is the move of an entry that has no room on the device, up that of an entry that a
    request resumes. Each repeat moves all of them; its preparation is not timed.
    """

    place: TieredPool
    prompts: Sequence[Prompt]
    sums: list[str] = field(default_factory=list)

    def fill(self) -> None:
        """Retain every prompt on the device, with the bytes that its pages already have."""
        for prompt in self.prompts:
            store_stops(self.place.pool, prompt.tokens, stops=[len(prompt)])
        self.sums = self._sums()

    def check(self) -> None:
        """Confirm that an entry returns to the device with the bytes that were stored."""
        self.down(0)
        self.place.empty_device()
        config = self.place.pool.config
        for page in range(config.num_pages):
            self.place.payload.write([page], [np.zeros(config.page_bytes, dtype=np.uint8)])
        self.up(0)
        assert self._sums() == self.sums, "the entries have other bytes than those stored"

    def down(self, _: int) -> int:
        """Store every entry in the tier; return the median nanoseconds of one."""
        self._fill_device()
        self._empty_tier()
        state, taken = self.place.pool.state, []
        with self.place.pool.state.lock:
            for entry in list(state.catalog.entries.values()):
                begin = time.perf_counter_ns()
                state.hooks.on_evict(entry, entry.tip)
                taken.append(time.perf_counter_ns() - begin)
        self._check_whole()
        return middle(taken)

    def flush(self, _: int) -> int:
        """Flush every entry to disk, as a server does before it ends; return nanoseconds."""
        self._fill_device()
        self._empty_tier()
        begin = time.perf_counter_ns()
        left = self.place.tiers.flush()
        taken = time.perf_counter_ns() - begin
        assert left == 0, f"{left} entries were not written"
        return taken

    def up(self, _: int) -> int:
        """Admit a request per entry, which restores it; return the nanoseconds of one acquire."""
        self._fill_tier()
        self.place.empty_device()
        return self._admit(self.place.tiers.shelves[0].name)

    def hit(self, _: int) -> int:
        """Admit a request per entry on the device; return the nanoseconds of one acquire."""
        self._fill_device()
        return self._admit("device")

    def _admit(self, tier: str) -> int:
        taken = []
        for prompt in self.prompts:
            begin = time.perf_counter_ns()
            lease = self.place.pool.acquire(prompt)
            taken.append(time.perf_counter_ns() - begin)
            assert isinstance(lease, Lease), f"no room: {self.place.pool.last_refusal}"
            with lease:
                found = (lease.start, lease.explanation.tier)
                assert found == (len(prompt), tier), f"resumed {found}, not all from {tier}"
        return middle(taken)

    def files(self) -> list[list[Path]]:
        """Return the payload files of each entry on disk."""
        self._fill_tier()
        (medium,) = (shelf.medium for shelf in self.place.tiers.shelves)
        assert isinstance(medium, DiskMedium), "the tier is not on disk"
        own = self.place.folder / medium.folder.fingerprint
        return [
            [own.joinpath(*file) for file in record.files()]
            for record in medium.folder.records.values()
        ]

    def _fill_device(self) -> None:
        if not self.place.pool.state.catalog.entries:
            self.up(0)

    def _fill_tier(self) -> None:
        if not self.place.tiers.shelves[0].records:
            self.down(0)
        self._check_whole()

    def _check_whole(self) -> None:
        found = len(self.place.tiers.shelves[0].records)
        assert found == len(self.prompts), f"{found} of {len(self.prompts)} entries in the tier"

    def _empty_tier(self) -> None:
        shelf = self.place.tiers.shelves[0]
        with self.place.pool.state.lock:
            for record in list(shelf.records.values()):
                shelf.remove(record)

    def _sums(self) -> list[str]:
        """Return a digest of the bytes of each prompt's entry on the device."""
        state, config = self.place.pool.state, self.place.pool.config
        by_key = {entry.key: entry.tip for entry in state.catalog.entries.values()}
        sums = []
        for prompt in self.prompts:
            tip = by_key[self.place.pool.key(prompt)]
            ids = [*tip.kv_pages(config.page_tokens), *state.ledger.pages_of_image(tip.image)]
            rows = list(np.empty((len(ids), config.page_bytes), dtype=np.uint8))
            self.place.payload.read([int(page) for page in ids], rows)
            rest = config.image_bytes % config.page_bytes
            if rest:  # the end of an image's last page belongs to no image
                rows[-1] = rows[-1][:rest]
            sums.append(xxhash.xxh3_128_hexdigest(b"".join(row.tobytes() for row in rows)))
        return sums


def middle(taken: Sequence[int]) -> int:
    """Return the median as an int."""
    return int(statistics.median(taken))


@contextmanager
def moving(size: MovedEntries, *, tier: str) -> Iterator[Moves]:
    """Yield entries over ``host`` or ``disk``, filled and checked."""
    config = size.config()
    rng = np.random.default_rng(0)
    slab = rng.integers(0, 256, (config.num_pages, config.page_bytes), dtype=np.uint8)
    room = size.bytes + (size.bytes >> 3)
    with tiered(
        config,
        slab=slab,
        host_budget=room if tier == "host" else None,
        disk_budget=2 * room + (size.entries << 20) if tier == "disk" else None,
    ) as place:
        prompts = [
            Prompt(random_tokens(size.tokens, 5, number), namespace=SPACE)
            for number in range(size.entries)
        ]
        moves = Moves(place=place, prompts=prompts)
        moves.fill()
        moves.check()
        yield moves


def host_rows(size: MovedEntries, *, repeats: int) -> list[Ratio]:
    """Compare saving to host memory and loading from it with a plain copy of the same bytes."""
    with moving(size, tier="host") as moves:
        actions: dict[str, Timed] = {
            "save": moves.down, "load": moves.up, "hit": moves.hit, "copy": plain_copy(size)
        }  # fmt: skip
        taken = interleaved(actions, repeats=repeats)
    load, note = beyond(taken["load"], taken["hit"])
    copy, beside = taken["copy"], "plain copy"
    return [
        ratio("save to host", size.label, taken["save"], copy, beside=beside, at_most=COPY),
        ratio("load from host", size.label, load, copy, beside=beside, at_most=COPY, note=note),
    ]


def beyond(taken: Sequence[int], hit: Sequence[int]) -> tuple[list[int], str]:
    """Return the times beyond a hit on the device, and a note on the hit."""
    own = middle(hit)
    return [each - own for each in taken], f"beyond a hit on the device, {own / 1000:,.0f} µs"


def plain_copy(size: MovedEntries) -> Timed:
    """Copy each entry's bytes from one touched array to another."""
    each = (size.pages * size.page_bytes,)
    pairs = [(np.ones(each, np.uint8), np.zeros(each, np.uint8)) for _ in range(size.entries)]

    def copy(_: int) -> int:
        taken = []
        for source, target in pairs:
            begin = time.perf_counter_ns()
            np.copyto(target, source)
            taken.append(time.perf_counter_ns() - begin)
        return middle(taken)

    return copy


def disk_rows(size: MovedEntries, *, repeats: int) -> list[Ratio]:
    """Compare loading from warm files with plain reads, and a flush with a plain write."""
    with moving(size, tier="disk") as moves, TemporaryDirectory(prefix="ninfer-bench-") as folder:
        read = plain_read(copied(moves.files(), Path(folder)))
        taken = interleaved({"load": moves.up, "hit": moves.hit, "read": read}, repeats=repeats)
        write = partial(plain_write, Path(folder) / "plain", size.bytes)
        taken |= interleaved({"flush": moves.flush, "write": write}, repeats=repeats)
    load, note = beyond(taken["load"], taken["hit"])
    return [
        ratio(
            "load from disk", size.label, load, taken["read"],
            beside="plain read", at_most=READ, note=note,
        ),
        ratio(
            "flush to disk", size.label, taken["flush"], taken["write"],
            beside="plain write and fsync", note=f"{middle(taken['flush']) / 1e9:.2f} s in all",
        ),
    ]  # fmt: skip


def copied(groups: Sequence[Sequence[Path]], folder: Path) -> list[list[Path]]:
    """Copy files to a folder from which nothing removes them."""
    number = count()
    return [
        [Path(shutil.copy(path, folder / str(next(number)))) for path in group] for group in groups
    ]


def plain_read(groups: Sequence[Sequence[Path]]) -> Timed:
    """Read each entry's files into memory that is already allocated."""
    lengths = [sum(path.stat().st_size for path in paths) for paths in groups]
    buffers = [np.zeros(size + 1, dtype=np.uint8).data for size in lengths]

    def read(_: int) -> int:
        taken = []
        for paths, size, buffer in zip(groups, lengths, buffers, strict=True):
            begin, at = time.perf_counter_ns(), 0
            for path in paths:
                with path.open("rb", buffering=0) as file:
                    while got := file.readinto(buffer[at:]):
                        at += got
            taken.append(time.perf_counter_ns() - begin)
            assert at == size, f"read {at} bytes of {size}"
        return middle(taken)

    return read


def plain_write(path: Path, size: int, _: int) -> int:
    """Write one file and synchronise it; return nanoseconds."""
    data = np.ones(size, dtype=np.uint8).data
    begin = time.perf_counter_ns()
    with path.open("wb", buffering=0) as file:
        at = 0
        while at < size:
            at += file.write(data[at:])
        os.fsync(file.fileno())
    taken = time.perf_counter_ns() - begin
    path.unlink()
    return taken
