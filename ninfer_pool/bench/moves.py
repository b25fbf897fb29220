"""Entries moved between a device and the tier below it, beside plain copies, reads and writes."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import xxhash
from numpy.typing import NDArray

from ninfer_pool import Lease, PoolConfig, PrefixPool, Prompt
from ninfer_pool.bench.ratios import Ratio, Timed, interleaved, ratio
from ninfer_pool.bench.worlds import PAGE_TOKENS, SPACE, random_tokens
from ninfer_pool.room import Bill, drop_entry
from ninfer_pool.tiers import ArrayPayload, Payload, Tiers, open_tiers

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
        """Store every entry in the tier; nanoseconds."""
        self._return_to_device()
        self._leave_tier()
        retained = self.pool.retained
        begin = time.perf_counter_ns()
        with self.pool.lock:
            for entry in list(retained.entries.values()):
                retained.leaving(entry, entry.tip)
        taken = time.perf_counter_ns() - begin
        self._check_below()
        return taken

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
        """Admit a request for every entry, which brings it back; nanoseconds of acquiring."""
        self._check_below()
        self._leave_device()
        taken, name = 0, self.tiers.shelves[0].name
        for prompt in self.prompts:
            begin = time.perf_counter_ns()
            lease = self.pool.acquire(prompt)
            taken += time.perf_counter_ns() - begin
            assert isinstance(lease, Lease), f"no room: {self.pool.last_refusal}"
            with lease:
                found = (lease.start, lease.explanation.tier)
                assert found == (len(prompt), name), f"resumed {found}, not all from {name}"
        return taken

    def files(self) -> list[Path]:
        """The payload files of all entries on disk."""
        return [*self.folder.glob("*/runs/*"), *self.folder.glob("*/images/*")]

    def _return_to_device(self) -> None:
        if not self.pool.retained.entries:
            self.up(0)

    def _check_below(self) -> None:
        if not self.tiers.shelves[0].records:
            self.down(0)
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
        host = {"host_budget": room} if tier == "host" else {}
        disk = {"disk_dir": folder, "disk_budget": 2 * room} if tier == "disk" else {}
        tiers = open_tiers(pool, payload, namespace=SPACE, background=False, **host, **disk)
        try:
            prompts = [
                Prompt(
                    random_tokens(shape.tokens, 5, number),
                    namespace=SPACE,
                    boundaries=[(shape.tokens, "turn")],
                )
                for number in range(shape.entries)
            ]
            moves = Moves(pool=pool, tiers=tiers, payload=payload, prompts=prompts, folder=Path(folder))
            moves.fill()
            moves.check()
            yield moves
        finally:
            tiers.close()


def host_rows(shape: Shape, *, repeats: int) -> list[Ratio]:
    """Saving to host memory and loading from it beside a plain copy of the same bytes."""
    with moving(shape, tier="host") as moves:
        taken = interleaved(
            {"save to host": moves.down, "load from host": moves.up, "copy": plain_copy(shape)},
            repeats=repeats,
        )
    return [
        ratio(op, shape.told, taken[op], taken["copy"], beside="plain copy", at_most=COPY)
        for op in ("save to host", "load from host")
    ]


def plain_copy(shape: Shape) -> Timed:
    """Copy each entry's bytes from one touched array to another."""
    each = (shape.pages * shape.page_bytes,)
    pairs = [(np.ones(each, np.uint8), np.zeros(each, np.uint8)) for _ in range(shape.entries)]

    def copy(_: int) -> int:
        begin = time.perf_counter_ns()
        for source, target in pairs:
            np.copyto(target, source)
        return time.perf_counter_ns() - begin

    return copy


def disk_rows(shape: Shape, *, repeats: int) -> list[Ratio]:
    """Loading from warm files beside reading them plainly; a flush beside a plain write."""
    with moving(shape, tier="disk") as moves, TemporaryDirectory(prefix="ninfer-bench-") as folder:
        copies = _copied(moves.files(), Path(folder))
        actions: dict[str, Timed] = {
            "load from disk": moves.up,
            "read": partial(plain_read, copies, bytearray(max(map(_size, copies)))),
            "flush to disk": moves.flush,
            "write": partial(plain_write, Path(folder) / "plain", shape.bytes),
        }
        taken = interleaved(actions, repeats=repeats)
    return [
        ratio(
            "load from disk", shape.told, taken["load from disk"], taken["read"],
            beside="plain read", at_most=READ,
        ),
        ratio(
            "flush to disk", shape.told, taken["flush to disk"], taken["write"],
            beside="plain write and fsync",
        ),
    ]  # fmt: skip


def _copied(files: Sequence[Path], folder: Path) -> list[Path]:
    """The same files where nothing removes them."""
    return [shutil.copy(file, folder / f"{number}") for number, file in enumerate(files)]


def _size(path: Path) -> int:
    return path.stat().st_size


def plain_read(files: Sequence[Path], buffer: bytearray, _: int) -> int:
    """Read warm files into a buffer that is there already; nanoseconds."""
    view = memoryview(buffer)
    begin = time.perf_counter_ns()
    for path in files:
        with path.open("rb", buffering=0) as file:
            at = 0
            while count := file.readinto(view[at:]):
                at += count
    return time.perf_counter_ns() - begin


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
