"""What comes back from any tier, by any way, gives the bits of a cold run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

import numpy as np  # noqa: E402

from ninfer_pool.core.eviction import evict_for  # noqa: E402
from ninfer_pool.core.results import EvictionCost  # noqa: E402
from ninfer_pool.runner import TINY  # noqa: E402
from ninfer_pool.runner.model import Model  # noqa: E402
from ninfer_pool.runner.runner import Runner  # noqa: E402
from ninfer_pool.tiers.payload import assemble  # noqa: E402
from ninfer_pool.tiers.sources import ShelfSource  # noqa: E402
from tests.runner.models import random_model  # noqa: E402
from tests.runner.world import (  # noqa: E402
    Boundaries,
    Seen,
    assert_same_bits,
    make,
    poison,
    serve,
)

torch.set_num_threads(1)

KINDS = {
    "fp32": ("fp32", "fp32"),
    "fp32-bf16": ("fp32", "bf16"),
    "bf16": ("bf16", "bf16"),
    "bf16-int8": ("bf16", "int8-g64"),
}
WAYS = {
    "host": ("host",),
    "disk": ("disk",),
    "host-disk": ("host", "disk"),
    "restart": ("disk", "restart"),
    "host-disk-restart": ("host", "disk", "restart"),
}
_models: dict[str, Model] = {}


def model_of(dtype: str) -> Model:
    if dtype not in _models:
        _models[dtype] = random_model(3, dtype=dtype, head_dim=64)
    return _models[dtype]


class World:
    """A runner with the tiers of one way, the same runner without any, and the way's end."""

    def __init__(self, kind: str, way: str, path: Path, **options: Any) -> None:
        dtype, kv_dtype = KINDS[kind]
        self.model, self.path, self.way = model_of(dtype), path, WAYS[way]
        self.options = {"kv_dtype": kv_dtype, **options}
        self.runner = self.open(shuffle=1)

    def open(self, *, shuffle: int) -> Runner:
        tiers: dict[str, Any] = {"background": False}
        if "host" in self.way:
            tiers["host_budget"] = "8MiB"
        if "disk" in self.way:
            tiers |= {"disk_dir": self.path, "disk_budget": "64MiB"}
        return make(self.model, shuffle=shuffle, num_pages=60, **self.options, **tiers)

    def go_down(self) -> None:
        """Everything on the device goes down the whole way, and its pages are poisoned."""
        runner = self.runner
        if "restart" in self.way:
            assert runner.tiers.flush() == 0
            runner.close()
            self.runner = self.open(shuffle=2)
            return
        pool = runner.pool
        with pool.state.lock:
            evict_for(pool.state, pool.config.num_pages, EvictionCost())
        assert not pool.state.catalog.entries, "something stayed on the device"
        if self.way == ("host", "disk"):
            host, disk = runner.tiers.shelves
            with pool.state.lock:
                assert host.make_room(host.medium.budget, tick=pool.state.tick)
            assert not host.records
            assert disk.records
        poison(runner)

    def cold(self, tokens: list[int], boundaries: Boundaries, **options: Any) -> Seen:
        """The same request in a runner that has seen nothing."""
        return serve(make(self.model, num_pages=60, **self.options), tokens, boundaries, **options)

    def warm(self, tokens: list[int], boundaries: Boundaries, **options: Any) -> Seen:
        """The request, which must resume from the last tier of the way, to the bit."""
        prompt = self.runner.prompt(tokens, boundaries=boundaries)
        assert (
            self.runner.pool.explain(prompt, exact=True).tier
            == [each for each in self.way if each != "restart"][-1]
        )
        seen = serve(self.runner, tokens, boundaries, exact=True, **options)
        assert seen.generation.exact
        return seen

    def close(self) -> None:
        self.runner.close()


