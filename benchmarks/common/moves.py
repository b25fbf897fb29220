"""Entries moved between a device and the tier below it, beside plain copies, reads and writes."""

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
from numpy.typing import NDArray

from benchmarks.common.conversations import PAGE_TOKENS, SPACE, random_tokens
from benchmarks.common.ratios import Ratio, Timed, interleaved, ratio
from ninfer_pool import Lease, PoolConfig, PrefixPool, Prompt
from ninfer_pool.core.eviction import Bill, drop_entry
from ninfer_pool.tiers import ArrayPayload, Payload, Tiers, open_tiers
from ninfer_pool.tiers.disk_medium import DiskMedium

COPY, READ = 1 / 0.6, 1 / 0.5
"""Figures: 0.6 × the speed of a plain copy, 0.5 × that of the fastest plain read."""
SPARE_PAGES = 8

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is moved: ``entries`` of ``tokens`` tokens with one image each."""

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
    def told(self) -> str:
        """How the report names it."""
        many = f"{self.entries} entries" if self.entries > 1 else "one entry"
        return f"{self.name}, {many} of {self.tokens:,} tokens, {self.bytes / 1e6:,.0f} MB"

    def config(self) -> PoolConfig:
        """Return a pool that holds all of it on the device."""
        return PoolConfig(
            num_pages=self.entries * self.pages + SPARE_PAGES,
            page_bytes=self.page_bytes,
            image_bytes=self.image_bytes,
        )


@dataclass(slots=True, kw_only=True)
class Moves:
    """Entries that go down to the tier below the device and come back up, again and again.

    Down is what happens when the device has no room for them, up what happens when a request
    resumes them. Each turn moves all of them; what makes a turn possible is not timed.
    """

    pool: PrefixPool
    tiers: Tiers
    payload: Payload
    prompts: Sequence[Prompt]
    folder: Path
    """Of the disk tier, where that is the one below the device."""
    sums: list[str] = field(default_factory=list)

    def fill(self) -> None:
        """Retain every prompt on the device, on pages as they are."""
        for prompt in self.prompts:
            with _lease(self.pool, prompt) as lease:
                for chunk in lease.chunks():
                    lease.advance(prompt.tokens[chunk.begin : chunk.end])
                    if chunk.checkpoint:
                        lease.checkpoint(chunk.checkpoint, position=chunk.end)
                assert lease.commit() is not None, "there was room, and nothing was retained"
        self.sums = self._sums()

    def check(self) -> None:
        """The gate: what went down comes back up with the same bytes."""
        self.down(0)
        self._leave_device()
        for page in range(self.pool.config.num_pages):
            row = np.zeros(self.pool.config.page_bytes, dtype=np.uint8)
            self.payload.write([page], [row])
        self.up(0)
        assert self._sums() == self.sums, "what came back has other bytes than what was stored"

    def down(self, _: int) -> int:
        """Store every entry in the tier; nanoseconds of one, in the middle."""
        self._return_to_device()
        self._leave_tier()
        retained, taken = self.pool.retained, []
        with self.pool.lock:
            for entry in list(retained.entries.values()):
                begin = time.perf_counter_ns()
                retained.leaving(entry, entry.tip)
                taken.append(time.perf_counter_ns() - begin)
        self._check_whole()
        return middle(taken)

    def flush(self, _: int) -> int:
        """Flush every entry to disk, as a server does before it ends; nanoseconds."""
        self._return_to_device()
        self._leave_tier()
        begin = time.perf_counter_ns()
        left = self.tiers.flush()
        taken = time.perf_counter_ns() - begin
        assert left == 0, f"{left} entries were not written"
        return taken

    def up(self, _: int) -> int:
        """Admit a request for every entry, which brings it back; nanoseconds of one acquire."""
        self._check_below()
        self._leave_device()
        return self._admit(self.tiers.shelves[0].name)

    def hit(self, _: int) -> int:
        """Admit a request for every entry on the device; nanoseconds of one acquire."""
        self._return_to_device()
        return self._admit("device")

    def _admit(self, tier: str) -> int:
        taken = []
        for prompt in self.prompts:
            begin = time.perf_counter_ns()
            lease = self.pool.acquire(prompt)
            taken.append(time.perf_counter_ns() - begin)
            assert isinstance(lease, Lease), f"no room: {self.pool.last_refusal}"
            with lease:
                found = (lease.start, lease.explanation.tier)
                assert found == (len(prompt), tier), f"resumed {found}, not all from {tier}"
        return middle(taken)

    def files(self) -> list[list[Path]]:
        """The payload files of each entry on disk."""
        self._check_below()
        (medium,) = (shelf.medium for shelf in self.tiers.shelves)
        assert isinstance(medium, DiskMedium), "the tier is not on disk"
        own = self.folder / medium.folder.fingerprint
        return [
            [own.joinpath(*file) for file in record.files()]
            for record in medium.folder.records.values()
        ]

    def _return_to_device(self) -> None:
        if not self.pool.retained.entries:
            self.up(0)

    def _check_below(self) -> None:
        if not self.tiers.shelves[0].records:
            self.down(0)
        self._check_whole()

    def _check_whole(self) -> None:
        found = len(self.tiers.shelves[0].records)
        assert found == len(self.prompts), f"{found} of {len(self.prompts)} entries in the tier"

    def _leave_device(self) -> None:
        retained = self.pool.retained
        with self.pool.lock:
            for entry in list(retained.entries.values()):
                drop_entry(retained, entry, Bill())

    def _leave_tier(self) -> None:
        shelf = self.tiers.shelves[0]
        with self.pool.lock:
            for record in list(shelf.records.values()):
                shelf.remove(record)

    def _sums(self) -> list[str]:
        """A digest of the bytes of each prompt's entry on the device."""
        retained, size = self.pool.retained, self.pool.config.page_tokens
        by_key = {entry.key: entry.tip for entry in retained.entries.values()}
        sums = []
        for prompt in self.prompts:
            tip = by_key[self.pool.key(prompt)]
            ids = [*tip.kv_pages(size), *retained.ledger.pages_of_image(tip.image)]
            rows = list(np.empty((len(ids), self.pool.config.page_bytes), dtype=np.uint8))
            self.payload.read([int(page) for page in ids], rows)
            rest = self.pool.config.image_bytes % self.pool.config.page_bytes
            if rest:  # the end of an image's last page is nobody's
                rows[-1] = rows[-1][:rest]
            sums.append(xxhash.xxh3_128_hexdigest(b"".join(row.tobytes() for row in rows)))
        return sums


