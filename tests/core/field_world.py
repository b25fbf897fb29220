"""The small world that the field cases are played in."""

from __future__ import annotations

import random
from typing import Any

from ninfer_pool import Lease, PoolConfig
from tests.machinery.driver import Driver

PAGE = 16
IMAGE = 2
ALL = 10_000


def driver(*, pages: int = ALL, **changes: Any) -> Driver:
    """A pool of pages of four tokens and images of two pages."""
    config = PoolConfig(
        num_pages=pages, page_bytes=PAGE, image_bytes=IMAGE * PAGE, page_tokens=4, grid=64
    )
    return Driver(config.replace(**changes))


def talk(number: int, length: int = 40) -> list[int]:
    """A prompt that shares nothing with those of other numbers."""
    return [1000 * (number + 1) + at for at in range(length)]


class Chat:
    """A conversation: each turn quotes all before it and adds a question."""

    def __init__(self, shop: Driver, number: int, *, system: list[int] | None = None) -> None:
        self.shop = shop
        self.rng = random.Random(number)
        self.system = talk(number, 24) if system is None else system
        self.tokens = list(self.system)

    def turn(self, **options: Any) -> int:
        """Run a turn; return the tokens that were prefilled."""
        self.tokens += self.fresh(6)
        answer = self.fresh(3)
        declared = [(len(self.system), "system"), (len(self.tokens), "turn")]
        done = self.shop.serve(self.tokens, boundaries=declared, answer=answer, **options)
        self.tokens += answer
        return done.prefilled

    def fresh(self, count: int) -> list[int]:
        """Tokens that nobody else says."""
        return [self.rng.randrange(100_000, 2**31) for _ in range(count)]


def begun(shop: Driver, tokens: Any, **options: Any) -> Lease:
    """A lease that must be had."""
    lease = shop.begin(tokens, **options)
    assert lease is not None
    return lease