def prompt_of(length: int, seed: int = 37) -> list[int]:
    return [(seed * at) % 198 + 1 for at in range(length)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_from_a_tier_gives_the_bits_of_a_cold_run(
    kind: str, drafts: int, way: str, tmp_path: Path
) -> None:
    """At the last checkpoint, and by a branch from the one before it; then a turn further on."""
    world = World(kind, way, tmp_path / "disk", draft_tokens=drafts)
    tokens, boundaries = prompt_of(150), [(70, "system"), (150, "turn")]
    serve(world.runner, tokens, boundaries, steps=6)
    world.go_down()
    longer, more = [*tokens, *prompt_of(9, 5)], [*boundaries, (159, "turn")]
    seen = world.warm(longer, more, steps=12)
    assert seen.start == 150
    assert_same_bits(seen, world.cold(longer, more, steps=12))
    world.go_down()
    branch = [*tokens[:70], *prompt_of(20, 11)]
    bounds: Boundaries = [(70, "system"), (90, "turn")]
    seen = world.warm(branch, bounds, steps=8)
    assert seen.start == 70
    assert_same_bits(seen, world.cold(branch, bounds, steps=8))
    world.close()


@pytest.mark.parametrize("way", ["host", "restart", "host-disk"])
@pytest.mark.parametrize("edge", [-1, 0, 1])
@pytest.mark.parametrize("kind", ["fp32", "bf16-int8"])
def test_page_edges(kind: str, edge: int, way: str, tmp_path: Path) -> None:
    """Checkpoints at a page's edge, one before and one after; two tokens that part there."""
    at = 128 + edge
    tokens, bounds = prompt_of(at), [(at, "turn")]
    for number, rest in enumerate(([], [7], [8, *prompt_of(70)])):
        world = World(kind, way, tmp_path / str(number), draft_tokens=2)
        serve(world.runner, tokens, bounds, steps=3)
        world.go_down()
        asked = [*tokens, *rest]
        told = [*bounds, (len(asked), "turn")] if rest else bounds
        seen = world.warm(asked, told, steps=5)
        assert seen.start == at
        assert_same_bits(seen, world.cold(asked, told, steps=5))
        world.close()


@pytest.mark.parametrize("kind", ["fp32-bf16", "bf16-int8"])
def test_a_conversation_that_lives_below_between_its_turns(kind: str, tmp_path: Path) -> None:
    """Every turn is resumed from disk in another process, each grows by a part of a page."""
    world = World(kind, "restart", tmp_path / "disk")
    tokens, bounds = prompt_of(40), [(40, "system")]
    for turn in range(4):
        tokens = [*tokens, *prompt_of(17 + 9 * turn, 3 + turn)]
        bounds = [*bounds, (len(tokens), "turn")]
        seen = (world.warm if turn else self_serve(world))(tokens, bounds, steps=5)
        assert (seen.start > 40) == (turn > 0)
        assert_same_bits(seen, world.cold(tokens, bounds, steps=5))
        world.go_down()
    world.close()


def self_serve(world: World) -> Any:
    """As `World.warm`, of what was never served."""
    return lambda tokens, bounds, **options: serve(world.runner, tokens, bounds, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_pages_below_are_those_of_the_device_byte_for_byte(kind: str, tmp_path: Path) -> None:
    """Every row of every checkpoint, and every byte of every image; in both tiers."""
    world = World(kind, "host-disk", tmp_path / "disk", draft_tokens=2)
    runner = world.runner
    tokens = prompt_of(150)
    bounds: Boundaries = [(63, "system"), (129, "history"), (150, "turn")]
    serve(runner, tokens, bounds, steps=9)
    entry = next(iter(runner.pool.state.catalog.entries.values()))
    rows: dict[int, Any] = {}
    images: dict[int, Any] = {}
    ledger, slab, size = runner.pool.state.ledger, runner.slab.pages.numpy(), 64
    for mark in runner.pool.state.catalog.path_checkpoints(entry):
        rows[mark.position] = slab[mark.kv_pages(size)].copy()
        images[mark.position] = slab[ledger.pages_of_image(mark.image)].copy()
    world.runner.tiers.flush()
    assert compare(runner, "disk", rows, images) == len(rows) == 4
    world.way = ("host",)
    world.go_down()
    assert compare(runner, "host", rows, images) == 4
    world.close()


def compare(runner: Runner, tier: str, rows: dict[int, Any], images: dict[int, Any]) -> int:
    """Compare what a tier holds with what lay on the device; returns how many checkpoints."""
    [shelf] = [each for each in runner.tiers.shelves if each.name == tier]
    payload, source = runner.tiers.payload, ShelfSource(shelf)
    assert payload is not None
    regions = payload.regions
    assert regions is not None
    [record] = shelf.records.values()
    image_bytes = runner.pool.config.image_bytes
    for kept in record.marks:
        pages = assemble(
            kept.stored.runs, kept.position, page_tokens=64, regions=regions, rows_of=source.rows
        )
        for at, page in enumerate(pages):
            filled = min(64, kept.position - 64 * at)
            for offset, outer, row in regions:
                end = offset + outer * 64 * row
                mine, right = (
                    each[offset:end].reshape(outer, 64, row)[:, :filled]
                    for each in (page, rows[kept.position][at])
                )
                assert (mine == right).all()
        assert kept.stored.image is not None
        flat = np.concatenate(source.rows(kept.stored.image))[:image_bytes]
        assert (flat == images[kept.position].ravel()[:image_bytes]).all()
    return len(record.marks)


def test_the_shipped_model_resumes_after_a_restart(tmp_path: Path) -> None:
    """From its folder, as a server would: tokens and logits of a cold run."""
    tiers: dict[str, Any] = {"disk_dir": tmp_path / "disk", "disk_budget": "256MiB"}
    runner = Runner.from_pretrained(TINY, kv_budget="32MiB", max_context=512, **tiers)
    tokens = [5 + at % 90 for at in range(200)]
    bounds: Boundaries = [(120, "system"), (200, "turn")]
    cold = serve(runner, tokens, bounds, steps=16, exact=True)
    assert runner.tiers.flush() == 0
    runner.close()
    runner = Runner.from_pretrained(TINY, kv_budget="32MiB", max_context=512, **tiers)
    warm = serve(runner, tokens, bounds, steps=16, exact=True)
    assert (warm.start, warm.generation.exact) == (200, True)
    assert_same_bits(warm, cold)
    runner.close()