def middle(taken: Sequence[int]) -> int:
    """Return the median, as an int: what a busy machine does to one of them does not count."""
    return int(statistics.median(taken))


def _lease(pool: PrefixPool, prompt: Prompt) -> Lease:
    lease = pool.acquire(prompt)
    assert isinstance(lease, Lease), f"no room: {pool.last_refusal}"
    assert lease.start == 0, f"resumed {lease.start} of a prompt that was never seen"
    return lease


@contextmanager
def moving(shape: Shape, *, tier: str) -> Iterator[Moves]:
    """Yield entries of a shape over ``host`` or ``disk``, filled and checked."""
    config = shape.config()
    rng = np.random.default_rng(0)
    slab = rng.integers(0, 256, (config.num_pages, config.page_bytes), dtype=np.uint8)
    pool, payload = PrefixPool(config), ArrayPayload(slab, layout="bench")
    room = shape.bytes + (shape.bytes >> 3)
    with TemporaryDirectory(prefix="ninfer-bench-") as folder:
        tiers = open_tiers(
            pool,
            payload,
            namespace=SPACE,
            host_budget=room if tier == "host" else None,
            disk_dir=folder if tier == "disk" else None,
            disk_budget=2 * room + (shape.entries << 20) if tier == "disk" else None,
            background=False,
        )
        try:
            prompts = [
                Prompt(
                    random_tokens(shape.tokens, 5, number),
                    namespace=SPACE,
                    boundaries=[(shape.tokens, "turn")],
                )
                for number in range(shape.entries)
            ]
            moves = Moves(
                pool=pool, tiers=tiers, payload=payload, prompts=prompts, folder=Path(folder)
            )
            moves.fill()
            moves.check()
            yield moves
        finally:
            tiers.close()


