"""The proof kit passes engines that are right, refuses incomplete ones, and says why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from ninfer_pool import ConfigError
from ninfer_pool.core.ledger import Pages
from ninfer_pool.testing import conformance
from ninfer_pool.testing.adapter import Logits, Tokens, refuse
from ninfer_pool.testing.conformance import failures, pages_needed
from ninfer_pool.testing.failing import asked_for
from ninfer_pool.testing.host import compare
from ninfer_pool.testing.toy import Array, ToyEngine
from tests.machinery.broken import HiddenTailForgotten, SharedPageWritten, TruncateThatLies


def plain(*, num_pages: int = 64, lanes: int = 2) -> ToyEngine:
    return ToyEngine(num_pages=num_pages, lanes=lanes, recurrent=False)


def without_end_logits(*, num_pages: int = 64, lanes: int = 2) -> ToyEngine:
    return ToyEngine(num_pages=num_pages, lanes=lanes, end_logits=False)


class LargePages(ToyEngine):
    """Pages of another size, one image a page; no grid edge within a prompt."""

    def __init__(self, *, num_pages: int = 64, lanes: int = 2) -> None:
        super().__init__(num_pages=num_pages, lanes=lanes, page_tokens=7, grid=512)


class Bare:
    """The least that an adapter can be: no roll-back, no poison, no positions."""

    recurrent = True

    def __init__(self, num_pages: int, lanes: int) -> None:
        sizes = {"num_pages": num_pages, "lanes": lanes}
        self._toy = ToyEngine(recurrent=self.recurrent, end_logits=False, **sizes)
        self.config = self._toy.config
        self.namespace = self._toy.namespace
        self.vocab_size = self._toy.vocab_size
        self.save_image = self._toy.save_image
        self.load_image = self._toy.load_image
        self.reset = self._toy.reset
        self.copy_page = self._toy.copy_page
        self.read_page = self._toy.read_page

    def prefill(self, tokens: Tokens, *, lane: int, begin: int, table: Pages) -> Logits:
        return self._toy.prefill(tokens, lane=lane, begin=begin, table=table)

    def decode(self, token: int, *, lane: int, begin: int, table: Pages) -> Logits:
        return self._toy.decode(token, lane=lane, begin=begin, table=table)


class BarePlain(Bare):
    """The same of plain attention."""

    recurrent = False


class ShapesCount(ToyEngine):
    """Its bits depend on how prefill was cut, as those of a matrix product do."""

    tolerance = 1e-3
    error = 1e-6

    def prefill(
        self, tokens: Tokens, *, lane: int, begin: int, table: Pages, positions: Any = None
    ) -> Logits:
        super().prefill(tokens, lane=lane, begin=begin, table=table, positions=positions)
        self.lanes[lane].tail = self.lanes[lane].tail * np.float32(1 + self.error * len(tokens))
        return self.tail_logits(lane)


class Strict(ToyEngine):
    """Its state cannot move to another lane."""

    def __init__(self, *, num_pages: int = 64, lanes: int = 2) -> None:
        super().__init__(num_pages=num_pages, lanes=lanes)
        self.config = self.config.replace(affinity="strict", min_chunk=3, minimum_tokens=5)


TestToy = conformance(ToyEngine, others=[lambda: ToyEngine(seed=1), plain])
TestPlain = conformance(plain)
TestWithoutEndLogits = conformance(without_end_logits, examples=20)
TestLargePages = conformance(LargePages, examples=10)
TestBare = conformance(Bare, examples=20)
TestBarePlain = conformance(BarePlain, examples=10)
TestOneLane = conformance(lambda: ToyEngine(num_pages=200, lanes=1), examples=20)
TestStrict = conformance(Strict, examples=20)
TestShapesCount = conformance(ShapesCount, examples=20)


def test_the_tests_collected_are_those_that_matter(request: pytest.FixtureRequest) -> None:
    names = {item.name.partition("[")[0] for item in request.session.items}
    assert {name for name in dir(TestToy) if name.startswith("test_")} <= names


# -- what is exact is compared bit by bit, and the rest within a tolerance -----------------------


def test_tolerance_0_wants_the_bits_of_what_was_cut_elsewhere() -> None:
    error = failures(conformance(ShapesCount, tolerance=0.0), only="frontier")
    assert "not one bit is allowed" in str(list(error.values()))


def test_a_large_error_is_found_within_no_tolerance() -> None:
    class FarOff(ShapesCount):
        error = 0.05

    error = failures(conformance(FarOff), only="frontier")
    assert "at most 0.001 is allowed" in str(list(error.values()))


@pytest.mark.parametrize(
    ("hot", "cold", "tolerance", "said"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0, None),
        ([1.0, 2.0], [1.0, 2.0000001], 0.0, "RMS ratio"),
        ([1.0, 2.0], [1.0, 2.001], 0.01, None),
        ([1.0, 2.1], [1.0, 2.0], 0.01, "RMS ratio"),
        ([2.0, 2.0001], [2.0001, 2.0], 0.01, None),
        ([1.0, float("nan")], [1.0, 2.0], 0.01, "not finite"),
    ],
)
def test_logits_are_compared(
    hot: list[float], cold: list[float], tolerance: float, said: str | None
) -> None:
    found = compare(np.array(hot), np.array(cold), tolerance=tolerance)
    assert found is None if said is None else said in str(found)


def test_another_greedy_choice_is_seen_within_a_wide_tolerance() -> None:
    cold = np.zeros(10_000)
    cold[:2] = (100.0, 0.0)
    hot = cold.copy()
    hot[:2] = (99.0, 99.5)
    assert compare(hot, cold, tolerance=1e-3) is not None


# -- messages ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "test", "said"),
    [
        (HiddenTailForgotten, "page_edge", ["G5", "after 7 of", "resumed at 7", "seed=5"]),
        (SharedPageWritten, "page_edge[0]", ["wrote page", "others read", "seed=5"]),
        (TruncateThatLies, "drafts", ["three drafts from", "0 accepted", "seed=5"]),
    ],
)
def test_a_failure_says_which_guarantee_where_and_how_to_replay(
    engine: type[ToyEngine], test: str, said: list[str]
) -> None:
    found = failures(conformance(engine, seed=5), only=test.partition("[")[0], first=False)
    text = str(next(error for name, error in found.items() if test in name))
    assert not [part for part in said if part not in text], text


def test_a_page_table_is_not_the_engines_to_change() -> None:
    class Turns(ToyEngine):
        def read(self, lane: int, count: int, table: Pages) -> Array:
            rows = super().read(lane, count, table)
            table[::-1].sort()
            return rows

    assert "changed the page table" in str(failures(conformance(Turns), only="page_edge"))


def test_a_seed_replays() -> None:
    def told(seed: int) -> str:
        proof = conformance(HiddenTailForgotten, seed=seed, examples=10, shrink=False)
        return str(failures(proof, only="random"))

    assert told(3) == told(3)


# -- refusals ------------------------------------------------------------------------------------


def sized(**changes: Any) -> ToyEngine:
    engine = ToyEngine()
    engine.config = engine.config.replace(**changes)
    return engine


def lacking(name: str) -> ToyEngine:
    engine = ToyEngine()
    setattr(engine, name, None)
    return engine


class PagesOfFour(ToyEngine):
    """Says that two tokens fit a page, and writes four."""

    def __init__(self) -> None:
        super().__init__()
        self.config = self.config.replace(page_tokens=2)

    def write(self, lane: int, at: int, table: Pages, row: Array) -> None:
        self.rows[table[at // 4], at % 4] = row


class ImageTooLarge(ToyEngine):
    def save_image(self, lane: int, pages: Sequence[int]) -> None:
        super().save_image(lane, [*pages, pages[-1] + 1])


class SlackUsed(ToyEngine):
    def save_image(self, lane: int, pages: Sequence[int]) -> None:
        super().save_image(lane, pages)
        self.slab[pages[-1], -1] = 7


class NotANumber(ToyEngine):
    def tail_logits(self, lane: int) -> Logits:
        return super().tail_logits(lane) * np.float32("nan")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: lacking("config"), "config: NoneType"),
        (lambda: lacking("namespace"), "namespace: missing"),
        (lambda: lacking("vocab_size"), "vocab_size: None"),
        (lambda: lacking("save_image"), "save_image: missing"),
        (lambda: lacking("copy_page"), "copy_page: missing"),
        (lambda: lacking("tail_logits"), "tail_logits: missing"),
        (lambda: sized(page_bytes=100), r"page_bytes: 100; read_page\(0\) gives 384"),
        (lambda: sized(num_pages=65), "num_pages: raised IndexError"),
        (lambda: sized(lanes=3), "lanes: raised IndexError"),
        (lambda: sized(page_tokens=8), "page_tokens: 8; prefill of 9 tokens"),
        (PagesOfFour, r"page_tokens: 2; prefill of 3 tokens .* wrote the pages"),
        (lambda: sized(image_bytes=300), "image_bytes: 300; save_image into 1 pages"),
        (lambda: sized(image_bytes=604), "image_bytes: 604; save_image .* more bytes"),
        (lambda: sized(image_bytes=0), "end_logits: True"),
        (ImageTooLarge, "as well"),
        (SlackUsed, "more bytes than that"),
        (NotANumber, "not finite"),
        (lambda: ToyEngine(num_pages=5), "num_pages: 5; two pages and two images need 6"),
    ],
)
def test_an_adapter_that_is_not_complete_or_of_another_size_is_refused(
    make: Any, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        refuse(make())
    with pytest.raises(ConfigError):
        conformance(make)


def test_a_factory_must_keep_to_the_sizes_that_it_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="num_pages: 64; the factory was asked for"):
        conformance(lambda num_pages: ToyEngine())
    needed = pages_needed(ToyEngine().config)
    with pytest.raises(ConfigError, match=f"num_pages: 64; the tests need {needed}"):
        conformance(lambda: ToyEngine())


def test_a_profile_that_asks_for_more_examples_gets_them() -> None:
    assert [asked_for(profile) for profile in (10, 100, 2_000)] == [40, 40, 2_000]


@pytest.mark.parametrize(
    "options", [{"examples": 0}, {"seed": -1}, {"seed": 0.5}, {"tolerance": 1.0}]
)
def test_an_option_out_of_range_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        conformance(ToyEngine, **options)


def test_a_factory_is_a_function() -> None:
    engine: Any = ToyEngine()
    with pytest.raises(ConfigError, match="engine_factory"):
        conformance(engine)
