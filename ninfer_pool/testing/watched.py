"""An adapter whose every call is watched: it writes the requested pages, and no more."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

import numpy as np

from ninfer_pool.core.ledger import Pages
from ninfer_pool.core.pool import PrefixPool
from ninfer_pool.testing.adapter import EngineAdapter, Logits, Tokens


class Watched:
    """Fulfils `EngineAdapter`; reads back every page that the pool holds after each call.

    Args:
        engine: the adapter to watch. pool: its pool; free pages may hold anything.
        fail: called with the finding; raises.

    `before_call` and `after_call` are called with a method's name: faults are injected there.
    """

    def __init__(
        self, engine: EngineAdapter, pool: PrefixPool, fail: Callable[[str], NoReturn]
    ) -> None:
        self.engine = engine
        self.pool = pool
        self.config = engine.config
        self.namespace = engine.namespace
        self.vocab_size = engine.vocab_size
        self.before_call: Callable[[str], None] | None = None
        self.after_call: Callable[[str], None] | None = None
        self._fail = fail
        self._bytes: dict[int, bytes] = {}

    def forget(self, pages: Collection[int]) -> None:
        """What these pages hold may change from now on."""
        for page in pages:
            self._bytes.pop(page, None)

    def look(self, call: str, may_write: Collection[int]) -> None:
        """Read every held page and compare it with what it held before ``call``."""
        held = np.ones(self.pool.config.num_pages, dtype=bool)
        held[self.pool.state.ledger.free_pages()] = False
        now: dict[int, bytes] = {}
        for page in np.flatnonzero(held).tolist():
            now[page] = self.engine.read_page(page)
            if page not in may_write and now[page] != self._bytes.get(page, now[page]):
                first = _first_difference(now[page], self._bytes[page])
                self._fail(f"{call} wrote page {page}, which others read (from byte {first} on)")
        self._bytes = now

    def _call(self, name: str, *args: Any, may_write: Collection[int] = (), **given: Any) -> Any:
        if self.before_call is not None:
            self.before_call(name)
        try:
            made = getattr(self.engine, name)(*args, **given)
        except Exception as error:
            self._fail(f"{name} raised {type(error).__name__}: {error}")
        self.look(name, may_write)
        if self.after_call is not None:
            self.after_call(name)
        return made

    def _compute(self, name: str, what: Any, count: int, given: dict[str, Any]) -> Logits:
        size, begin = self.config.page_tokens, given["begin"]
        mine = given["table"][begin // size : (begin + count - 1) // size + 1].tolist()
        table = given["table"].copy()
        logits: Logits = np.array(self._call(name, what, may_write=mine, **given))
        if not np.array_equal(table, given["table"]):
            self._fail(f"{name} changed the page table that it was given")
        return logits

    def prefill(
        self, tokens: Tokens, *, lane: int, begin: int, table: Pages, **given: Any
    ) -> Logits:
        """Only the pages of the tokens' positions may be written."""
        given |= {"lane": lane, "begin": begin, "table": table}
        return self._compute("prefill", tokens, len(tokens), given)

    def decode(self, token: int, *, lane: int, begin: int, table: Pages, **given: Any) -> Logits:
        """Only the page of the token's position may be written."""
        given |= {"lane": lane, "begin": begin, "table": table}
        return self._compute("decode", token, 1, given)

    def save_image(self, lane: int, pages: Sequence[int]) -> None:
        """Only the image's pages may be written."""
        self._call("save_image", lane, pages, may_write=pages)

    def load_image(self, lane: int, pages: Sequence[int]) -> None:
        """No page may be written, least of all the image's own."""
        self._call("load_image", lane, pages)

    def reset(self, lane: int) -> None:
        """No page may be written."""
        self._call("reset", lane)

    def copy_page(self, source: int, target: int) -> None:
        """Only the target may be written; it must then hold what the source holds."""
        self._call("copy_page", source, target, may_write=(target,))
        if self.read_page(source) != self.read_page(target):
            first = _first_difference(self.read_page(source), self.read_page(target))
            self._fail(f"copy_page({source}, {target}): they differ from byte {first} on")

    def roll_back(self, lane: int, position: int) -> None:
        """No page may be written."""
        self._call("roll_back", lane, position)

    def tail_logits(self, lane: int) -> Logits:
        """No page may be written."""
        return np.array(self._call("tail_logits", lane))

    def read_page(self, page: int) -> bytes:
        """Changes nothing."""
        return self.engine.read_page(page)


def _first_difference(a: bytes, b: bytes) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), 0)
