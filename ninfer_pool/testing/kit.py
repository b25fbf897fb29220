"""What the conformance tests are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from ninfer_pool.testing.adapter import EngineAdapter
from ninfer_pool.testing.host import Cold, Host, Running


class Kit:
    """An engine's factory, and hosts, tokens and cold runs made with it."""

    make: ClassVar[Callable[[], EngineAdapter]]
    others: ClassVar[Sequence[Callable[..., EngineAdapter]]] = ()
    examples: ClassVar[int | None]
    seed: ClassVar[int]
    tolerance: ClassVar[float | None]
    shrink: ClassVar[bool]
    _cold: ClassVar[Cold]

    def host(self, guarantee: str, **changes: Any) -> Host:
        """Return a fresh engine under a fresh pool."""
        engine = type(self).make()
        about = f"{guarantee}\n  replay: conformance(…, examples={self.examples}, seed={self.seed})"
        return Host(engine, self.cold(), about=about, tolerance=self.tolerance, **changes)

    @classmethod
    def cold(cls) -> Cold:
        """Return the cold engine of this class, the same every time."""
        if "_cold" not in cls.__dict__:
            cls._cold = Cold(cls.make())
        return cls._cold

    def words(self, host: Host, count: int, *, part: int = 0) -> list[int]:
        """Return ``count`` tokens at random; the same for the same part."""
        rng = np.random.default_rng((self.seed, part))
        return [int(token) for token in rng.integers(0, host.raw.vocab_size, count)]

    def two(self, host: Host) -> tuple[int, int]:
        """Return two different tokens."""
        first = self.words(host, 1, part=99)[0]
        return first, (first + 1) % host.raw.vocab_size

    def lanes(self, host: Host) -> int:
        """Return how many requests may run at once; skip the test where it is one."""
        if host.config.lanes < 2 or host.config.affinity == "strict":
            pytest.skip("needs two lanes that may resume one entry")
        return host.config.lanes

    def together(self, running: Sequence[Running], answer: Sequence[Sequence[int]]) -> None:
        """Restore, prefill and decode requests a step of each in turn; finish the last first."""
        for one in running:
            one.restore()
        going = list(running)
        while going:
            going = [one for one in going if one.step()]
        for tokens in zip(*answer, strict=True):
            for one, token in zip(running, tokens, strict=True):
                one.decode([token])
        for one in reversed(running):
            with one:
                one.finish()