def host_rows(shape: Shape, *, repeats: int) -> list[Ratio]:
    """Saving to host memory and loading from it beside a plain copy of the same bytes."""
    with moving(shape, tier="host") as moves:
        actions: dict[str, Timed] = {
            "save": moves.down, "load": moves.up, "hit": moves.hit, "copy": plain_copy(shape)
        }  # fmt: skip
        taken = interleaved(actions, repeats=repeats)
    load, told = beyond(taken["load"], taken["hit"])
    copy, beside = taken["copy"], "plain copy"
    return [
        ratio("save to host", shape.told, taken["save"], copy, beside=beside, at_most=COPY),
        ratio("load from host", shape.told, load, copy, beside=beside, at_most=COPY, note=told),
    ]


def beyond(taken: Sequence[int], hit: Sequence[int]) -> tuple[list[int], str]:
    """Return what acquiring takes beyond a hit on the device, and the words for it."""
    own = middle(hit)
    return [each - own for each in taken], f"beyond a hit on the device, {own / 1000:,.0f} µs"


def plain_copy(shape: Shape) -> Timed:
    """Copy each entry's bytes from one touched array to another."""
    each = (shape.pages * shape.page_bytes,)
    pairs = [(np.ones(each, np.uint8), np.zeros(each, np.uint8)) for _ in range(shape.entries)]

    def copy(_: int) -> int:
        taken = []
        for source, target in pairs:
            begin = time.perf_counter_ns()
            np.copyto(target, source)
            taken.append(time.perf_counter_ns() - begin)
        return middle(taken)

    return copy


def disk_rows(shape: Shape, *, repeats: int) -> list[Ratio]:
    """Loading from warm files beside reading them plainly; a flush beside a plain write."""
    with moving(shape, tier="disk") as moves, TemporaryDirectory(prefix="ninfer-bench-") as folder:
        read = plain_read(copied(moves.files(), Path(folder)))
        taken = interleaved({"load": moves.up, "hit": moves.hit, "read": read}, repeats=repeats)
        write = partial(plain_write, Path(folder) / "plain", shape.bytes)
        taken |= interleaved({"flush": moves.flush, "write": write}, repeats=repeats)
    load, told = beyond(taken["load"], taken["hit"])
    return [
        ratio(
            "load from disk", shape.told, load, taken["read"],
            beside="plain read", at_most=READ, note=told,
        ),
        ratio(
            "flush to disk", shape.told, taken["flush"], taken["write"],
            beside="plain write and fsync", note=f"{middle(taken['flush']) / 1e9:.2f} s in all",
        ),
    ]  # fmt: skip


def copied(groups: Sequence[Sequence[Path]], folder: Path) -> list[list[Path]]:
    """Copy files to where nothing removes them."""
    number = count()
    return [
        [Path(shutil.copy(path, folder / str(next(number)))) for path in group] for group in groups
    ]


def plain_read(groups: Sequence[Sequence[Path]]) -> Timed:
    """Read each entry's files into memory of their own that is there already."""
    sizes = [sum(path.stat().st_size for path in paths) for paths in groups]
    buffers = [np.zeros(size + 1, dtype=np.uint8).data for size in sizes]

    def read(_: int) -> int:
        taken = []
        for paths, size, buffer in zip(groups, sizes, buffers, strict=True):
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
    """Write one file and wait until it lasts; nanoseconds."""
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
